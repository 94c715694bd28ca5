"""What is tried again after a failure, and how often an ailing component is restarted."""

from rollweave.schema.work import StopReason

RETRYABLE = frozenset(
    {
        StopReason.ENV_ERROR,
        StopReason.ENV_HANG,
        StopReason.REWARD_ERROR,
        StopReason.REWARD_HANG,
        StopReason.ENGINE_FAILURE,
        StopReason.WORLD_LOST,
    }
)
"""Failures that say nothing about the agent: another attempt may well succeed. A spent time budget would be spent again."""


def try_again(reason: StopReason, *, attempt: int, retries: int) -> bool:
    """True if attempt number `attempt` (from 0), ended by `reason`, is to be followed by another.

    A lost world is not the trajectory's doing and is always followed.
    """
    return reason is StopReason.WORLD_LOST or (reason in RETRYABLE and attempt < retries)


STRIKES_BEFORE_RESTART = 2
"""Turns in a row that an engine may let time out: one may be a long turn, two are a stuck engine."""
