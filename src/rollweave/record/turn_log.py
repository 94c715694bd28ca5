"""The turn log: the tokens that engines have sampled for attempts that are not over, so
that a resumed run need not sample them again (docs/decisions/0007).

It consists of append-only segment files of checksummed records. A record is needed as
long as its attempt may be continued. A segment without needed records is deleted.
Whenever a segment begins, neighboring segments with few needed records are replaced by
one segment with these records alone, so the size of the log is bounded by what is
needed, and not by the age of the oldest attempt.

The log is a cache: records that are torn or damaged are left out, and their turns are
sampled again; a log that cannot be written ends with one warning, and the run continues
without it. Only segments that replace others are synced to the disk, so after a power
loss the log may lack its end, or have records of attempts that the journal lacks. A
record therefore names the life of the controller in which it was written, and the core
knows the life in which it launched each attempt. A record belongs to exactly one
context, of which it has a digest, and to one way of sampling.

Invariants: the records of an attempt are numbered from 0, and are in this order, over
all segments. A record whose number has been read before is a copy, which a killed
process has left; records after a missing record are not used.
"""

import contextlib
import dataclasses
import os
import secrets
import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Self

import msgspec
import xxhash

from rollweave.io.disk import NEW_SUFFIX, AppendFile, replace_file, writing
from rollweave.record.record_file import RecordFormat
from rollweave.schema.base import TaggedStruct, TrajectoryId, packed
from rollweave.schema.errors import CorruptJournalError, DiskError
from rollweave.schema.serving import GenerateResult, Sampling, TokenDelta

RECORD = 1
SEGMENT = RecordFormat(
    name="a segment of the turn log",
    magic=b"RWTURNS\n",
    version=2,
    kinds=(RECORD,),
    remedy="its turns are sampled again",
)
SEGMENT_BYTES = 16 << 20
"""Number of bytes beyond which a new segment begins."""

SPARSE = 4
"""A segment is sparse if its needed bytes, times this factor, do not exceed the bytes
of a full segment.
"""

PREFIX = struct.Struct("<8sI")  # life, number of the attempt's record
LIFE_BYTES = 8

Attempt = tuple[TrajectoryId, int, str]
"""An attempt, and the life of the controller that launched it."""


class TurnTokens(TaggedStruct, frozen=True, kw_only=True):
    """Tokens of an unfinished turn. Tokens from position 0 replace all earlier tokens
    of the turn.
    """

    trajectory_id: TrajectoryId
    attempt: int
    turn: int
    context: bytes
    delta: TokenDelta


class TurnAnswer(TaggedStruct, frozen=True, kw_only=True):
    """A finished turn."""

    trajectory_id: TrajectoryId
    attempt: int
    turn: int
    context: bytes
    result: GenerateResult


TurnRecord = TurnTokens | TurnAnswer


class _Owner(msgspec.Struct):
    """The part of a record that names its attempt."""

    trajectory_id: TrajectoryId
    attempt: int


_decoder = msgspec.msgpack.Decoder(TurnRecord)
_owner = msgspec.msgpack.Decoder(_Owner)


def _attempt_of(payload: bytes) -> tuple[Attempt, int]:
    """Return the attempt of a record, and the record's number in it."""
    life, index = PREFIX.unpack_from(payload)
    owner = _owner.decode(memoryview(payload)[PREFIX.size :])
    return (owner.trajectory_id, owner.attempt, life.hex()), index


def context_digest(tokens: Iterable[int], sampling: Sampling) -> bytes:
    """Return the digest by which a turn's context and way of sampling are recognized: a
    resumed run may have other settings. The seed and `max_tokens` do not count, since
    they do not change the distribution of a token.
    """
    how = msgspec.structs.replace(sampling, seed=0, max_tokens=1)
    return xxhash.xxh3_128_digest(packed((tuple(tokens), how)))


@dataclasses.dataclass(slots=True)
class _Segment:
    """A segment, and the places of its needed records."""

    size: int = 0
    needed: int = 0
    """Number of bytes of the needed records."""
    places: dict[Attempt, list[tuple[int, int]]] = dataclasses.field(default_factory=dict)
    """The offsets at which the records of each attempt begin and end, in order."""

    def add(self, attempt: Attempt, offset: int, end: int) -> None:
        self.places.setdefault(attempt, []).append((offset, end))
        self.needed += end - offset

    def remove(self, attempt: Attempt) -> None:
        self.needed -= sum(end - offset for offset, end in self.places.pop(attempt))


