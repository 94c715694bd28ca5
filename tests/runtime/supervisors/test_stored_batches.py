"""What a rank reads from the store is the batch that the controller names."""

import time
from pathlib import Path

import msgspec
import pytest

from rollweave.io.wire import encode
from rollweave.record.store import StoreError, TrajectoryStore, segment_path
from rollweave.runtime.supervisors.stored_batches import (
    SEEN_S,
    RankCommand,
    StoredBatch,
    StoredGroup,
    executed,
    member_of,
)
from rollweave.schema import work
from rollweave.schema.training import Measure, Publish, TrainFailed, TrainOn
from tests.runtime.supervisors.stored import GROUPS, LONG, fill, ids


@pytest.fixture
def stored(tmp_path: Path) -> StoredBatch:
    """A batch of both groups, in a store."""
    with TrajectoryStore(tmp_path) as store:
        fill(store)
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
                id=group,
                env="lake",
                members=tuple(member_of(next(entries)) for _ in range(size)),
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


def test_a_rank_knows_which_tokens_may_be_of_discarded_weights(stored: StoredBatch) -> None:
    group = msgspec.structs.replace(stored.groups[0], restored_to={ids()[0]: 2})
    command = executed(msgspec.structs.replace(stored, groups=(group, *stored.groups[1:])))
    assert isinstance(command, TrainOn)
    assert [group.restored_to for group in command.batch.groups] == [{ids()[0]: 2}, {}]


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
