"""A store with the scored trajectories of two groups."""

from rollweave.record.store import Ended, Scored, TrajectoryStore
from rollweave.schema import work
from rollweave.schema.base import GroupId, TaskId, TrajectoryId

GROUPS = {GroupId("g0"): 3, GroupId("g1"): 2}
LONG = tuple(range(2000))


def trajectory(group: GroupId, member: int) -> work.Trajectory:
    sequence = work.TokenSequence(
        tokens=LONG,
        segments=(
            work.Segment(start=0, end=10, kind=work.SegmentKind.PROMPT),
            work.Segment(start=10, end=len(LONG), kind=work.SegmentKind.OUTPUT, version=4),
        ),
        logprobs=(0.0,) * 10 + (-0.5,) * (len(LONG) - 10),
    )
    return work.Trajectory(
        id=TrajectoryId(f"{group}.{member}"),
        group_id=group,
        task=work.Task(id=TaskId("t0"), env="lake", seed=member),
        attempt=member,
        initiated_version=4,
        sequences=(sequence,),
        reward=None,
        stop_reason=work.StopReason.FINISHED,
        blame=work.Blame.AGENT,
    )


def ids() -> list[TrajectoryId]:
    return [TrajectoryId(f"{group}.{n}") for group, size in GROUPS.items() for n in range(size)]


def append(store: TrajectoryStore, group: GroupId, member: int) -> None:
    made = trajectory(group, member)
    store.append(Ended(at=1.0, purpose=work.Purpose.TRAIN, member=member, trajectory=made))
    store.score(
        Scored(
            at=2.0,
            trajectory_id=made.id,
            attempt=made.attempt,
            reward=0.5 * member,
            success=member > 0,
            stop_reason=work.StopReason.MAX_TOKENS,
            blame=work.Blame.AGENT,
            eval_s=0.1,
            result="a long text " * 100,
            rewards={"format": 1.0, "answer": 0.5 * member},
        )
    )


def fill(store: TrajectoryStore) -> None:
    """Write the trajectories of all groups."""
    for group, size in GROUPS.items():
        for member in range(size):
            append(store, group, member)
