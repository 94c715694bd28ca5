"""The trajectory store: every ended attempt with its tokens, on disk before any event
reports it.

It consists of append-only segment files of checksummed records
(`record/record_file.py`). Invariants: a record is either complete or cut off as the
torn tail of the newest segment; only `discard` removes anything else, and damage is an
error with file, place and remedy; `get` returns what was appended, with its score.
Memory holds an index of places, never tokens: `forget` shrinks the index, while the
files keep everything for `rollweave trace`. The file `floor` holds the number of the
oldest segment that the index referred to when the newest segment began. Opening the
store reads only this segment and the later ones.
"""

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
import xxhash

from rollweave.io.disk import AppendFile, replace_file, writing
from rollweave.io.reading import named, opened, whole
from rollweave.record.record_file import HEAD, HEADER, RecordFormat
from rollweave.schema.base import TaggedStruct, TrajectoryId, packed
from rollweave.schema.errors import CorruptJournalError, RollweaveError
from rollweave.schema.work import Blame, Purpose, StopReason, Trajectory, Unscored

RECORD = 1
SEGMENT = RecordFormat(
    name="a segment of trajectories",
    magic=b"RWTRAJ\r\n",
    version=2,
    kinds=(RECORD,),
    remedy="restore an intact copy, or put it aside by `mv {path} {path}.damaged`: its "
    "trajectories are then rolled out again if they are still needed",
)
LOST = "bring it back; without it, `--resume` drops its trajectories as world_lost"
"""Remedy for a missing segment that a run or a reader needs."""

FLOOR_BYTES = 64
"""Maximum bytes of the file `floor`."""

SEGMENT_BYTES = 64 << 20
"""Number of bytes beyond which a new segment begins: small enough to copy or delete by
hand, large enough that segments are few.
"""

STORED_TOKEN_BYTES = 16
"""Approximate bytes of one token in the store: its id, its log-prob, and its share of
the segments.
"""


class StoreError(RollweaveError):
    """A trajectory that should be in the store is missing."""


class Ended(TaggedStruct, frozen=True, kw_only=True):
    """INIT and RUN of an attempt are over, at run time `at`.

    The reward is still unknown.
    """

    at: float
    purpose: Purpose
    member: int
    trajectory: Trajectory


class Scored(TaggedStruct, frozen=True, kw_only=True):
    """EVAL of an attempt is over, with its reward, or with the reason why there is
    none.

    `rewards` has the known components of the reward, unweighted, if there are several;
    `unscored` is what the missing components are computed from. If the members of the
    group are still to be compared, the reward lacks the components of the comparison.
    """

    at: float
    trajectory_id: TrajectoryId
    attempt: int
    reward: float | None
    success: bool | None
    stop_reason: StopReason
    blame: Blame
    eval_s: float
    error: str = ""
    result: str = ""
    rewards: dict[str, float] = msgspec.field(default_factory=dict)
    unscored: Unscored | None = None


class Rescored(TaggedStruct, frozen=True, kw_only=True):
    """New scores of attempts that have scores. If the writer dies, all of them are
    replaced or none.
    """

    scores: tuple[Scored, ...]


class _EndedTrajectory(msgspec.Struct):
    id: TrajectoryId
    attempt: int


class _EndedKey(msgspec.Struct, tag="Ended"):
    """An `Ended` read without its tokens."""

    trajectory: _EndedTrajectory
    purpose: Purpose
    member: int
    at: float


_Key = msgspec.msgpack.Decoder(_EndedKey | Scored | Rescored)
_Ended = msgspec.msgpack.Decoder(Ended)


@dataclass(slots=True)
class StoredAttempt:
    """The place of an attempt, and its score once it has one."""

    trajectory_id: TrajectoryId
    attempt: int
    purpose: Purpose
    member: int
    at: float
    segment: int
    offset: int
    nbytes: int
    score: Scored | None = None


