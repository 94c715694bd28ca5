"""The turn log is a cache: what is whole in it is read, and nothing in it, or in its
directory, ends a run.
"""

import itertools
import os
import random
import signal
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.record.turn_log import (
    PREFIX,
    SEGMENT,
    Attempt,
    TurnAnswer,
    TurnLog,
    TurnRecord,
    TurnTokens,
    context_digest,
)
from rollweave.schema.base import TrajectoryId
from rollweave.schema.errors import DiskError
from rollweave.schema.serving import FinishReason, GenerateResult, Sampling, TokenDelta, VersionSpan
from tests.support.properties import checked_every, examples

CONTEXT = context_digest((1, 2, 3), Sampling())


def of(log: TurnLog, *members: int, attempt: int = 0) -> list[Attempt]:
    """The attempts of the log's own life."""
    return [(TrajectoryId(f"g0.{member}"), attempt, log.life) for member in members]


def trajectory(member: int) -> TrajectoryId:
    return TrajectoryId(f"g0.{member}")


def tokens(member: int, turn: int = 0, *, start: int = 0, count: int = 2) -> TurnTokens:
    end = start + count
    delta = TokenDelta(
        id="r",
        start=start,
        tokens=tuple(range(start, end)),
        logprobs=(-0.5,) * count,
        versions=(VersionSpan(start=start, end=end, version=3),),
    )
    return TurnTokens(
        trajectory_id=trajectory(member), attempt=0, turn=turn, context=CONTEXT, delta=delta
    )


def answer(member: int, turn: int = 0, *, attempt: int = 0) -> TurnAnswer:
    result = GenerateResult(
        id="r",
        tokens=(4, 5),
        logprobs=(-0.5, -0.25),
        versions=(VersionSpan(start=0, end=2, version=3),),
        finish=FinishReason.STOP,
    )
    return TurnAnswer(
        trajectory_id=trajectory(member), attempt=attempt, turn=turn, context=CONTEXT, result=result
    )


