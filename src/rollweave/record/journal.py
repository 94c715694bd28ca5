"""The run's journal: every handled event, its time, and a digest of what the core
decided.

Invariants: a record is handed to the operating system before any command that it caused
is executed; replaying the events on a core like the one they happened to gives commands
with the same digests. A difference says that the code has changed.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, Self

import msgspec
import xxhash

from rollweave.core.core import Core
from rollweave.core.policy.experience import Rule
from rollweave.record.journal_file import JournalReader, JournalWriter
from rollweave.schema.base import Struct
from rollweave.schema.commands import Command
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError, CorruptJournalError
from rollweave.schema.events import Event, RunStarted
from rollweave.schema.packing import packed


class Handled(Struct, frozen=True, kw_only=True):
    """One event, and the xxh3-64 of the commands that it caused."""

    event: Event
    digest: int


def digest(commands: Sequence[Command]) -> int:
    """Equal for equal commands in equal order."""
    return xxhash.xxh3_64_intdigest(packed(commands)) if commands else 0


class RunJournal:
    """Appends to the journal of one run."""

    def __init__(self, path: Path) -> None:
        """Raises CorruptJournalError, and DiskError."""
        self._writer = JournalWriter(path)
        self.begun = self._writer.size
        """Bytes that it began with: of its snapshot, or of what an earlier life wrote."""

    @property
    def torn(self) -> int:
        """Bytes of an incomplete last record, which was cut off when the journal was
        opened.
        """
        return self._writer.torn

    @property
    def grown(self) -> int:
        """Bytes since then."""
        return self._writer.size - self.begun

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self._writer.size

    def append(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Record one handled event. On return it survives our death.

        Raises DiskError.
        """
        self._writer.append(now, Handled(event=event, digest=digest(commands)))

    def sync(self) -> None:
        """On return all that was recorded survives a power loss. Raises DiskError."""
        self._writer.sync()

    def rotate(self, snapshot: bytes) -> None:
        """Begin anew with the core's snapshot of this moment.

        Raises DiskError, and the journal then goes on as it is.
        """
        self._writer.rotate(snapshot)
        self.begun = self._writer.size

    def close(self) -> None:
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Reader(Protocol):
    """Who is told of a run from its journal."""

    def hear(self, now: float, event: Event) -> None:
        """An event."""

    def told(self, now: float, command: Command) -> None:
        """A command that the event just heard led to."""


class Replay:
    """Rebuilds the core from a journal.

    Iterate to the end; then `core` stands where the run stood.
    """

    def __init__(
        self, path: Path, config: RunConfig, *, rules: Mapping[str, Rule] | None = None
    ) -> None:
        """`config` is the one under which the events happened, `rules` are what it
        names. Raises CorruptJournalError.
        """
        self._path = path
        self._journal: JournalReader[Handled] = JournalReader(path, Handled)
        snapshot = self._journal.snapshot()
        try:
            self.core = (
                Core(config, rules=rules)
                if snapshot is None
                else Core.restore(snapshot, config, rules=rules)
            )
        except msgspec.DecodeError as error:
            raise CorruptJournalError(f"{path}: its snapshot does not decode: {error}") from error
        self._whole = snapshot is None
        self.events = 0
        self.differing = 0
        """Events whose commands are not those that were decided then."""

    def __iter__(self) -> Iterator[tuple[float, Event, list[Command]]]:
        """Yield every event with its time and the commands that it leads to.

        Raises CorruptJournalError.
        """
        for now, handled in self._journal:
            if self._whole and not self.events and not isinstance(handled.event, RunStarted):
                found = type(handled.event).__name__
                raise CorruptJournalError(
                    f"{self._path} must begin with a snapshot or RunStarted, got {found}: its "
                    "beginning is lost"
                )
            commands = self.core.handle(now, handled.event)
            self.events += 1
            self.differing += digest(commands) != handled.digest
            yield now, handled.event, commands

    @property
    def run_id(self) -> str:
        """Id of the journal's run, known before the replay; empty if the journal has
        none.
        """
        if self.core.state.run_id or not self._whole:
            return self.core.state.run_id
        first = next(iter(self._journal), None)
        return (
            first[1].event.run_id
            if first is not None and isinstance(first[1].event, RunStarted)
            else ""
        )

    def tell(self, reader: Reader) -> None:
        """Replay all of a whole run to `reader`.

        Raises ConfigError for a journal that was compacted.
        """
        for now, event, commands in self:
            if self.events == 1 and not isinstance(event, RunStarted):
                raise ConfigError(
                    f"{self._path} must be the journal of a whole run, it begins "
                    f"with {type(event).__name__}"
                )
            reader.hear(now, event)
            for command in commands:
                reader.told(now, command)

    def finish(self) -> Core:
        """Replay all; the core at the end."""
        for _ in self:
            pass
        return self.core
