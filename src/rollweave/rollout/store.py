"""The trajectory store: every ended attempt with its tokens, on disk, before any event speaks of it.

Append-only segment files of checksummed records. Invariants: a record is either wholly readable or cut off as a torn tail
of the newest segment; nothing but a torn tail is ever removed, unless `discard` is told to; what `get` returns is what was
appended, with its score. Memory holds an index of places, never tokens: `forget` shrinks the index, the files keep everything
for `rollweave trace`. The file `floor` has the number of the segment from which on something was in the index when the newest
segment began: to open the store takes reading those segments, however many there are before.
"""

import os
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
import xxhash

from rollweave.codec.disk import AppendFile, replace_file, writing
from rollweave.schema.base import Tagged, TrajectoryId
from rollweave.schema.errors import CorruptJournalError, RollweaveError
from rollweave.schema.work import Blame, Purpose, StopReason, Trajectory

MAGIC = b"RWTRAJ1\n"
FRAME = struct.Struct("<IQ")  # payload bytes, xxh3-64 of the payload
SEGMENT_BYTES = 64 << 20
"""A new segment begins beyond this size: small enough to copy or delete by hand, large enough to be few."""


class StoreError(RollweaveError):
    """A trajectory that should be in the store is not there."""


class Ended(Tagged, frozen=True, kw_only=True):
    """INIT and RUN of an attempt are over, at run time `at`. The reward is still unknown."""

    at: float
    purpose: Purpose
    member: int
    trajectory: Trajectory


class Scored(Tagged, frozen=True, kw_only=True):
    """EVAL of an attempt is over: its reward, or why there is none."""

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


class _EndedTrajectory(msgspec.Struct):
    id: TrajectoryId
    attempt: int


class _EndedKey(msgspec.Struct, tag="Ended"):
    """An `Ended` read without its tokens."""

    trajectory: _EndedTrajectory
    purpose: Purpose
    member: int
    at: float


_Key = msgspec.msgpack.Decoder(_EndedKey | Scored)
_Ended = msgspec.msgpack.Decoder(Ended)
_encoder = msgspec.msgpack.Encoder()


@dataclass(slots=True)
class Entry:
    """Where an attempt lies, and its score once it has one."""

    trajectory_id: TrajectoryId
    attempt: int
    purpose: Purpose
    member: int
    at: float
    segment: int
    offset: int
    nbytes: int
    score: Scored | None = None


def _segment_path(directory: Path, number: int) -> Path:
    return directory / f"{number:06d}.bin"


def _segments(directory: Path) -> list[int]:
    return sorted(int(path.stem) for path in directory.glob("*.bin") if path.stem.isdecimal())


def _records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Each whole record of a segment as (offset of its payload, payload); stops at the first that is torn."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return
        offset = len(MAGIC)
        while True:
            head = file.read(FRAME.size)
            if len(head) < FRAME.size:
                return
            nbytes, digest = FRAME.unpack(head)
            payload = file.read(nbytes)
            if len(payload) < nbytes or xxhash.xxh3_64_intdigest(payload) != digest:
                return
            yield offset + FRAME.size, payload
            offset += FRAME.size + nbytes


def _scan(directory: Path, number: int) -> tuple[list[Entry | Scored], int]:
    """Keys of a segment's whole records in order, and the length of its whole part (0 without a header)."""
    path = _segment_path(directory, number)
    found: list[Entry | Scored] = []
    with path.open("rb") as file:
        end = len(MAGIC) if file.read(len(MAGIC)) == MAGIC else 0
    for offset, payload in _records(path):
        key = _Key.decode(payload)
        if isinstance(key, Scored):
            found.append(key)
        else:
            entry = Entry(
                trajectory_id=key.trajectory.id,
                attempt=key.trajectory.attempt,
                purpose=key.purpose,
                member=key.member,
                at=key.at,
                segment=number,
                offset=offset,
                nbytes=len(payload),
            )
            found.append(entry)
        end = offset + len(payload)
    return found, end


def _damage(path: Path, end: int, size: int, *, newest: bool) -> str:
    """What is wrong with a segment of `size` bytes of which `end` are whole; nothing where it is a torn tail of the newest."""
    if end >= size or (newest and _is_tail(path, end, size)):
        return ""
    return f"{path}: record at byte {end} of {size} does not match its checksum"


def _is_tail(path: Path, end: int, size: int) -> bool:
    """True if no other record follows the one at byte `end`, which is not whole."""
    with path.open("rb") as file:
        file.seek(end)
        head = file.read(FRAME.size)
        if end == 0 or len(head) < FRAME.size:
            return True
        behind = end + FRAME.size + FRAME.unpack(head)[0]
        if behind >= size:
            return True
        file.seek(behind)
        return not file.read(size - behind).strip(b"\0")


def _read(directory: Path, entry: Entry) -> Trajectory:
    """Raises OSError, and CorruptJournalError for a record that is not what was written."""
    path = _segment_path(directory, entry.segment)
    with path.open("rb", buffering=0) as file:
        record = os.pread(file.fileno(), FRAME.size + entry.nbytes, entry.offset - FRAME.size)
    payload = record[FRAME.size :]
    if record[: FRAME.size] != _frame(payload) or len(payload) != entry.nbytes:
        raise CorruptJournalError(f"{path}: record at byte {entry.offset - FRAME.size} does not match its checksum")
    return _with_score(_Ended.decode(payload).trajectory, entry.score)


def _frame(payload: bytes) -> bytes:
    return FRAME.pack(len(payload), xxhash.xxh3_64_intdigest(payload))


