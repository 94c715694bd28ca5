"""The turn log: the tokens that engines have sampled for attempts that are not over, so
that a resumed run need not sample them again (docs/decisions/0007).

It consists of append-only segment files of checksummed records, which are deleted once
no attempt that is under way has records in them. It is a cache: what is torn or damaged
is left out, and its turns are sampled again; a log that cannot be written ends with one
warning, and the run continues without it. Nothing is synced to the disk, so after a
power loss the log may lack its end. A context is recorded as a digest, and a record
belongs to one context, and to one way of sampling, only.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Self

import msgspec
import xxhash

from rollweave.io.disk import AppendFile, writing
from rollweave.record.record_file import RecordFormat
from rollweave.schema.base import TaggedStruct, TrajectoryId
from rollweave.schema.errors import CorruptJournalError, DiskError
from rollweave.schema.packing import packed
from rollweave.schema.serving import GenerateResult, Sampling, TokenDelta

RECORD = 1
SEGMENT = RecordFormat(
    name="a segment of the turn log",
    magic=b"RWTURNS\n",
    version=1,
    kinds=(RECORD,),
    remedy="its turns are sampled again",
)
SEGMENT_BYTES = 16 << 20
"""Number of bytes beyond which a new segment begins."""

Attempt = tuple[TrajectoryId, int]


class TurnTokens(TaggedStruct, frozen=True, kw_only=True):
    """Tokens of an unfinished turn. Those from position 0 replace all earlier ones."""

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

_decoder = msgspec.msgpack.Decoder(TurnRecord)


def context_digest(tokens: Iterable[int], sampling: Sampling) -> bytes:
    """Return the digest by which a turn's context is recognized, and how the turn is
    sampled: a resumed run may have other settings. The seed and `max_tokens` do not
    count, since they do not change the distribution of a token.
    """
    how = msgspec.structs.replace(sampling, seed=0, max_tokens=1)
    return xxhash.xxh3_128_digest(packed((tuple(tokens), how)))


class TurnLog:
    """Writes the log of one life, and has the records of attempts of the former ones.

    Only one process may use it at a time; calls must not overlap.
    """

    def __init__(self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Read the log in `directory`, which need not exist; `damaged` describes
        segments of which a part cannot be read.
        """
        self._directory, self._segment_bytes = directory, segment_bytes
        self.on_failure: Callable[[DiskError], None] = lambda error: None
        """Called once if the log cannot be written."""
        self._failed = False
        self._former: dict[Attempt, list[TurnRecord]] = {}
        self.damaged: list[str] = []
        numbers = _numbers(directory)
        for number in numbers:
            self._read(self._path(number))
        self._of_former_lives = numbers
        self._segment = numbers[-1] + 1 if numbers else 0
        self._file: AppendFile | None = None
        self._oldest: dict[Attempt, int] = {}
        """The segment of the first record of each attempt that is under way."""

    @property
    def recorded(self) -> Mapping[Attempt, list[TurnRecord]]:
        """The records of each attempt of former lives, in order."""
        return self._former

    def keep(self, attempts: Collection[Attempt]) -> None:
        """Forget the attempts of former lives, except those that may be continued."""
        self._former = {one: self._former[one] for one in attempts if one in self._former}
        self._delete_unneeded()

    def take(self, attempt: Attempt) -> list[TurnRecord]:
        """Return the records of an attempt of a former life, which is continued. They
        stay on disk until `release`.
        """
        return self._former.get(attempt, [])

    def release(self, trajectory_id: TrajectoryId) -> None:
        """Forget the trajectory's attempts of former lives: nothing can continue them
        any longer.
        """
        released = [attempt for attempt in self._former if attempt[0] == trajectory_id]
        for attempt in released:
            del self._former[attempt]
        if released:
            self._delete_unneeded()

    def append(self, record: TurnRecord) -> None:
        """Write a record, which then survives the death of this process."""
        if self._failed:
            return
        try:
            file = self._file
            if file is None or file.size > self._segment_bytes:
                file = self._begin_segment()
            self._oldest.setdefault((record.trajectory_id, record.attempt), self._segment)
            file.append(SEGMENT.record(RECORD, packed(record), file.size))
        except DiskError as error:
            self._failed = True
            self.on_failure(error)

    def forget(self, attempt: Attempt) -> None:
        """The attempt is over: its records are not needed."""
        self._oldest.pop(attempt, None)

    def close(self) -> None:
        """Close the log, and delete it if no attempt needs it."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if not self._oldest and not self._former:
            self._segment += 1
            self._delete_unneeded()
            with contextlib.suppress(OSError):
                self._directory.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin_segment(self) -> AppendFile:
        if self._file is not None:
            self._file.close()
            self._file = None
            self._segment += 1
        with writing(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
        self._file = AppendFile(self._path(self._segment), keep=0, header=SEGMENT.header)
        self._delete_unneeded()
        return self._file

    def _delete_unneeded(self) -> None:
        """Delete the segments that have no record of an attempt under way."""
        first = min(self._oldest.values(), default=self._segment)
        for number in _numbers(self._directory):
            former = number in self._of_former_lives
            if (former and not self._former) or (not former and number < first):
                with contextlib.suppress(OSError):  # it only takes space
                    self._path(number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:06d}.bin"

    def _read(self, path: Path) -> None:
        try:
            for record in self._records(path):
                key = (record.trajectory_id, record.attempt)
                self._former.setdefault(key, []).append(record)
        except (CorruptJournalError, OSError) as error:
            self.damaged.append(str(error))

    @staticmethod
    def _records(path: Path) -> Iterator[TurnRecord]:
        for record in SEGMENT.scan(path):
            try:
                yield _decoder.decode(record.payload)
            except (msgspec.DecodeError, ValueError) as error:
                raise CorruptJournalError(
                    f"{path}: record at byte {record.offset} does not decode: {error}"
                ) from error


def _numbers(directory: Path) -> list[int]:
    return sorted(int(path.stem) for path in directory.glob("*.bin") if path.stem.isdecimal())
