"""The journal's file: `(now, event)` records appended to a file of checksummed records
(`record/record_file.py`).

A file is a header, at most one snapshot, then records. Invariants: when `append`
returns, the operating system has the record; when `sync` returns, it is on the disk;
damage anywhere before the torn tail raises `CorruptJournalError` with its offset, and
nothing is repaired silently; `rotate` leaves the old file or the new one, never a
mixture.
"""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import msgspec

from rollweave.io.disk import AppendFile, replace_file
from rollweave.record.record_file import RecordFormat
from rollweave.schema.errors import CorruptJournalError
from rollweave.schema.packing import packed

T = TypeVar("T")

SCHEMA_VERSION = 7
"""Version of the schema of events and of the core's state. It increases with a change
of either schema after which older journals no longer decode.
"""

SNAPSHOT, RECORD = 1, 2
REMEDY = (
    "restore an intact copy, or cut off the damage and all that follows it by `truncate -s "
    "{offset} {path}`: what the run did after that is lost"
)


def journal_format(version: int = SCHEMA_VERSION) -> RecordFormat:
    """Return the file format of a journal."""
    return RecordFormat(
        name="a journal",
        magic=b"RWJRNL\r\n",
        version=version,
        kinds=(SNAPSHOT, RECORD),
        remedy=REMEDY,
    )


class JournalReader(Generic[T]):
    """The snapshot and the records of a journal whose events are of type `kind`.

    It reads the file once, up to its torn tail.
    """

    def __init__(self, path: str | Path, kind: Any, *, version: int = SCHEMA_VERSION) -> None:
        """Open the journal. Raises FileNotFoundError, and CorruptJournalError if the
        file is not a journal of this schema version.
        """
        self._path = Path(path)
        self._decode = msgspec.msgpack.Decoder(tuple[float, kind]).decode
        self._format = journal_format(version)

    def snapshot(self) -> bytes | None:
        """Return the snapshot that the journal starts from; None if it starts from an
        empty state.
        """
        for raw in self._format.scan(self._path):
            return raw.payload if raw.kind == SNAPSHOT else None
        return None

    def __iter__(self) -> Iterator[tuple[float, T]]:
        """Yield every complete `(now, event)`, in order.

        Raises CorruptJournalError at the first damaged record before the tail.
        """
        for raw in self._format.scan(self._path):
            if raw.kind != RECORD:
                continue
            try:
                now, event = self._decode(raw.payload)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise CorruptJournalError(
                    f"{self._path}: record at byte {raw.offset} does not decode: {error}"
                ) from error
            yield now, event


class JournalWriter:
    """Appends to a journal.

    `append` writes through to the operating system, without a buffer in this process;
    `sync` writes to the disk.
    """

    def __init__(self, path: str | Path, *, version: int = SCHEMA_VERSION) -> None:
        """Open or create the file, and cut off a torn tail.

        Raises CorruptJournalError, and DiskError.
        """
        self.path = Path(path)
        self._format = journal_format(version)
        complete = self._format.complete_bytes(self.path)
        self.torn = max(0, (self.path.stat().st_size if self.path.exists() else 0) - complete)
        """Number of bytes of an incomplete last record, cut off because its writer
        died.
        """
        self._file = AppendFile(self.path, keep=complete, header=self._format.header)

    @property
    def size(self) -> int:
        """Number of bytes written, all of them complete records."""
        return self._file.size

    def append(self, now: float, event: object) -> None:
        """Append one record. Raises DiskError, and the journal is then unchanged."""
        self._file.append(self._format.record(RECORD, packed((now, event)), self._file.size))

    def sync(self) -> None:
        """Return once all appended records would survive a power loss.

        Raises DiskError.
        """
        self._file.sync()

    def rotate(self, snapshot: bytes) -> None:
        """Continue in a new file that starts with `snapshot` and replaces this file
        atomically.

        Raises DiskError, and the journal then continues unchanged.
        """
        content = self._format.header
        content += self._format.record(SNAPSHOT, snapshot, len(content))
        replace_file(self.path, content)
        self._file.close()
        self._file = AppendFile(self.path, keep=len(content))

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
