"""Retries of attempts, and failover of machines."""

import pytest

from rollweave.core.policy.retry import MAX_WORLDS_LOST, RETRYABLE, gives_up_host, try_again
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


@pytest.mark.parametrize(("elsewhere", "expected"), [(5, True), (1, True), (0, False)])
def test_a_host_is_given_up_if_others_can_continue(elsewhere: int, expected: bool) -> None:
    assert gives_up_host(elsewhere=elsewhere, moved=False) is expected
    assert not gives_up_host(elsewhere=elsewhere, moved=True)
