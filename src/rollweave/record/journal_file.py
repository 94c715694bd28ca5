"""The journal: `(now, event)` records appended to a file of checksummed records
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

SCHEMA_VERSION = 2
"""Goes up when an event changes so that older journals no longer decode."""

SNAPSHOT, RECORD = 1, 2
REMEDY = (
    "restore an intact copy, or cut off the damage and all that follows it by `truncate -s "
    "{offset} {path}`: what the "
    "run did after that is lost"
)


def journal_format(version: int = SCHEMA_VERSION) -> RecordFormat:
    """The file format of a journal."""
    return RecordFormat(
        name="a journal",
        magic=b"RWJRNL\r\n",
        version=version,
        kinds=(SNAPSHOT, RECORD),
        remedy=REMEDY,
    )


class JournalReader(Generic[T]):
    """The snapshot and the records of a journal whose events are of type `kind`.

    Reads the file once, up to its torn tail.
    """

    def __init__(self, path: str | Path, kind: Any, *, version: int = SCHEMA_VERSION) -> None:
        """Raises FileNotFoundError, and CorruptJournalError for a file that is no
        journal of this schema version.
        """
        self._path = Path(path)
        self._decode = msgspec.msgpack.Decoder(tuple[float, kind]).decode
        self._format = journal_format(version)

    def snapshot(self) -> bytes | None:
        """The snapshot that the journal starts from, None where it starts from nothing."""
        for raw in self._format.scan(self._path):
            return raw.payload if raw.kind == SNAPSHOT else None
        return None

    def __iter__(self) -> Iterator[tuple[float, T]]:
        """Every whole `(now, event)`, in order.

        Raises CorruptJournalError at the first that is damaged before the tail.
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

    `append` writes through to the operating system, without a buffer of ours; `sync` to
    the disk.
    """

    def __init__(self, path: str | Path, *, version: int = SCHEMA_VERSION) -> None:
        """Open or create; a torn tail is cut off.

        Raises CorruptJournalError, and DiskError.
        """
        self.path = Path(path)
        self._format = journal_format(version)
        whole = self._format.whole_bytes(self.path)
        self.torn = max(0, (self.path.stat().st_size if self.path.exists() else 0) - whole)
        """Bytes of an incomplete last record that were cut off: its writer was killed."""
        self._file = AppendFile(self.path, keep=whole, header=self._format.header)

    @property
    def size(self) -> int:
        """Bytes written, all of them whole records."""
        return self._file.size

    def append(self, now: float, event: object) -> None:
        """Append one record. Raises DiskError; the journal then is as it was before."""
        self._file.append(self._format.record(RECORD, packed((now, event)), self._file.size))

    def sync(self) -> None:
        """Return when everything that was appended would survive a power loss.

        Raises DiskError.
        """
        self._file.sync()

    def rotate(self, snapshot: bytes) -> None:
        """Go on in a new file that starts with `snapshot` and takes this one's name,
        atomically.

        Raises DiskError, and the journal then goes on as it is.
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
