"""Decide what is retried after a failure, how often a failing component is restarted,
what is removed if that does not help, and how long an engine that gave turns back
rests.
"""

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
"""Failures that say nothing about the agent, so that another attempt may succeed. An
exhausted time budget is not among these failures: the next attempt would exhaust it,
too.
"""


MAX_WORLDS_LOST = 5
"""A trajectory is given up when this number of controllers and workers were lost while
it was under way, since it may be the cause.
"""

DETERMINISTIC = frozenset({StopReason.ENV_ERROR, StopReason.REWARD_ERROR})
"""Stop reasons of errors that code has raised: the same text twice means a bug that
would recur.
"""


def try_again(
    reason: StopReason, *, attempt: int, retries: int, worlds: int = 0, repeated: bool = False
) -> bool:
    """True if attempt number `attempt` (from 0), which `reason` ended, is to be
    followed by another attempt.

    `repeated` is true if the attempt before it failed at the same stage with the same
    text. `worlds` counts the controllers and workers that were lost while the
    trajectory was under way. Since the trajectory is rarely the cause, another attempt
    follows such a loss, regardless of `retries`, until there were `MAX_WORLDS_LOST`.
    """
    if reason in (StopReason.WORLD_LOST, StopReason.WORKER_LOST):
        return worlds < MAX_WORLDS_LOST
    if reason in DETERMINISTIC and repeated:
        return False
    return reason in RETRYABLE and attempt < retries


MIN_BROKEN_TASKS = 6
"""Minimum number of tasks on which the code of a task domain must fail in the same way
to count as broken, since a few tasks may be wrong, or fail by chance.
"""


def is_broken(*, tasks: int, failed: int, under_way: int) -> bool:
    """Return whether a task domain's code counts as broken at a stage that no attempt
    has passed yet. `failed` trajectories at `tasks` distinct tasks have failed there in
    the same way (`schema/text`); `under_way` others have begun, and may still pass
    it.

    Trajectories are compared, and not tasks: if failures take less time than successes,
    many tasks soon have a member that has failed, although most members may pass.
    """
    return tasks >= MIN_BROKEN_TASKS and failed >= under_way


TIMEOUTS_BEFORE_RESTART = 2
"""Number of consecutive timeouts of turns at which an engine is restarted: one timeout
may be due to a long turn, two mean that the engine is stuck.
"""


def gives_up_host(*, elsewhere: int, moved: bool) -> bool:
    """Return whether the host of an engine is given up, with its relay and all its
    engines, since the engine has failed too often (Laminar §3.3).

    The fault is attributed to the host, so that nothing else fails on it. In two cases
    only the engine is removed: if no engine serves `elsewhere`, on other hosts, so that
    the working engines of this host must stay; and if the engine has `moved` here from
    a host that was given up for its failures, so that the engine itself is at fault.
    """
    return elsewhere > 0 and not moved


FIRST_REST_S, MOST_REST_S = 2.0, 60.0
"""Seconds for which an engine that gave turns back gets no turns: after the first time
(as long as a stall, ROSE §4.1), and at most.
"""


def rest_s(times: int) -> float:
    """Return the seconds for which an engine gets no turns after it gave turns back
    `times` times since it last finished a turn: twice as long as after the time before.

    Serving that leaves rollouts no time, or no memory, will often do so again soon, and
    each turn that tries waits for a stall. Raises ValueError for less than one time.
    """
    if times < 1:
        raise ValueError(f"times must be at least 1, got {times}")
    return min(MOST_REST_S, FIRST_REST_S * 2.0 ** min(times - 1, 10))
