"""Results of members of rollouts, as a service reports them."""

from typing import Any

from rollweave.schema.base import GroupId, TaskId, TrajectoryId
from rollweave.schema.work import Blame, Limits, StopReason, Task, Trajectory
from rollweave_service.messages import MemberStatus


def result(reason: StopReason = StopReason.FINISHED, **fields: Any) -> Trajectory:
    known = {
        "id": TrajectoryId("r1.0"),
        "group_id": GroupId("r1"),
        "task": Task(id=TaskId("t"), env="game", seed=0, limits=Limits()),
        "attempt": 0,
        "initiated_version": 0,
        "sequences": (),
        "reward": None,
        "stop_reason": reason,
        "blame": Blame.NONE,
    }
    return Trajectory(**{**known, **fields})


def done(result: Trajectory | None, reason: str | None = None) -> MemberStatus:
    """Return a member with this result, which ended for its reason, or for `reason`."""
    reason = result.stop_reason if result is not None else reason
    return MemberStatus(
        id=TrajectoryId("r1.0"), stage="done", attempt=0, stop_reason=reason, result=result
    )
