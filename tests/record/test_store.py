"""The trajectory store keeps all appended records, wherever the last write was torn."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.record.record_file import HEADER
from rollweave.record.store import Ended, Scored, StoreError, TrajectoryReader, TrajectoryStore
from rollweave.schema import work
from rollweave.schema.base import GroupId, TaskId, TrajectoryId
from rollweave.schema.errors import CorruptJournalError
from tests.support.properties import examples
from tests.support.variants import mostly_extended


def ended(
    name: str,
    attempt: int = 0,
    tokens: tuple[int, ...] = (1, 2, 3),
    reason: work.StopReason = work.StopReason.FINISHED,
) -> Ended:
    half = len(tokens) // 2 or 1
    segments = [work.Segment(start=0, end=half, kind=work.SegmentKind.PROMPT)]
    if len(tokens) > half:
        segments.append(
            work.Segment(start=half, end=len(tokens), kind=work.SegmentKind.OUTPUT, version=4)
        )
    sequence = work.TokenSequence(
        tokens=tokens,
        segments=tuple(segments),
        logprobs=tuple(-0.5 if index >= half else 0.0 for index in range(len(tokens))),
        turns=(work.TurnSpan(start=half, end=len(tokens), reward=0.25, state_key="a1"),),
    )
    trajectory = work.Trajectory(
        id=TrajectoryId(name),
        group_id=GroupId("g0"),
        task=work.Task(id=TaskId("t0"), env="lake", seed=3),
        attempt=attempt,
        initiated_version=4,
        sequences=(sequence,),
        reward=None,
        stop_reason=reason,
        blame=work.BLAME_OF[reason],
    )
    return Ended(at=1.5, purpose=work.Purpose.TRAIN, member=0, trajectory=trajectory)


def scored(name: str, attempt: int = 0, reward: float | None = 1.0) -> Scored:
    reason = work.StopReason.FINISHED if reward is not None else work.StopReason.REWARD_ERROR
    return Scored(
        at=2.5,
        trajectory_id=TrajectoryId(name),
        attempt=attempt,
        reward=reward,
        success=None if reward is None else reward > 0,
        stop_reason=reason,
        blame=work.BLAME_OF[reason],
        eval_s=0.125,
        error="" if reward is not None else "raised",
    )


def test_appended_attempts_are_read_with_their_scores(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path) as store:
        record = ended("g0.0")
        store.append(record)
        assert store.get([TrajectoryId("g0.0")]) == [record.trajectory]
        assert store.scored_attempt(TrajectoryId("g0.0")) is None
        store.score(scored("g0.0", reward=0.5))
        (trajectory,) = store.get([TrajectoryId("g0.0")])
        expected = (0.5, True, 0.125)
        assert (trajectory.reward, trajectory.success, trajectory.timing.eval_s) == expected
        assert trajectory.sequences == record.trajectory.sequences
        assert store.scored_attempt(TrajectoryId("g0.0")) == 0


def test_a_failed_score_replaces_the_stop_reason(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path) as store:
        store.append(ended("g0.0"))
        store.score(scored("g0.0", reward=None))
        (trajectory,) = store.get([TrajectoryId("g0.0")])
        expected = (work.StopReason.REWARD_ERROR, None, "raised")
        assert (trajectory.stop_reason, trajectory.reward, trajectory.error) == expected
        assert store.scored_attempt(TrajectoryId("g0.0")) is None


def test_scores_that_are_replaced_together_are_all_there_or_none(tmp_path: Path) -> None:
    names = [TrajectoryId(f"g0.{member}") for member in range(3)]
    with TrajectoryStore(tmp_path) as store:
        for name in names:
            store.append(ended(name))
            store.score(scored(name))
        size = store._file.size
        store.rescore([scored(name, reward=0.5) for name in names])
    (path,) = tmp_path.glob("*.bin")
    whole = path.read_bytes()
    assert len(whole) > size
    for end in (len(whole), len(whole) - 1, (size + len(whole)) // 2, size + 1):
        path.write_bytes(whole[:end])
        with TrajectoryStore(tmp_path) as store:
            rewards = {trajectory.reward for trajectory in store.get(names)}
            assert rewards == ({0.5} if end == len(whole) else {1.0})
        assert {TrajectoryReader(tmp_path).load(one).reward for one in store.find(names)} == rewards


def test_new_attempt_replaces_the_old_one(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path) as store:
        store.append(ended("g0.0", tokens=(1, 2)))
        store.append(ended("g0.0", attempt=1, tokens=(3, 4)))
        with pytest.raises(StoreError, match="no attempt 0"):
            store.score(scored("g0.0"))
        store.score(scored("g0.0", attempt=1))
        assert store.get([TrajectoryId("g0.0")])[0].sequences[0].tokens == (3, 4)


def test_forgotten_trajectories_stay_on_disk(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path) as store:
        store.append(ended("g0.0"))
        store.forget([TrajectoryId("g0.0"), TrajectoryId("never-there")])
        with pytest.raises(StoreError, match=r"g0\.0 is not in the store"):
            store.get([TrajectoryId("g0.0")])
        assert len(store) == 0
    reader = TrajectoryReader(tmp_path)
    assert [entry.trajectory_id for entry in reader.entries] == ["g0.0"]
    assert reader.load(reader.entries[0]).sequences[0].tokens == (1, 2, 3)


def test_the_reader_sees_every_attempt_with_its_own_score(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path, segment_bytes=1) as store:  # a segment a record
        store.append(ended("g0.0"))
        store.score(scored("g0.0", reward=None))
        store.append(ended("g0.0", attempt=1))
        store.append(ended("g0.1", reason=work.StopReason.ENV_HANG))
        store.score(scored("g0.0", attempt=1))
    assert len(list(tmp_path.glob("*.bin"))) == 5
    reader = TrajectoryReader(tmp_path)
    attempts = [
        (entry.trajectory_id, entry.attempt, entry.score and entry.score.reward)
        for entry in reader.entries
    ]
    assert attempts == [("g0.0", 0, None), ("g0.0", 1, 1.0), ("g0.1", 0, None)]
    assert reader.load(reader.entries[2]).stop_reason is work.StopReason.ENV_HANG


def test_an_older_segment_that_ends_in_the_middle_of_a_record_is_refused(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path, segment_bytes=1) as store:
        store.append(ended("g0.0"))
        store.append(ended("g0.1"))
    first = tmp_path / "000000.bin"
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(CorruptJournalError, match=r"000000\.bin: record at byte 12 was cut off"):
        TrajectoryStore(tmp_path)
    assert "was cut off" in TrajectoryReader(tmp_path).damaged[0]


@pytest.mark.parametrize("flip", mostly_extended([0x01, 0x80], {0x80}))
def test_every_flipped_byte_is_reported_and_nothing_is_removed(tmp_path: Path, flip: int) -> None:
    """The byte is in the newest segment or an older one: header, lengths, checksums,
    digests and payloads alike.
    """
    with TrajectoryStore(tmp_path, segment_bytes=300) as store:
        for name in ("a", "b", "c", "d"):
            store.append(ended(name))
            store.score(scored(name))
        original = store.get(store.ids())
    segments = sorted(tmp_path.glob("*.bin"))
    assert len(segments) >= 2
    for path in (segments[0], segments[-1]):
        content = path.read_bytes()
        for position in range(len(content)):
            damaged = bytearray(content)
            damaged[position] ^= flip
            path.write_bytes(damaged)
            message = ""
            try:
                with TrajectoryStore(tmp_path, segment_bytes=300) as store:
                    assert store.get(store.ids()) == original, (
                        f"{path.name} differs at byte {position}, which is no padding"
                    )
            except CorruptJournalError as error:
                message = str(error)
            assert (
                not message
                or f"`mv {path} {path}.damaged`" in message
                or f"{path}: schema version must be" in message
            )
            assert path.read_bytes() == damaged
        path.write_bytes(content)


def test_moving_a_damaged_segment_away_keeps_the_others(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path, segment_bytes=1) as store:
        for name in ("a", "b", "c"):
            store.append(ended(name))
    (tmp_path / "000002.bin").rename(tmp_path / "000002.bin.damaged")
    with TrajectoryStore(tmp_path, segment_bytes=1) as store:
        assert store.ids() == ["a", "b"]
        store.append(ended("d"))
    with TrajectoryStore(tmp_path, segment_bytes=1) as store:
        assert store.ids() == ["a", "b", "d"]
    assert (tmp_path / "000002.bin.damaged").exists()


def test_a_damaged_floor_hides_nothing(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path, segment_bytes=1) as store:
        for name in ("a", "b", "c"):
            store.append(ended(name))
        store.forget([TrajectoryId("a")])
        store.append(ended("d"))
        store.append(ended("e"))
    floor = tmp_path / "floor"
    content = floor.read_bytes()
    for position in range(len(content)):
        for flip in (0x01, 0x08):
            floor.write_bytes(
                content[:position] + bytes([content[position] ^ flip]) + content[position + 1 :]
            )
            with TrajectoryStore(tmp_path, segment_bytes=1) as store:
                assert {"b", "c", "d", "e"} <= set(store.ids())


def test_unneeded_segments_are_deleted(tmp_path: Path) -> None:
    """Segments that are kept stay, as do all after the oldest in the index, which may
    hold scores.
    """
    with TrajectoryStore(tmp_path, segment_bytes=1) as store:  # a segment a record
        for name in "abcdef":
            store.append(ended(name))
        (remaining,) = store.find([TrajectoryId("b")])
        store.forget([TrajectoryId(name) for name in "abcf"])
        store.discard({remaining.segment})
        assert store.read([remaining])[0].id == "b"
        assert sorted(int(path.stem) for path in tmp_path.glob("*.bin")) == [1, 3, 4, 5]
        store.forget(store.ids())
        store.discard(set())
        assert [path.name for path in tmp_path.glob("*.bin")] == ["000005.bin"], "the newest stays"
        store.append(ended("g"))
    with TrajectoryStore(tmp_path, segment_bytes=1) as store:
        assert store.ids() == ["g"]


def test_files_with_other_names_are_no_segments(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path) as store:
        store.append(ended("a"))
    for name in ("٣", "-1", "00", "999999999999999999999 copy"):
        (tmp_path / f"{name}.bin").write_bytes((tmp_path / "000000.bin").read_bytes())
    assert len(TrajectoryReader(tmp_path).entries) == 1
    with TrajectoryStore(tmp_path) as store:
        assert (store.ids(), store.segment) == (["a"], 0)


def test_forgotten_segments_are_not_read_again(tmp_path: Path) -> None:
    """The time to open depends on the index, not on the history: an older file may even
    be damaged.
    """
    with TrajectoryStore(tmp_path, segment_bytes=1) as store:
        for number in range(8):
            store.append(ended(str(number)))
            store.forget([TrajectoryId(str(number))])
        store.append(ended("alive"))
        store.append(ended("newest"))
        store.score(scored("alive"))
    (tmp_path / "000003.bin").write_bytes(b"nobody reads this")
    with TrajectoryStore(tmp_path, segment_bytes=1) as store:
        assert store.scored_attempt(TrajectoryId("alive")) == 0
        assert store.ids() == ["alive", "newest"]


@settings(max_examples=examples(100))
@given(steps=st.lists(st.tuples(st.sampled_from("asfro"), st.integers(0, 5)), max_size=40))
def test_reopened_store_has_all_unforgotten_trajectories(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    """The operations are append (a), score (s), forget (f), discard (r) and reopen (o),
    in any order.
    """
    directory = tmp_path_factory.mktemp("store")
    store, expected = (
        TrajectoryStore(directory, segment_bytes=400),
        dict[str, tuple[int, float | None]](),
    )
    for step, number in steps:
        name = TrajectoryId(str(number))
        if step == "a":
            attempt = expected[name][0] + 1 if name in expected else 0
            store.append(ended(name, attempt=attempt))
            expected[name] = (attempt, None)
        elif step == "s" and name in expected:
            store.score(scored(name, attempt=expected[name][0], reward=float(number)))
            expected[name] = (expected[name][0], float(number))
        elif step == "f":
            store.forget([name])
            expected.pop(name, None)
        elif step == "r":
            store.discard(set())
        elif step == "o":
            store.close()
            store = TrajectoryStore(directory, segment_bytes=400)
            # as a restored core requests
            store.forget([one for one in store.ids() if one not in expected])
        assert {one.id: (one.attempt, one.reward) for one in store.get(store.ids())} == expected
    store.close()


def test_altered_record_is_not_read(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path) as store:
        store.append(ended("a", tokens=(1, 2, 3, 4)))
        path = tmp_path / "000000.bin"
        data = bytearray(path.read_bytes())
        place = data.rindex(bytes([1, 2, 3, 4]))
        data[place] = 9
        path.write_bytes(data)
        with pytest.raises(
            CorruptJournalError, match=r"000000\.bin: record at byte 12 does not match"
        ):
            store.get([TrajectoryId("a")])


@settings(max_examples=examples(60))
@given(data=st.data())
def test_truncation_keeps_exactly_the_complete_records(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("store")
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    ends = []
    with TrajectoryStore(directory) as store:
        for number, size in enumerate(sizes):
            store.append(ended(f"g0.{number}", tokens=tuple(range(size))))
            ends.append((directory / "000000.bin").stat().st_size)
    path = directory / "000000.bin"
    cut = data.draw(st.integers(0, ends[-1]))
    with path.open("r+b") as file:
        file.truncate(cut)
    complete = sum(end <= cut for end in ends)
    with TrajectoryStore(directory) as store:
        assert len(store) == complete
        assert store.torn == cut - max(
            [0 if cut < HEADER.size else HEADER.size, *(end for end in ends if end <= cut)]
        )
        store.append(ended("fresh", tokens=(9, 9)))
    reader = TrajectoryReader(directory)
    assert [entry.trajectory_id for entry in reader.entries] == [
        f"g0.{number}" for number in range(complete)
    ] + ["fresh"]
    for number, entry in enumerate(reader.entries[:-1]):
        assert reader.load(entry).sequences[0].tokens == tuple(range(sizes[number]))


def test_sequences_that_were_written_before_origins_are_read() -> None:
    sequence = work.TokenSequence(
        tokens=(1,),
        segments=(work.Segment(start=0, end=1, kind=work.SegmentKind.PROMPT),),
        logprobs=(0.0,),
    )
    written = msgspec.to_builtins(sequence)
    assert written.pop("origin") is None
    packed = msgspec.msgpack.encode(written)
    assert msgspec.msgpack.decode(packed, type=work.TokenSequence) == sequence
