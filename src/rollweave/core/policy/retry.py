"""Decide what is retried after a failure, how often a failing component is restarted,
and what is removed if that does not help.
"""

import enum

from rollweave.schema.work import StopReason

RETRYABLE = frozenset(
    {
        StopReason.ENV_ERROR,
        StopReason.ENV_HANG,
        StopReason.REWARD_ERROR,
        StopReason.REWARD_HANG,
        StopReason.REWARD_UNAVAILABLE,
        StopReason.TEACHER_ERROR,
        StopReason.ENGINE_FAILURE,
        StopReason.WORLD_LOST,
        StopReason.WORKER_LOST,
        StopReason.IMAGE_ERROR,
    }
)
"""Failures that say nothing about the agent: another attempt may succeed. A time budget
that was used up would be used up again.
"""


MAX_WORLDS_LOST = 5
"""Number of controllers and workers lost while a trajectory was under way after which
it is given up: it may be the cause.
"""

DETERMINISTIC = frozenset({StopReason.ENV_ERROR, StopReason.REWARD_ERROR})
"""Stop reasons of failures of code, which describe themselves: the same words twice
mean a bug that would recur.
"""


def try_again(
    reason: StopReason, *, attempt: int, retries: int, worlds: int = 0, repeated: bool = False
) -> bool:
    """True if attempt number `attempt` (from 0), ended by `reason`, is to be followed
    by another.

    `repeated` is true if the attempt before it failed at the same stage with the same
    text. `worlds` counts the controllers and workers that were lost while the
    trajectory was under way. Another attempt follows such a loss unless there were too
    many, since the trajectory is rarely the cause.
    """
    if reason in (StopReason.WORLD_LOST, StopReason.WORKER_LOST):
        return worlds < MAX_WORLDS_LOST
    if reason in DETERMINISTIC and repeated:
        return False
    return reason in RETRYABLE and attempt < retries


MIN_BROKEN_TASKS = 6
"""Minimum number of tasks at which the code of a task domain must have failed in the
same way to count as broken: a few tasks may be wrong, or fail by chance.
"""


def is_broken(*, tasks: int, failed: int, under_way: int) -> bool:
    """Return whether a task domain's code is broken, in a stage that no attempt has
    passed yet: `failed` trajectories of so many tasks have failed there with the same
    error, and `under_way` others have begun, which may still pass it.

    Trajectories are compared, and not tasks: where a failure takes less time than a
    success, many tasks soon have a member that failed, although most may pass.
    """
    return tasks >= MIN_BROKEN_TASKS and failed >= under_way


TIMEOUTS_BEFORE_RESTART = 2
"""Number of consecutive timeouts of turns at which an engine is restarted: one may be a
long turn, two are a stuck engine.
"""


class Failover(enum.Enum):
    RESTART = "restart"  # the engine, in place
    REMOVE_ENGINE = "remove_engine"
    EVICT_MACHINE = "evict_machine"  # with its relay and all its engines


def failover(*, restarts: int, limit: int, elsewhere: int, moved: bool = False) -> Failover:
    """Decide about an engine that has failed, after `restarts` that did not help
    (Laminar §3.3).

    Beyond `limit` restarts the fault is attributed to its machine, which is removed as
    a whole, so that nothing else fails on it. But if no engine serves `elsewhere`, on
    other machines, what still works on this one stays; and if the engine has `moved`
    from a machine that was removed for its failures, the engine is at fault. Raises
    ValueError for negative counts.
    """
    for name, count in (("restarts", restarts), ("limit", limit), ("elsewhere", elsewhere)):
        if count < 0:
            raise ValueError(f"{name} must be at least 0, got {count}")
    if restarts < limit:
        return Failover.RESTART
    return Failover.EVICT_MACHINE if elsewhere and not moved else Failover.REMOVE_ENGINE
