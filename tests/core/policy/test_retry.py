"""Retries of attempts, and failover of machines."""

import pytest

from rollweave.core.policy.retry import MAX_WORLDS_LOST, RETRYABLE, Failover, failover, try_again
from rollweave.schema.work import TRAINABLE, StopReason


def test_only_failures_that_say_nothing_about_the_agent_are_tried_again() -> None:
    assert not RETRYABLE & TRAINABLE
    assert try_again(StopReason.ENV_ERROR, attempt=1, retries=2)
    assert not try_again(StopReason.ENV_ERROR, attempt=2, retries=2)
    assert try_again(StopReason.WORLD_LOST, attempt=99, retries=0, worlds=MAX_WORLDS_LOST - 1)
    assert not try_again(StopReason.WORLD_LOST, attempt=0, retries=99, worlds=MAX_WORLDS_LOST)
    # the same words twice are a bug where they are an error, and nothing new where they
    # are a wait
    for reason in StopReason:
        once, twice = (
            try_again(reason, attempt=1, retries=9, repeated=repeated) for repeated in (False, True)
        )
        assert once == twice or reason in (StopReason.ENV_ERROR, StopReason.REWARD_ERROR)
    assert not try_again(StopReason.REWARD_ERROR, attempt=1, retries=9, repeated=True)
    for reason in (
        StopReason.FINISHED,
        StopReason.STALE,
        StopReason.SURPLUS,
        StopReason.CANCELLED,
        StopReason.TIME_BUDGET,
    ):
        assert not try_again(reason, attempt=0, retries=2)


@pytest.mark.parametrize(
    ("restarts", "elsewhere", "expected"),
    [
        (0, 0, Failover.RESTART),
        (2, 5, Failover.RESTART),
        (3, 5, Failover.EVICT_MACHINE),
        (4, 1, Failover.EVICT_MACHINE),
        (3, 0, Failover.REMOVE_ENGINE),
    ],
)
def test_a_machine_is_removed_after_its_restarts_if_others_can_continue(
    restarts: int, elsewhere: int, expected: Failover
) -> None:
    assert failover(restarts=restarts, limit=3, elsewhere=elsewhere) is expected
    followed = failover(restarts=restarts, limit=3, elsewhere=elsewhere, moved=True)
    assert followed is (Failover.RESTART if restarts < 3 else Failover.REMOVE_ENGINE)


def test_counts_of_failures_are_not_negative() -> None:
    with pytest.raises(ValueError, match="restarts must be at least 0, got -1"):
        failover(restarts=-1, limit=3, elsewhere=0)
