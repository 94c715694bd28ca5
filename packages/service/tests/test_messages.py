"""Which requests are accepted, and what is said of those that are refused
(`calls.toml`).
"""

from pathlib import Path

import pytest

from rollweave_service import messages
from tests.support.calls import check_rows, table

TABLE = table(Path(__file__).with_name("calls.toml"))


@pytest.mark.parametrize("name", TABLE)
def test_accepts_and_refuses(name: str) -> None:
    check_rows(getattr(messages, name), TABLE[name])