class TurnLog:
    """Writes the log of one life of the controller, and has the records of attempts of
    former lives.

    Only one process may use it at a time; calls must not overlap.
    """

    def __init__(self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Open the log in `directory`, which need not exist, for a new life.

        The log of former lives is neither read nor changed before `keep`.
        """
        self._directory, self._segment_bytes = directory, segment_bytes
        self.life = secrets.token_hex(LIFE_BYTES)
        """The name of this life, chosen at random: no other life has it."""
        self._life_bytes = bytes.fromhex(self.life)
        self.on_failure: Callable[[DiskError], None] = lambda error: None
        """Called once if the log cannot be written."""
        self._ended = False
        self.damaged: list[str] = []
        """Descriptions of segments that could not be read completely."""
        self._lost: dict[TrajectoryId, list[Attempt]] = {}
        """The attempts of former lives and of lost workers that may be continued."""
        self._unread = _numbers(directory)
        """The segments of former lives that are not read yet."""
        self._segments: dict[int, _Segment] = {}
        self._where: dict[Attempt, list[int]] = {}
        """The segments that have records of each attempt, in order."""
        self._number = self._unread[-1] if self._unread else -1
        """The number of the last segment."""
        self._file: AppendFile | None = None
        self._counts: dict[Attempt, int] = {}
        """Number of records of each attempt."""

    @property
    def recorded(self) -> list[Attempt]:
        """The lost attempts that have records, and may be continued."""
        return [attempt for attempts in self._lost.values() for attempt in attempts]

    def keep(self, attempts: Collection[Attempt]) -> None:
        """Forget all attempts of former lives except `attempts`. The first call reads
        the log of former lives.
        """
        wanted = set(attempts)
        unread, self._unread = self._unread, []
        for number in unread:
            self._read(number, wanted)
        for attempt in self.recorded:
            if attempt not in wanted:
                self._forget(attempt)
        former = [attempt for attempt in self._where if attempt[2] != self.life]
        lost = [attempt for attempt in self.recorded if attempt[2] == self.life]
        self._lost = {}
        for attempt in former + lost:
            self._lost.setdefault(attempt[0], []).append(attempt)
        self._tidy()

    def lose(self, trajectory_id: TrajectoryId, number: int) -> bool:
        """Mark an attempt of this life as lost with its worker, and keep its records
        until `release`, since the attempt may be continued. Return False if it has no
        records.
        """
        attempt = (trajectory_id, number, self.life)
        if attempt not in self._where:
            return False
        self._lost.setdefault(trajectory_id, []).append(attempt)
        return True

    def take(self, trajectory_id: TrajectoryId, number: int) -> list[TurnRecord]:
        """Return the records of a lost attempt, with which it is continued. The records
        stay on disk until `release`.
        """
        attempts = self._lost.get(trajectory_id, [])
        lost = next((attempt for attempt in attempts if attempt[1] == number), None)
        if lost is None:
            return []
        records = list[TurnRecord]()
        # records after a record that cannot be read are not used
        with contextlib.suppress(OSError, msgspec.DecodeError, ValueError):
            for segment in self._where.get(lost, ()):
                for payload in self._payloads(segment, self._segments[segment].places[lost]):
                    if PREFIX.unpack_from(payload)[1] != len(records):
                        return records
                    records.append(_decoder.decode(memoryview(payload)[PREFIX.size :]))
        return records

    def release(self, trajectory_id: TrajectoryId) -> None:
        """Forget the trajectory's lost attempts, which can no longer be continued."""
        for attempt in self._lost.pop(trajectory_id, []):
            self._forget(attempt)

    def append(self, record: TurnRecord) -> None:
        """Write a record, which then survives the death of this process."""
        if self._ended:
            return
        try:
            file = self._file
            if file is None or file.size > self._segment_bytes:
                file = self._begin_segment()
            attempt = (record.trajectory_id, record.attempt, self.life)
            prefix = PREFIX.pack(self._life_bytes, self._counts.get(attempt, 0))
            piece = SEGMENT.record(RECORD, prefix + packed(record), file.size)
            offset = file.append(piece)
        except DiskError as error:
            self._ended = True
            self.on_failure(error)
            return
        self._segments[self._number].size = file.size
        self._add(self._number, attempt, offset, file.size)

    def forget(self, trajectory_id: TrajectoryId, number: int) -> None:
        """Forget the records of an attempt of this life that is over."""
        self._forget((trajectory_id, number, self.life))

    def close(self) -> None:
        """Close the log, and delete it if no attempt needs it. Later calls change
        nothing.
        """
        self._end_segment()
        if not self._where and not self._unread:
            self._tidy()
            with contextlib.suppress(OSError):
                self._directory.rmdir()
        self._ended = True
        self._segments, self._where, self._lost = {}, {}, {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add(self, number: int, attempt: Attempt, offset: int, end: int) -> None:
        segment = self._segments[number]
        if attempt not in segment.places:
            self._where.setdefault(attempt, []).append(number)
        segment.add(attempt, offset, end)
        self._counts[attempt] = self._counts.get(attempt, 0) + 1

    def _forget(self, attempt: Attempt) -> None:
        self._counts.pop(attempt, None)
        for number in self._where.pop(attempt, ()):
            segment = self._segments[number]
            segment.remove(attempt)
            if not segment.places and not self._is_open(number):
                self._delete(number)

    def _is_open(self, number: int) -> bool:
        return self._file is not None and number == self._number

    def _end_segment(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin_segment(self) -> AppendFile:
        self._end_segment()
        self._tidy()
        with writing(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
        number = self._number + 1
        self._file = AppendFile(self._path(number), keep=0, header=SEGMENT.header)
        self._number, self._segments[number] = number, _Segment(size=self._file.size)
        return self._file

    def _tidy(self) -> None:
        """Delete what is not needed, and replace sparse segments."""
        for path in self._directory.glob(f"*.bin{NEW_SUFFIX}"):
            with contextlib.suppress(OSError):  # it only takes space
                path.unlink()
        for number in _numbers(self._directory):
            segment = self._segments.get(number)
            needed = number in self._unread or (segment is not None and segment.places)
            if not needed and not self._is_open(number):
                self._delete(number)
        for group in self._sparse_groups():
            try:
                self._replace(group)
            except DiskError:
                continue  # the former segments are as good; they only take more space

    def _sparse_groups(self) -> list[list[int]]:
        """Return the groups of neighboring sparse segments that are worth replacing:
        one segment with the needed records of the group saves files or half of the
        space.
        """
        groups, needed = list[list[int]](), 0
        previous_is_sparse = False
        for number, segment in sorted(self._segments.items()):
            sparse = not self._is_open(number) and segment.needed * SPARSE <= self._segment_bytes
            if sparse:
                if not previous_is_sparse or needed + segment.needed > self._segment_bytes:
                    groups.append([])
                    needed = 0
                groups[-1].append(number)
                needed += segment.needed
            previous_is_sparse = sparse
        return [
            group
            for group in groups
            if len(group) > 1 or 2 * self._segments[group[0]].needed < self._segments[group[0]].size
        ]

    def _replace(self, group: list[int]) -> None:
        """Replace the segments by one segment with their needed records, which gets the
        name of the last segment.

        A process that is killed before it has deleted the other segments leaves copies,
        which `_read` skips. Raises DiskError; nothing is then changed.
        """
        content, segment = bytearray(SEGMENT.header), _Segment()
        for number in group:
            ordered = sorted(
                (place, attempt)
                for attempt, places in self._segments[number].places.items()
                for place in places
            )
            with writing(self._path(number)):  # the failure to read may be temporary
                payloads = list(self._payloads(number, [place for place, _ in ordered]))
            for payload, (_, attempt) in zip(payloads, ordered, strict=False):
                offset = len(content)
                content += SEGMENT.record(RECORD, payload, offset)
                segment.add(attempt, offset, len(content))
        segment.size = len(content)
        replace_file(self._path(group[-1]), bytes(content))
        replaced = set(group)
        for attempt in {needed for number in group for needed in self._segments[number].places}:
            rest = [number for number in self._where[attempt] if number not in replaced]
            if attempt in segment.places:
                rest = sorted([*rest, group[-1]])
            if rest:
                self._where[attempt] = rest
            else:
                del self._where[attempt]  # none of its records can be read any longer
        self._segments[group[-1]] = segment
        for number in group[:-1]:
            self._delete(number)

    def _payloads(self, number: int, places: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        """Yield the payloads at these places, up to the first damaged record. Raises
        OSError.
        """
        fd = os.open(self._path(number), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            for offset, end in places:
                payload = SEGMENT.payload(os.pread(fd, end - offset, offset), offset)
                if payload is None:
                    return
                yield payload
        finally:
            os.close(fd)

    def _delete(self, number: int) -> None:
        self._segments.pop(number, None)
        with contextlib.suppress(OSError):  # it only takes space; `_tidy` tries it again
            self._path(number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:06d}.bin"

    def _read(self, number: int, wanted: set[Attempt]) -> None:
        """Find the records of the wanted attempts."""
        path = self._path(number)
        segment = self._segments[number] = _Segment()
        try:
            segment.size = path.stat().st_size
            for record, (attempt, index) in SEGMENT.decoded(path, RECORD, _attempt_of):
                if attempt in wanted and index == self._counts.get(attempt, 0):
                    self._add(number, attempt, record.offset, record.end)
        except (CorruptJournalError, OSError) as error:
            self.damaged.append(str(error))


def _numbers(directory: Path) -> list[int]:
    return sorted(int(path.stem) for path in directory.glob("*.bin") if path.stem.isdecimal())