def unscored_attempts(entries: Iterable[StoredAttempt]) -> list[StoredAttempt]:
    """Return the newest attempt with missing rewards of each trajectory that has no
    attempt with a reward.
    """
    newest: dict[TrajectoryId, StoredAttempt] = {}
    scored: set[TrajectoryId] = set()
    for entry in entries:
        if entry.score is None:
            continue
        if entry.score.reward is not None:
            scored.add(entry.trajectory_id)
        elif entry.score.unscored is not None:
            newest[entry.trajectory_id] = entry
    return [entry for name, entry in newest.items() if name not in scored]


def stored_bytes(directory: Path) -> int:
    """Count the bytes of records in a store, even if the store cannot be opened."""
    return sum(
        max(0, segment_path(directory, number).stat().st_size - HEADER.size)
        for number in segments(directory)
    )


def segment_path(directory: Path, number: int) -> Path:
    """Return the path of a segment."""
    return directory / f"{number:06d}.bin"


def segments(directory: Path) -> list[int]:
    """Return the numbers of the segments of a store, ascending."""
    paths = {path for path in directory.glob("*.bin") if path.stem.isdecimal()}
    numbers = {int(path.stem) for path in paths}
    return sorted(number for number in numbers if segment_path(directory, number) in paths)


def _scan(directory: Path, number: int, keys: list[StoredAttempt | Scored]) -> int:
    """Add the keys of a segment's complete records to `keys`; return the length in
    bytes of the header and these records (0 without a header).

    Raises CorruptJournalError for damage; `keys` then has the records before the
    damage.
    """
    path = segment_path(directory, number)
    end = SEGMENT.header_bytes(path)
    for record, key in SEGMENT.decoded(path, RECORD, _Key.decode):
        if isinstance(key, Scored):
            keys.append(key)
        elif isinstance(key, Rescored):
            keys.extend(key.scores)
        else:
            entry = StoredAttempt(
                trajectory_id=key.trajectory.id,
                attempt=key.trajectory.attempt,
                purpose=key.purpose,
                member=key.member,
                at=key.at,
                segment=number,
                offset=record.end - len(record.payload),
                nbytes=len(record.payload),
            )
            keys.append(entry)
        end = record.end
    return end


def _must_be_complete(path: Path, end: int) -> None:
    """Raise CorruptJournalError for an older segment, which was complete once, if it
    ends in the middle of a record.
    """
    if end < path.stat().st_size:
        raise SEGMENT.damaged(path, end, f"record at byte {end} was cut off")


def read_attempt(directory: Path, entry: StoredAttempt) -> Trajectory:
    """Read an attempt with its tokens and score. Raises CorruptJournalError as
    `read_unscored` does.
    """
    trajectory = read_unscored(directory, entry.segment, entry.offset, entry.nbytes)
    return _with_score(trajectory, entry.score)


def read_unscored(directory: Path, segment: int, offset: int, nbytes: int) -> Trajectory:
    """Read the attempt at a place of the store, as it was before it got a score. Raises
    CorruptJournalError for a record that differs from what was written, and for a
    segment that is gone or cannot be read.
    """
    path = segment_path(directory, segment)
    start = offset - HEAD.size
    try:
        with opened(path) as file:
            record = os.pread(file.fileno(), HEAD.size + nbytes, start)
    except FileNotFoundError:
        raise CorruptJournalError(f"{path} was deleted", LOST) from None
    except OSError as error:
        raise CorruptJournalError(f"{named(error)} (it cannot be read)", LOST) from error
    payload = record[HEAD.size :]
    if len(payload) != nbytes or record[: HEAD.size] != SEGMENT.head(RECORD, payload, start):
        raise SEGMENT.damaged(path, start, f"record at byte {start} does not match its checksum")
    return _Ended.decode(payload).trajectory


def _floor(path: Path) -> int:
    """Read the number in the file `floor`. If the file is missing or damaged, return 0,
    so that all segments are read.
    """
    try:
        line = whole(path, FLOOR_BYTES)
        number = int(line.split()[0])
        return number if line == _floor_line(number) else 0
    except (OSError, ValueError, IndexError):
        return 0