def segments(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def written(directory: Path, *records: TurnRecord) -> list[Attempt]:
    """Write a log, and return its attempts."""
    with TurnLog(directory) as log:
        for record in records:
            log.append(record)
    return list({(one.trajectory_id, one.attempt, log.life): None for one in records})


def read(directory: Path, attempts: list[Attempt]) -> dict[Attempt, list[TurnRecord]]:
    """Return what the next life reads."""
    log = TurnLog(directory)
    log.keep(attempts)
    return {attempt: log.take(*attempt[:2]) for attempt in log.recorded}


def test_the_next_life_reads_what_was_written(tmp_path: Path) -> None:
    records = [tokens(0), answer(0), answer(1), tokens(0, 1), answer(0, attempt=1)]
    zero, one, again = written(tmp_path / "turns", *records)
    with TurnLog(tmp_path / "turns") as log:
        log.keep([zero, one, again])
        assert log.recorded == [zero, again, one]
        assert log.take(*zero[:2]) == [records[0], records[1], records[3]]
        assert log.take(*again[:2]) == [records[4]]
        log.keep([one, *of(log, 7)])
        assert log.recorded == [one]
        assert log.take(*one[:2]) == [records[2]]
        assert log.take(*zero[:2]) == []


def test_records_of_another_life_with_the_same_number_are_not_taken(tmp_path: Path) -> None:
    """After a power loss, the journal may lack an attempt whose turns are recorded: the
    next life gives its number to another one.
    """
    (first,) = written(tmp_path, answer(0, attempt=1))
    with TurnLog(tmp_path) as log:
        log.keep([(trajectory(0), 0, first[2])])  # all that the journal knows
        log.append(answer(1))
        assert log.take(trajectory(0), 1) == []
    (second,) = of(log, 0, attempt=1)
    assert read(tmp_path, [second]) == {}, "it was launched again, and has no record yet"

    (lost,) = written(tmp_path, tokens(2))
    with TurnLog(tmp_path) as log:
        log.keep([lost])  # it waits to be continued, and its number is given again
        log.append(answer(2))
    assert read(tmp_path, of(log, 2)) == {of(log, 2)[0]: [answer(2)]}


@settings(max_examples=examples(100))
@given(
    members=st.lists(st.integers(0, 1), min_size=4, max_size=6),
    lost=st.sets(st.integers(0, 3), min_size=1, max_size=2),
    late=st.booleans(),
)
def test_a_log_that_lost_segments_has_the_beginning_of_each_attempt(
    members: list[int], lost: set[int], late: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The journal has attempts whose records a power loss took, also in the middle:
    nothing of an attempt is used after the first missing record. If it is `late`, the
    log has been read before.
    """
    directory = tmp_path_factory.mktemp("turns")
    left: dict[int, list[TurnRecord]] = {member: [] for member in members}
    with TurnLog(directory, segment_bytes=1) as log:  # one record each
        for number, member in enumerate(members):
            record = answer(member, number)
            log.append(record)
            left[member].append(record)
    later = TurnLog(directory, segment_bytes=1)
    if late:
        later.keep(of(log, *left))
    for number in lost & set(range(len(members))):
        (directory / f"{number:06d}.bin").write_bytes(b"")
        member = members[number]
        if (record := answer(member, number)) in left[member]:
            del left[member][left[member].index(record) :]
    if not late:
        later.keep(of(log, *left))
        assert set(later.recorded) == {of(log, one)[0] for one in left if left[one]}
    assert {member: later.take(trajectory(member), 0) for member in left} == left


def test_a_log_that_is_not_written_leaves_no_directory(tmp_path: Path) -> None:
    with TurnLog(tmp_path / "turns") as log:
        log.keep([])
        log.forget(trajectory(0), 0)
    assert not (tmp_path / "turns").exists()


def test_a_log_of_finished_attempts_is_deleted(tmp_path: Path) -> None:
    with TurnLog(tmp_path / "turns") as log:
        log.append(answer(0))
        log.append(answer(1))
        log.forget(trajectory(0), 0)
        log.forget(trajectory(1), 0)
    assert not (tmp_path / "turns").exists()


def test_a_log_that_was_not_read_stays(tmp_path: Path) -> None:
    attempts = written(tmp_path, answer(0))
    with TurnLog(tmp_path):
        pass
    assert list(read(tmp_path, attempts)) == attempts


def test_segments_of_former_lives_stay_until_nothing_can_continue(tmp_path: Path) -> None:
    zero, one = written(tmp_path, answer(0), answer(1))
    with TurnLog(tmp_path) as log:
        log.keep([zero, one])
        log.append(answer(0, attempt=1))
        log.release(zero[0])
        assert segments(tmp_path) == ["000000.bin", "000001.bin"]
        log.release(one[0])
        assert segments(tmp_path) == ["000001.bin"]
    mine = of(log, 0, attempt=1)
    with TurnLog(tmp_path) as log:
        log.keep(mine)
        assert log.recorded == mine
        log.keep([])
    assert not tmp_path.exists()


@pytest.mark.parametrize("damage", ["cut", "zeros", "flipped", "foreign", "former"])
def test_damage_costs_records_and_is_named(tmp_path: Path, damage: str) -> None:
    """At any byte: the records before it are read, and no others ever."""
    records = [answer(0), tokens(1), answer(1), answer(0, 1)]
    attempts = written(tmp_path / "whole", *records)
    data = (tmp_path / "whole" / "000000.bin").read_bytes()
    ends = [record.end for record in SEGMENT.scan(tmp_path / "whole" / "000000.bin")]
    unused = {start + 5 + pad for start in (12, *ends) for pad in range(3)}  # of a head
    near = {max(0, end + beside) for end in (12, *ends) for beside in (-1, 0, 1)}
    places = {*near, *range(0, len(data), 1 if checked_every() == 1 else 41)} - {len(data) + 1}
    for at in sorted(places - {len(data)}) if damage not in ("foreign", "former") else [0]:
        directory = tmp_path / f"{at}"
        directory.mkdir()
        path = directory / "000000.bin"
        match damage:
            case "cut":
                path.write_bytes(data[:at])
            case "zeros":
                path.write_bytes(data[:at] + bytes(len(data) - at))
            case "flipped":
                path.write_bytes(data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :])
            case "foreign":
                path.write_bytes(b"something else, of some length")
            case "former":
                path.write_bytes(data[:8] + b"\x01" + data[9:])
        if (content := path.read_bytes()) == data or (damage == "flipped" and at in unused):
            continue
        changed = next(
            (place for place in range(len(content)) if content[place] != data[place]), at
        )
        log = TurnLog(directory)
        log.keep(attempts)
        left = [record for record, end in zip(records, ends, strict=True) if end <= changed]
        if changed < len(SEGMENT.header):
            left = []
        for name, number, life in attempts:
            own = [one for one in left if (one.trajectory_id, one.attempt) == (name, number)]
            assert log.take(name, number) == own, changed
            assert ((name, number, life) in log.recorded) == bool(own)
        torn = damage in ("cut", "zeros")
        assert len(log.damaged) == (not torn)
        assert all(str(path) in text for text in log.damaged)
        log.append(answer(2))
        log.close()
        assert read(directory, of(log, 2)) == {of(log, 2)[0]: [answer(2)]}, "in another segment"


@pytest.mark.parametrize("at", [20, 60, -3])
def test_damage_while_the_log_is_in_use_is_not_copied(tmp_path: Path, at: int) -> None:
    attempts = written(tmp_path, answer(0), answer(1))
    path = tmp_path / "000000.bin"
    with TurnLog(tmp_path) as log:
        log.keep(attempts)
        data = bytearray(path.read_bytes())
        data[at] ^= 0xFF
        path.write_bytes(data)
        assert log.take(trajectory(0), 0) == ([] if at > 0 else [answer(0)])
        log.release(trajectory(1))
        log.append(answer(2))
        log.keep(attempts)
    assert read(tmp_path, [attempts[0]]) in ({}, {attempts[0]: [answer(0)]})


def test_a_full_disk_ends_the_log_once_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    errors = list[DiskError]()
    with TurnLog(tmp_path) as log:
        log.on_failure = errors.append
        log.append(answer(0))
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            log.append(answer(1))
        log.append(answer(2))
    assert [str(tmp_path) in str(error) for error in errors] == [True]
    assert list(read(tmp_path, of(log, 0, 1, 2))) == of(log, 0)


CALLS = ("open", "pwrite", "fsync", "ftruncate", "replace", "unlink", "mkdir", "rmdir")
"""The functions of `os` by which the log changes its directory."""


def at_call(number: int, act: Callable[[], None]) -> Iterator[tuple[str, Any]]:
    """Yield replacements of these functions, the call `number` of which begins with
    `act`.
    """
    left = number

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                act()
            return call(*args, **kwargs)

        return counting

    for name in CALLS:
        yield name, counted(getattr(os, name))


def shrink(log: TurnLog, attempts: list[Attempt]) -> None:
    """Leave four sparse segments with records of two attempts, and replace them."""
    log.keep(attempts)
    for member in range(2, 12):
        log.append(answer(member))
        log.forget(trajectory(member), 0)
    log.append(answer(99))


def sparse(directory: Path) -> tuple[list[Attempt], dict[Attempt, list[TurnRecord]]]:
    with TurnLog(directory, segment_bytes=1_500) as log:
        for turn in range(4):
            for member in (0, 1):
                log.append(tokens(member, turn))
                log.append(answer(member, turn))
            for member in range(100, 110):
                log.append(answer(member, turn))
    attempts = of(log, 0, 1)
    expected = {
        attempt: [make(member, turn) for turn in range(4) for make in (tokens, answer)]
        for member, attempt in enumerate(attempts)
    }
    return attempts, expected


@pytest.mark.extended
def test_a_process_killed_at_any_call_loses_no_record(tmp_path: Path) -> None:
    """A child process is killed at the first, second, third… call of the system."""
    killed = 0
    for number in range(1, 200):
        directory = tmp_path / str(number)
        attempts, expected = sparse(directory)
        if (child := os.fork()) == 0:
            for name, call in at_call(number, lambda: os.kill(os.getpid(), signal.SIGKILL)):
                setattr(os, name, call)
            shrink(TurnLog(directory, segment_bytes=1_500), attempts)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert read(directory, attempts) == expected, f"killed at call {number}"
        assert not list(directory.glob("*.new"))
        if not os.WIFSIGNALED(status):
            break
        killed += 1
    assert 10 < killed < 199
    assert read(directory, attempts) == expected


def test_a_call_that_fails_loses_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full, or broken, from the first, second, third… call on for once."""

    def fail() -> None:
        raise OSError(28, "No space left on device")

    for number in range(1, 40):
        directory = tmp_path / str(number)
        attempts, expected = sparse(directory)
        with monkeypatch.context() as patch:
            for name, call in at_call(number, fail):
                patch.setattr(os, name, call)
            log = TurnLog(directory, segment_bytes=1_500)
            shrink(log, attempts)
        taken = {attempt: log.take(*attempt[:2]) for attempt in attempts}
        assert taken == expected, f"call {number} failed"
        assert read(directory, attempts) == expected, f"call {number} failed"


STEPS = {
    "tokens": 4,
    "answer": 12,
    "forget": 4,
    "lose worker": 3,
    "release": 3,
    "lose": 1,
    "kill": 1,
}
"""What happens, and how often."""


class Disk:
    """Follows the files of a log: what may still be needed is never written over, what
    nothing needs is deleted, and what is sparse is replaced.
    """

    def __init__(self, directory: Path, segment_bytes: int, patch: pytest.MonkeyPatch) -> None:
        self._directory, self._segment_bytes = directory, segment_bytes
        self._links = directory.with_name(f"{directory.name}-links")
        self._links.mkdir()
        self._known: dict[int, tuple[Path, bytes]] = {}
        """A link to each file that there ever was, and what it had, by its inode."""
        self._names: dict[str, Path] = {}
        self._last, self._synced, self._replace = "", False, os.replace
        patch.setattr(os, "fsync", self._sync)
        patch.setattr(os, "replace", self._replaced)

    def _sync(self, fd: int) -> None:
        self._synced = True

    def _replaced(self, *paths: Any) -> None:
        assert self._synced, "a loss of power must not leave an empty segment"
        self._synced = False
        self._replace(*paths)

    def restore(self) -> None:
        """Bring back what was deleted: a process that was killed has not deleted it."""
        for name, link in self._names.items():
            if not (self._directory / name).exists():
                os.link(link, self._directory / name)
        (self._directory / "000001.bin.new").touch()

    def check(self, needed: Collection[Attempt]) -> None:
        """Check the files while the attempts `needed` may need their records."""
        for link, content in self._known.values():
            assert link.read_bytes().startswith(content), "a segment grows or is replaced"
        files = sorted(self._directory.glob("*.bin"))
        closed = [self._needed(file, needed) for file in files][:-1]
        assert 0 not in closed, "each segment but the last has a record that is needed"
        sizes = [file.stat().st_size for file in files]
        if files and files[-1].name > self._last:
            self._last = files[-1].name
            sparse = [4 * nbytes <= self._segment_bytes for nbytes in closed]
            assert (True, True) not in itertools.pairwise(sparse)
            for nbytes, size, is_sparse in zip(closed, sizes, sparse, strict=False):
                assert not is_sparse or 2 * nbytes >= size

    def _needed(self, file: Path, attempts: Collection[Attempt]) -> int:
        """Return the bytes of a file's records that these attempts need."""
        content, inode = file.read_bytes(), file.stat().st_ino
        if inode not in self._known:
            os.link(file, self._links / str(inode))
        self._known[inode] = self._links / str(inode), content
        self._names[file.name] = self._links / str(inode)
        total = 0
        for record in SEGMENT.scan(file):
            life, _ = PREFIX.unpack_from(record.payload)
            owner = msgspec.msgpack.decode(record.payload[PREFIX.size :])
            total += (record.end - record.offset) * (
                (owner["trajectory_id"], owner["attempt"], life.hex()) in attempts
            )
            full = max(self._segment_bytes, len(SEGMENT.header))
            assert record.offset <= full, "a full segment gets no more records"
        return total


@settings(max_examples=examples(75))
@given(seed=st.integers(0, 1 << 32), segment_bytes=st.sampled_from([1, 300, 900, 3_000]))
def test_the_log_has_what_a_dictionary_of_records_has(
    seed: int, segment_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        directory = tmp_path_factory.mktemp("turns")
        disk = Disk(directory, segment_bytes, patch)
        follow(directory, disk, random.Random(seed), segment_bytes)


def follow(directory: Path, disk: Disk, rng: random.Random, segment_bytes: int) -> None:
    log = TurnLog(directory, segment_bytes=segment_bytes)
    present, former = dict[Attempt, list[TurnRecord]](), dict[Attempt, list[TurnRecord]]()

    def continued(without: int = -1) -> dict[Attempt, list[TurnRecord]]:
        """Return the newest attempt of each trajectory but one."""
        newest = {one[0]: (one, records) for one, records in {**former, **present}.items()}
        newest.pop(trajectory(without), None)
        return dict(newest.values())

    def append(number: int, member: int, make: Callable[[int, int], TurnRecord]) -> None:
        attempt = next((one for one in present if one[0] == trajectory(member)), None)
        if attempt is None:
            (attempt,) = of(log, member, attempt=number)
        record = msgspec.structs.replace(make(member, number), attempt=attempt[1])
        log.append(record)
        present.setdefault(attempt, []).append(record)

    for number, step in enumerate(rng.choices(list(STEPS), list(STEPS.values()), k=40)):
        member = rng.randrange(6)
        attempt = rng.choice([*present, None])
        match step:
            case "tokens" | "answer":
                append(number, member, answer if step == "answer" else tokens)
            case "forget" if attempt is not None:
                log.forget(*attempt[:2])
                del present[attempt]
            case "lose worker" if attempt is not None:
                log.lose(*attempt[:2])
                former[attempt] = present.pop(attempt)
            case "release":
                name = rng.choice([*former, (trajectory(member), 0, "")])[0]
                log.release(name)
                former = {one: records for one, records in former.items() if one[0] != name}
            case "lose" | "kill":  # the controller, and an attempt that cannot be continued
                if step == "kill":
                    disk.restore()
                log = TurnLog(directory, segment_bytes=segment_bytes)
                former, present = continued(without=member), {}
                if rng.random() < 0.5:
                    append(number, member, answer)
                log.keep([*former, *of(log, 7)])
                assert not list(directory.glob("*.new"))
        assert {one: log.take(*one[:2]) for one in log.recorded} == former
        disk.check({**former, **present})
        assert set(log._counts) == {*former, *present}, "nothing stays of a forgotten attempt"
        if rng.random() < 0.05:
            log.keep(former)  # again, which changes nothing
    expected = continued()
    log.close()
    assert read(directory, list(expected)) == expected


CONTEXTS = st.tuples(
    st.sampled_from([(), (0,), (0, 1), (256,)]),
    st.builds(
        Sampling,
        temperature=st.sampled_from([0.6, 1.0]),
        top_p=st.sampled_from([0.9, 1.0]),
        top_k=st.sampled_from([0, 5]),
        stop=st.sampled_from([(), ("a",)]),
        stop_token_ids=st.sampled_from([(), (1,)]),
        allowed=st.sampled_from([(), (1,)]),
    ),
)


@settings(max_examples=examples(300))
@given(one=CONTEXTS, part=st.integers(0, 1), other=CONTEXTS, seed=st.integers(0, 9))
def test_a_context_is_recognized_by_all_that_its_tokens_depend_on(
    one: tuple[Any, ...], part: int, other: tuple[Any, ...], seed: int
) -> None:
    """`other` differs in one part, or not at all."""
    other = (*one[:part], other[part], *one[part + 1 :])
    elsewhere = msgspec.structs.replace(other[1], seed=seed, max_tokens=1 + seed)
    same = context_digest(*one) == context_digest(other[0], elsewhere)
    assert same == (one == other)
