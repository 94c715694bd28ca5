"""Retries: a failure that may pass is retried, and the same bug never runs a third
time.
"""

import itertools

import pytest

from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.work import StopReason
from tests.support.core import config
from tests.support.random_world import World


class Broken(World):
    """A world in which every environment start of group g1 fails with the errors in
    `words`; nothing else fails.
    """

    def __init__(self, reason: StopReason, words: str) -> None:
        super().__init__(config(steps=2, rollout={"retries": 5}), seed=3)
        self.reason, self.words = reason, words
        self.counted = itertools.count()
        self.attempts: dict[str, int] = {}

    def execute(self, command: c.Command) -> None:
        if isinstance(command, c.StartInit) and command.group_id == "g1":
            self.attempts[command.trajectory_id] = command.attempt + 1
            error = self.words.format(number=next(self.counted))
            key = {"trajectory_id": command.trajectory_id, "attempt": command.attempt}
            self.later(e.TrajectoryEnded(**key, stop_reason=self.reason, error=error))
        else:
            super().execute(command)


@pytest.mark.parametrize(
    ("reason", "words", "attempts"),
    [
        (StopReason.ENV_ERROR, "reset raised KeyError: 'map'", 2),
        (StopReason.ENV_ERROR, "reset raised OSError: port {number} is taken", 6),
        (StopReason.ENV_ERROR, "", 6),
        (StopReason.ENV_HANG, "starting did not answer within 60 s", 6),
    ],
)
def test_the_same_failure_twice_is_not_retried(
    reason: StopReason, words: str, attempts: int
) -> None:
    world = Broken(reason, words)
    world.run()
    assert set(world.attempts.values()) == {attempts}
    assert world.finish is not None
    assert world.finish.error == ""
    assert world.core.state.last_failure == f"{reason}: {words}" or "{number}" in words