def _floor_line(number: int) -> bytes:
    return b"%d %08x\n" % (number, xxhash.xxh32_intdigest(b"%d" % number))


def _with_score(trajectory: Trajectory, score: Scored | None) -> Trajectory:
    if score is None:
        return trajectory
    return msgspec.structs.replace(
        trajectory,
        reward=score.reward,
        success=score.success,
        stop_reason=score.stop_reason,
        blame=score.blame,
        error=score.error or trajectory.error,
        result=score.result or trajectory.result,
        rewards=score.rewards,
        timing=msgspec.structs.replace(trajectory.timing, eval_s=score.eval_s),
    )


class TrajectoryStore:
    """Writes and finds the trajectories of one run.

    Only one process may use it at a time; calls must not overlap.
    """

    def __init__(self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Open `directory`, which is created if absent. Cut off the torn tail of the
        newest segment, and count it in `torn`.

        Raises `DiskError`, and `CorruptJournalError` for any other damage, before
        anything is changed.
        """
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._index: dict[TrajectoryId, StoredAttempt] = {}
        self._floor = directory / "floor"
        numbers = segments(directory)
        self._segment = numbers[-1] if numbers else 0
        self.torn = 0
        """Number of bytes of an incomplete last record, cut off because its writer
        died.
        """
        end_of_newest, floor = 0, _floor(self._floor)
        expected = range(floor, max([floor, *numbers]) + 1)
        self.absent = [
            segment_path(directory, number).name for number in expected if number not in numbers
        ]
        """Names of the missing segments from the floor on."""
        for number in [number for number in numbers if number >= floor or number == self._segment]:
            keys: list[StoredAttempt | Scored] = []
            end = _scan(directory, number, keys)
            self._enter(keys)
            path = segment_path(directory, number)
            if number == self._segment:
                end_of_newest, self.torn = end, path.stat().st_size - end
            else:
                _must_be_complete(path, end)
        self._file = self._open(self._segment, end_of_newest)

    def append(self, record: Ended) -> None:
        """Write an ended attempt. It replaces earlier attempts of the same trajectory
        in the index. Raises `DiskError`.
        """
        trajectory = record.trajectory
        payload = packed(record)
        offset = self._write(payload)
        self._index[trajectory.id] = StoredAttempt(
            trajectory_id=trajectory.id,
            attempt=trajectory.attempt,
            purpose=record.purpose,
            member=record.member,
            at=record.at,
            segment=self._segment,
            offset=offset,
            nbytes=len(payload),
        )

    def score(self, record: Scored) -> None:
        """Write the score of the trajectory's newest attempt.

        Raises `StoreError` for any other attempt, and `DiskError`.
        """
        entry = self._index.get(record.trajectory_id)
        if entry is None or entry.attempt != record.attempt:
            raise StoreError(
                f"no attempt {record.attempt} of trajectory {record.trajectory_id} to score"
            )
        self._write(packed(record))
        entry.score = record

    def rescore(self, scores: Sequence[Scored]) -> None:
        """Write new scores of attempts that have scores, all in one record. The
        attempts need not be in the index. Raises `DiskError`.
        """
        self._write(packed(Rescored(scores=tuple(scores))))
        self._enter(scores)

    def score_of(self, trajectory_id: TrajectoryId) -> Scored | None:
        """Return the score of the trajectory's newest attempt, or None."""
        entry = self._index.get(trajectory_id)
        return entry.score if entry is not None else None

    def find(self, ids: Iterable[TrajectoryId]) -> list[StoredAttempt]:
        """Return the place of each trajectory's newest attempt.

        Raises `StoreError` for a missing trajectory.
        """
        attempts = []
        for trajectory_id in ids:
            entry = self._index.get(trajectory_id)
            if entry is None:
                raise StoreError(f"trajectory {trajectory_id} is not in the store")
            attempts.append(entry)
        return attempts

    def read(self, entries: Iterable[StoredAttempt]) -> list[Trajectory]:
        """Read the trajectories, with their scores.

        This may run on another thread than the other methods.
        """
        return [read_attempt(self._directory, entry) for entry in entries]

    def get(self, ids: Iterable[TrajectoryId]) -> list[Trajectory]:
        """Find and read trajectories."""
        return self.read(self.find(ids))

    def scored_attempt(self, trajectory_id: TrajectoryId) -> int | None:
        """Return the number of the attempt whose tokens and reward are in the store, or
        None.
        """
        entry = self._index.get(trajectory_id)
        if entry is None or entry.score is None or entry.score.reward is None:
            return None
        return entry.attempt

    def forget(self, ids: Sequence[TrajectoryId]) -> None:
        """Remove these trajectories from the index; their records stay on disk."""
        for trajectory_id in ids:
            self._index.pop(trajectory_id, None)

    def discard(self, kept: Collection[int]) -> None:
        """Delete the segments below the oldest segment in the index, except the
        segments in `kept`.

        Raises `DiskError`.
        """
        floor = self._oldest()
        for number in [
            number for number in segments(self._directory) if number < floor and number not in kept
        ]:
            path = segment_path(self._directory, number)
            with writing(path):
                path.unlink(missing_ok=True)

    def _oldest(self) -> int:
        """Return the oldest segment that the index refers to."""
        return min((entry.segment for entry in self._index.values()), default=self._segment)

    @property
    def directory(self) -> Path:
        """The directory of the store."""
        return self._directory

    @property
    def segment(self) -> int:
        """Number of the segment that is currently written."""
        return self._segment

    def ids(self) -> list[TrajectoryId]:
        """Return the trajectories in the index."""
        return list(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, trajectory_id: object) -> bool:
        return trajectory_id in self._index

    def sync(self) -> None:
        """Force all written records to the disk. Raises `DiskError`."""
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _enter(self, keys: Iterable[StoredAttempt | Scored]) -> None:
        for key in keys:
            if isinstance(key, StoredAttempt):
                self._index[key.trajectory_id] = key
                continue
            entry = self._index.get(key.trajectory_id)
            if entry is not None and entry.attempt == key.attempt:
                entry.score = key

    def _open(self, number: int, end: int) -> AppendFile:
        file = AppendFile(segment_path(self._directory, number), keep=end, header=SEGMENT.header)
        self._segment = number
        return file

    def _write(self, payload: bytes) -> int:
        """Append one record and return the offset of its payload."""
        if self._file.size > max(HEADER.size, self._segment_bytes):
            self._file.close()
            self._file = self._open(self._segment + 1, 0)
            replace_file(self._floor, _floor_line(self._oldest()))
        return self._file.append(SEGMENT.record(RECORD, payload, self._file.size)) + HEAD.size


class TrajectoryReader:
    """Reads the store of a run, even while it is being written: all attempts, in the
    order in which they ended.

    `damaged` names incomplete or damaged records, one line per segment. Such a record
    and all later records of its segment are not in `entries`.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.entries: list[StoredAttempt] = []
        self.damaged: list[str] = []
        last: dict[tuple[TrajectoryId, int], StoredAttempt] = {}
        numbers = segments(directory)
        for number in numbers:
            keys: list[StoredAttempt | Scored] = []
            try:
                end = _scan(directory, number, keys)
                if number != numbers[-1]:  # a running controller may still append to the newest
                    _must_be_complete(segment_path(directory, number), end)
            except CorruptJournalError as error:
                self.damaged.append(error.problem)
            for key in keys:
                if isinstance(key, StoredAttempt):
                    self.entries.append(key)
                    last[key.trajectory_id, key.attempt] = key
                elif (key.trajectory_id, key.attempt) in last:
                    last[key.trajectory_id, key.attempt].score = key

    def load(self, entry: StoredAttempt) -> Trajectory:
        """Return the attempt with its tokens and score."""
        return read_attempt(self._directory, entry)
