"""The journal: `(now, event)` records appended to a file, each with its length and checksum.

A file is a header (magic, schema version), at most one snapshot at its start, then records. Invariants: what `append` returned
from has been handed to the operating system, what `sync` returned from is on the disk; a file cut off at any byte, or ending in
zeros, opens as the records that are whole; damage anywhere before the last record raises `CorruptJournalError` with its
offset, and nothing is repaired silently; `rotate` leaves the old file or the new one, never a mixture.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import msgspec
import xxhash

from rollweave.codec.disk import AppendFile, replace_file
from rollweave.schema.errors import CorruptJournalError

T = TypeVar("T")

MAGIC = b"RWJRNL\r\n"
SCHEMA_VERSION = 1
"""Goes up when an event changes so that older journals no longer decode."""

HEADER = struct.Struct("<8sI")  # magic, schema version
HEAD = struct.Struct("<IB3xIQ")  # payload bytes, kind, check of these two at this offset, xxh3-64 of the payload
SNAPSHOT, RECORD = 1, 2


@dataclass(frozen=True, slots=True)
class _Raw:
    offset: int
    end: int
    kind: int
    payload: bytes


class JournalReader(Generic[T]):
    """The snapshot and the records of a journal whose events are of type `kind`. Reads the file once, up to its torn tail."""

    def __init__(self, path: str | Path, kind: Any, *, version: int = SCHEMA_VERSION) -> None:
        """Raises FileNotFoundError, and CorruptJournalError for a file that is no journal of this schema version."""
        self._path = Path(path)
        self._decode = msgspec.msgpack.Decoder(tuple[float, kind]).decode
        self._version = version

    def snapshot(self) -> bytes | None:
        """The snapshot that the journal starts from, None where it starts from nothing."""
        for raw in _scan(self._path, self._version):
            return raw.payload if raw.kind == SNAPSHOT else None
        return None

    def __iter__(self) -> Iterator[tuple[float, T]]:
        """Every whole `(now, event)`, in order. Raises CorruptJournalError at the first that is damaged before the tail."""
        for raw in _scan(self._path, self._version):
            if raw.kind != RECORD:
                continue
            try:
                now, event = self._decode(raw.payload)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise CorruptJournalError(f"{self._path}: record at byte {raw.offset} does not decode: {error}") from error
            yield now, event


class JournalWriter:
    """Appends to a journal. `append` writes through to the operating system, without a buffer of ours; `sync` to the disk."""

    def __init__(self, path: str | Path, *, version: int = SCHEMA_VERSION) -> None:
        """Open or create; a torn tail is cut off. Raises CorruptJournalError, and DiskError."""
        self.path = Path(path)
        self._version = version
        self._encoder = msgspec.msgpack.Encoder()
        whole = _whole_bytes(self.path, version) if self.path.exists() else 0
        self._file = AppendFile(self.path, keep=whole, header=HEADER.pack(MAGIC, version))

    @property
    def size(self) -> int:
        """Bytes written, all of them whole records."""
        return self._file.size

    def append(self, now: float, event: object) -> None:
        """Append one record. Raises DiskError; the journal then is as it was before."""
        self._file.append(_record(RECORD, self._encoder.encode((now, event)), self._file.size))

    def sync(self) -> None:
        """Return when everything that was appended would survive a power loss. Raises DiskError."""
        self._file.sync()

    def rotate(self, snapshot: bytes) -> None:
        """Go on in a new file that starts with `snapshot` and takes this one's name, atomically.

        Raises DiskError, and the journal then goes on as it is.
        """
        content = HEADER.pack(MAGIC, self._version)
        content += _record(SNAPSHOT, snapshot, len(content))
        replace_file(self.path, content)
        self._file.close()
        self._file = AppendFile(self.path, keep=len(content))

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _record(kind: int, payload: bytes, offset: int) -> bytes:
    head = HEAD.pack(len(payload), kind, _check(len(payload), kind, offset), xxhash.xxh3_64_intdigest(payload))
    return head + payload


def _check(nbytes: int, kind: int, offset: int) -> int:
    """So that a damaged length is seen as damage, not taken for a record that was cut off."""
    return xxhash.xxh32_intdigest(struct.pack("<IBQ", nbytes, kind, offset), seed=SCHEMA_VERSION)


def _scan(path: Path, version: int) -> Iterator[_Raw]:
    """The whole records of a file, in order."""
    data = path.read_bytes()
    header = HEADER.pack(MAGIC, version)
    if header.startswith(data.rstrip(b"\0")) and not data.startswith(header):
        return  # cut off while it was being created
    magic, found = HEADER.unpack_from(data) if len(data) >= HEADER.size else (b"", 0)
    if magic != MAGIC:
        raise CorruptJournalError(f"{path}: is not a journal (byte 0)")
    if found != version:
        raise CorruptJournalError(f"{path}: schema version must be {version}, got {found} (byte {len(MAGIC)})")
    offset, view = HEADER.size, memoryview(data)
    while offset + HEAD.size <= len(data):
        nbytes, kind, check, digest = HEAD.unpack_from(data, offset)
        start = offset + HEAD.size
        if check != _check(nbytes, kind, offset) or kind not in (SNAPSHOT, RECORD):
            if not _blank(data, start):
                raise CorruptJournalError(f"{path}: record at byte {offset} is damaged")
            return
        end = start + nbytes
        if end > len(data):
            return
        if xxhash.xxh3_64_intdigest(view[start:end]) != digest:
            if not _blank(data, end):
                raise CorruptJournalError(f"{path}: record at byte {offset} does not match its checksum")
            return
        yield _Raw(offset=offset, end=end, kind=kind, payload=data[start:end])
        offset = end


def _whole_bytes(path: Path, version: int) -> int:
    """Bytes of the header and of the whole records; 0 where not even the header is whole."""
    with path.open("rb") as file:
        end = HEADER.size if file.read(HEADER.size) == HEADER.pack(MAGIC, version) else 0
    for raw in _scan(path, version):
        end = raw.end
    return end


def _blank(data: bytes, start: int) -> bool:
    """True if nothing follows: the file ends, or was made longer but not yet written when the power went."""
    return data.count(0, start) == max(0, len(data) - start)
