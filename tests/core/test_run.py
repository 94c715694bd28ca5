"""A run derives values from its configuration."""

import pytest

from rollweave.core.core import Core
from tests.support.core import config


@pytest.mark.parametrize(("mode", "expected"), [("stream", 2), ("bounded", 1)])
def test_only_streamed_steps_are_trained_in_parts(mode: str, expected: int) -> None:
    core = Core(config(mode, trainer={"minibatches": 2}))
    assert core._run.minibatches_per_step == expected
