"""What a rank reads from the store is the batch that the controller names."""

import time
from pathlib import Path

import msgspec
import pytest

from rollweave.io.wire import encode
from rollweave.record.store import Ended, Scored, StoreError, TrajectoryStore, segment_path
from rollweave.runtime.supervisors.stored_batches import (
    SEEN_S,
    RankCommand,
    StoredBatch,
    StoredGroup,
    executed,
    member_of,
)
from rollweave.schema import work
from rollweave.schema.base import GroupId, TaskId, TrajectoryId
from rollweave.schema.training import Measure, Publish, TrainFailed, TrainOn

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


@pytest.fixture
def stored(tmp_path: Path) -> StoredBatch:
    """A batch of both groups, in a store."""
    with TrajectoryStore(tmp_path) as store:
        for group, size in GROUPS.items():
            for member in range(size):
                append(store, group, member)
        return batch_in(store)


def batch_in(store: TrajectoryStore, *, seen_s: float = 0.0) -> StoredBatch:
    entries = iter(store.find(ids()))
    return StoredBatch(
        directory=str(store.directory),
        step=3,
        part=1,
        parts=2,
        groups=tuple(
            StoredGroup(
                id=group, env="lake", members=tuple(member_of(next(entries)) for _ in range(size))
            )
            for group, size in GROUPS.items()
        ),
        seen_s=seen_s,
    )


def without_texts(trajectory: work.Trajectory) -> work.Trajectory:
    """Return the trajectory without what training does not need of its score."""
    timing = msgspec.structs.replace(trajectory.timing, eval_s=0.0)
    return msgspec.structs.replace(trajectory, result="", timing=timing)


def test_a_rank_trains_on_what_the_store_has(stored: StoredBatch) -> None:
    sent = encode(stored)
    command = executed(msgspec.msgpack.decode(sent, type=RankCommand))
    assert isinstance(command, TrainOn)
    batch = command.batch
    assert (batch.step, batch.version, batch.part, batch.parts) == (3, 3, 1, 2)
    assert [(group.id, group.env) for group in batch.groups] == [(name, "lake") for name in GROUPS]
    with TrajectoryStore(Path(stored.directory)) as store:
        expected = [without_texts(each) for each in store.get(ids())]
    assert [each for group in batch.groups for each in group.trajectories] == expected
    assert stored.nbytes > 8 * len(ids()) * len(LONG)
    assert len(sent) < 0.01 * stored.nbytes


def test_a_measurement_reads_the_same_groups(stored: StoredBatch) -> None:
    trained = executed(stored)
    measured = executed(msgspec.structs.replace(stored, measure=True))
    assert isinstance(trained, TrainOn)
    assert measured == Measure(step=3, part=1, groups=trained.batch.groups)


def test_other_commands_are_executed_as_they_are() -> None:
    publish = Publish(version=1, publication_id=2)
    assert executed(publish) is publish


def test_a_damaged_record_fails_the_step_and_names_its_file(stored: StoredBatch) -> None:
    segment = segment_path(Path(stored.directory), 0)
    damaged = bytearray(segment.read_bytes())
    damaged[stored.groups[1].members[0].offset] ^= 1
    segment.write_bytes(damaged)
    reply = executed(stored)
    assert isinstance(reply, TrainFailed)
    assert str(segment) in reply.error
    assert reply.groups == ("g0", "g1")


def test_a_rank_waits_for_a_record_that_its_host_does_not_see_yet(
    stored: StoredBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = segment_path(Path(stored.directory), 0)
    whole, slept = segment.read_bytes(), list[float]()
    segment.write_bytes(whole[: len(whole) // 2])

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            segment.write_bytes(whole)

    monkeypatch.setattr(time, "sleep", sleep)
    assert isinstance(executed(msgspec.structs.replace(stored, seen_s=SEEN_S)), TrainOn)
    assert len(slept) == 3
    segment.write_bytes(whole[: len(whole) // 2])
    assert isinstance(executed(stored), TrainFailed), "on one machine it is there at once"
    assert len(slept) == 3


def test_a_trajectory_without_a_place_has_no_reference(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path) as store, pytest.raises(StoreError, match="not in the store"):
        store.find(ids())