def _floor(path: Path) -> int:
    """0 where it is not told: all segments are read then."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


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
        timing=msgspec.structs.replace(trajectory.timing, eval_s=score.eval_s),
    )


class TrajectoryStore:
    """Writes and finds trajectories of one run. One process at a time; calls must not overlap."""

    def __init__(self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Open `directory`, made where absent. The torn tail of the newest segment is cut off.

        Raises `CorruptJournalError` if anything else is damaged, `DiskError` where the disk refuses.
        """
        with writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._index: dict[TrajectoryId, Entry] = {}
        self._floor = directory / "floor"
        numbers = _segments(directory)
        self._segment = numbers[-1] if numbers else 0
        whole, floor = 0, _floor(self._floor)
        for number in [number for number in numbers if number >= floor or number == self._segment]:
            found, end = _scan(directory, number)
            self._enter(found)
            path = _segment_path(directory, number)
            if number == self._segment:
                whole = end
            wrong = _damage(path, end, path.stat().st_size, newest=number == self._segment)
            if wrong:
                raise CorruptJournalError(wrong)
        self._file = self._open(self._segment, whole)

    def append(self, record: Ended) -> None:
        """Write an ended attempt; it replaces earlier attempts of the same trajectory in the index. Raises `DiskError`."""
        trajectory = record.trajectory
        payload = _encoder.encode(record)
        offset = self._write(payload)
        self._index[trajectory.id] = Entry(
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
        """Write the score of the attempt that was appended last.

        Raises `StoreError` for an attempt that is not there, and `DiskError`.
        """
        entry = self._index.get(record.trajectory_id)
        if entry is None or entry.attempt != record.attempt:
            raise StoreError(f"no attempt {record.attempt} of trajectory {record.trajectory_id} to score")
        self._write(_encoder.encode(record))
        entry.score = record

    def find(self, ids: Iterable[TrajectoryId]) -> list[Entry]:
        """Where the newest attempt of each lies. Raises `StoreError` for one that is not there."""
        found = []
        for trajectory_id in ids:
            entry = self._index.get(trajectory_id)
            if entry is None:
                raise StoreError(f"trajectory {trajectory_id} is not in the store")
            found.append(entry)
        return found

    def read(self, entries: Iterable[Entry]) -> list[Trajectory]:
        """The trajectories themselves, with their scores. May run on another thread than the rest."""
        return [_read(self._directory, entry) for entry in entries]

    def get(self, ids: Iterable[TrajectoryId]) -> list[Trajectory]:
        """`find` and `read` in one."""
        return self.read(self.find(ids))

    def scored_attempt(self, trajectory_id: TrajectoryId) -> int | None:
        """The attempt of which the store holds tokens and a reward, or None."""
        entry = self._index.get(trajectory_id)
        if entry is None or entry.score is None or entry.score.reward is None:
            return None
        return entry.attempt

    def forget(self, ids: Sequence[TrajectoryId]) -> None:
        """Take these from the index; their records stay on disk."""
        for trajectory_id in ids:
            self._index.pop(trajectory_id, None)

    def discard(self, kept: Collection[int]) -> None:
        """Delete segments of which nothing is in the index, but those in `kept`. Raises `DiskError`."""
        floor = self._oldest()
        for number in [number for number in _segments(self._directory) if number < floor and number not in kept]:
            path = _segment_path(self._directory, number)
            with writing(path):
                path.unlink(missing_ok=True)

    def _oldest(self) -> int:
        """The segment from which on something is in the index."""
        return min((entry.segment for entry in self._index.values()), default=self._segment)

    @property
    def segment(self) -> int:
        """Number of the segment that is written now."""
        return self._segment

    def ids(self) -> list[TrajectoryId]:
        """Trajectories in the index."""
        return list(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, trajectory_id: object) -> bool:
        return trajectory_id in self._index

    def sync(self) -> None:
        """Force what was written to the disk itself. Raises `DiskError`."""
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _enter(self, found: Iterable[Entry | Scored]) -> None:
        for key in found:
            if isinstance(key, Entry):
                self._index[key.trajectory_id] = key
                continue
            entry = self._index.get(key.trajectory_id)
            if entry is not None and entry.attempt == key.attempt:
                entry.score = key

    def _open(self, number: int, end: int) -> AppendFile:
        file = AppendFile(_segment_path(self._directory, number), keep=end, header=MAGIC)
        self._segment = number
        return file

    def _write(self, payload: bytes) -> int:
        """Append one record and return the offset of its payload."""
        if self._file.size > max(len(MAGIC), self._segment_bytes):
            self._file.close()
            self._file = self._open(self._segment + 1, 0)
            replace_file(self._floor, b"%d\n" % self._oldest())
        return self._file.append(_frame(payload) + payload) + FRAME.size


class TrajectoryReader:
    """Reads the store of a run, also of one that is being written: every attempt, in the order in which they ended.

    `damaged` says where records are not whole, one line a segment: they and those behind them in it are not among `entries`.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.entries: list[Entry] = []
        self.damaged: list[str] = []
        last: dict[tuple[TrajectoryId, int], Entry] = {}
        numbers = _segments(directory)
        for number in numbers:
            path = _segment_path(directory, number)
            size = path.stat().st_size  # before it is read: a run may write on
            found, end = _scan(directory, number)
            wrong = _damage(path, end, size, newest=number == numbers[-1])
            if wrong:
                self.damaged.append(wrong)
            for key in found:
                if isinstance(key, Entry):
                    self.entries.append(key)
                    last[key.trajectory_id, key.attempt] = key
                elif (key.trajectory_id, key.attempt) in last:
                    last[key.trajectory_id, key.attempt].score = key

    def load(self, entry: Entry) -> Trajectory:
        """The attempt with its tokens and score."""
        return _read(self._directory, entry)
