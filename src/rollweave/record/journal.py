"""The run's journal: every handled event, its time, and a digest of the core's
decisions.

Its file of checksummed records (`record/record_file.py`) is a header, at most one
snapshot, then `(now, event)` records. Invariants: when `append` returns, the operating
system has the record, before any command that it caused is executed; when `sync`
returns, it is on the disk; damage anywhere before the torn tail raises
`CorruptJournalError` with its offset, and nothing is repaired silently; `rotate` leaves
the old file or the new one, never a mixture; replaying the events on an equal core
yields commands with the same digests. A difference means that the code has changed.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, Self

import msgspec
import xxhash

from rollweave.core.core import Core
from rollweave.core.policy.experience import Rule
from rollweave.io.disk import AppendFile, replace_file
from rollweave.record.record_file import RecordFormat
from rollweave.schema.base import Struct, packed
from rollweave.schema.commands import Command
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError, CorruptJournalError
from rollweave.schema.events import Event, RunStarted

SCHEMA_VERSION = 7
"""Version of the schema of events and of the core's state. It increases with a change
of either schema after which older journals no longer decode.
"""

SNAPSHOT, RECORD = 1, 2
JOURNAL = RecordFormat(
    name="a journal",
    magic=b"RWJRNL\r\n",
    version=SCHEMA_VERSION,
    kinds=(SNAPSHOT, RECORD),
    remedy="restore an intact copy, or cut off the damage and all that follows it by `truncate -s "
    "{offset} {path}`: what the run did after that is lost",
)


class JournalEntry(Struct, frozen=True, kw_only=True):
    """One event, and the xxh3-64 of the commands that it caused."""

    event: Event
    digest: int


_decode = msgspec.msgpack.Decoder(tuple[float, JournalEntry]).decode


def digest(commands: Sequence[Command]) -> int:
    """Return a digest that is equal for equal commands in equal order."""
    return xxhash.xxh3_64_intdigest(packed(commands)) if commands else 0


class JournalReader:
    """The snapshot and the records of a journal, up to its torn tail.

    Both raise FileNotFoundError, and CorruptJournalError if the file is not a journal
    of this schema version.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def snapshot(self) -> bytes | None:
        """Return the snapshot that the journal starts from; None if it starts from an
        empty state.
        """
        for raw in JOURNAL.scan(self._path):
            return raw.payload if raw.kind == SNAPSHOT else None
        return None

    def __iter__(self) -> Iterator[tuple[float, JournalEntry]]:
        """Return every complete `(now, entry)`, in order.

        Raises CorruptJournalError at the first damaged record before the tail.
        """
        return (timed for _, timed in JOURNAL.decoded(self._path, RECORD, _decode))


class RunJournal:
    """Appends to the journal of one run, without a buffer in this process."""

    def __init__(self, path: Path) -> None:
        """Open or create the file, and cut off a torn tail.

        Raises CorruptJournalError, and DiskError.
        """
        self._path = path
        complete = JOURNAL.complete_bytes(path)
        self.torn = max(0, (path.stat().st_size if path.exists() else 0) - complete)
        """Number of bytes of an incomplete last record, cut off because its writer
        died.
        """
        self._file = AppendFile(path, keep=complete, header=JOURNAL.header)
        self.initial_bytes = self._file.size
        """Size in bytes of the journal's snapshot, or of the journal of an earlier
        life.
        """

    @property
    def appended_bytes(self) -> int:
        """Number of bytes appended since the journal was opened or rotated."""
        return self.size - self.initial_bytes

    @property
    def size(self) -> int:
        """Number of bytes in the file, all of them complete records."""
        return self._file.size

    def append(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Record one handled event. When this method returns, the record survives the
        death of this process.

        Raises DiskError, and the journal is then unchanged.
        """
        entry = JournalEntry(event=event, digest=digest(commands))
        self._file.append(JOURNAL.record(RECORD, packed((now, entry)), self.size))

    def sync(self) -> None:
        """Make all records survive a power loss. Raises DiskError."""
        self._file.sync()

    def rotate(self, snapshot: bytes) -> None:
        """Continue in a new file that starts with a snapshot of the core's current
        state, and replaces this file atomically.

        Raises DiskError, and the journal then continues unchanged.
        """
        content = JOURNAL.header
        content += JOURNAL.record(SNAPSHOT, snapshot, len(content))
        replace_file(self._path, content)
        self._file.close()
        self._file = AppendFile(self._path, keep=len(content))
        self.initial_bytes = self.size

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RunObserver(Protocol):
    """Receives the events and commands of a run from its journal."""

    def on_event(self, now: float, event: Event) -> None:
        """Receive an event."""

    def on_command(self, now: float, command: Command) -> None:
        """Receive a command that the last event caused."""


class Replay:
    """Rebuilds the core from a journal.

    After iteration to the end, `core` is in the state of the run.
    """

    def __init__(
        self, path: Path, config: RunConfig, *, rules: Mapping[str, Rule] | None = None
    ) -> None:
        """`config` is the configuration under which the events happened; `rules` are
        the rules that `config` names. Raises CorruptJournalError.
        """
        self._path = path
        self._journal = JournalReader(path)
        snapshot = self._journal.snapshot()
        try:
            self.core = (
                Core(config, rules=rules)
                if snapshot is None
                else Core.restore(snapshot, config, rules=rules)
            )
        except msgspec.DecodeError as error:
            raise CorruptJournalError(f"{path}: its snapshot does not decode: {error}") from error
        self._from_start = snapshot is None
        self.events = 0
        self.differing = 0
        """Number of events whose commands differ from the recorded ones."""

    def __iter__(self) -> Iterator[tuple[float, Event, list[Command]]]:
        """Yield every event with its time and the commands that it leads to.

        Raises CorruptJournalError.
        """
        for now, entry in self._journal:
            if self._from_start and not self.events and not isinstance(entry.event, RunStarted):
                first = type(entry.event).__name__
                raise CorruptJournalError(
                    f"{self._path} must begin with a snapshot or RunStarted, got {first}: its "
                    "beginning is lost"
                )
            commands = self.core.handle(now, entry.event)
            self.events += 1
            self.differing += digest(commands) != entry.digest
            yield now, entry.event, commands

    @property
    def run_id(self) -> str:
        """The id of the journal's run, known before the replay; empty if the journal
        has none.
        """
        if self.core.state.run_id or not self._from_start:
            return self.core.state.run_id
        first = next(iter(self._journal), None)
        return (
            first[1].event.run_id
            if first is not None and isinstance(first[1].event, RunStarted)
            else ""
        )

    def observe(self, observer: RunObserver) -> None:
        """Replay a complete run to `observer`. Raises ConfigError for a compacted
        journal.
        """
        if not self._from_start:
            raise ConfigError(f"{self._path} must be the journal of a whole run, got a later part")
        for now, event, commands in self:
            observer.on_event(now, event)
            for command in commands:
                observer.on_command(now, command)

    def finish(self) -> Core:
        """Replay to the end, and return the core."""
        for _ in self:
            pass
        return self.core
