"""Training with two servers of `sglang_server.py`, one of which is killed and the other
stopped. SGLang itself was never run.
"""

from pathlib import Path

import pytest

from packages.servers.tests.lost_servers import lose_nothing_with_lost_servers
from packages.servers.tests.sglang_package import sglang_python
from tests.support import real_runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("mode", ["bounded", "partial", "decoupled"])
def test_nothing_is_lost_with_a_killed_server_and_one_that_stops_in_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(real_runs, "LIMIT_S", 400.0)
    lose_nothing_with_lost_servers(
        tmp_path, mode=mode, kind="sglang", name="SGLang", python=sglang_python(tmp_path)
    )
