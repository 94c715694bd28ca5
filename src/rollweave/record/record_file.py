"""Files of checksummed records: a header with magic and version, then appended records,
each of which begins with a head.

Every byte is checked: the whole header is compared, a record's length and kind have a
checksum that also covers its offset, and its payload has a digest. Invariants: a file
that is cut off at any byte, or ends in space that a power loss left unwritten, reads as
its complete records; damage anywhere else raises `CorruptJournalError` with file,
offset and remedy.
"""

import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

import msgspec
import xxhash

from rollweave.io.reading import opened
from rollweave.schema.errors import CorruptJournalError

T = TypeVar("T")

HEADER = struct.Struct("<8sI")  # magic, version
# payload bytes, kind, checksum of both and of the offset, xxh3-64 of the payload
HEAD = struct.Struct("<IB3xIQ")


BLANK_BYTES = 64 << 20
"""Maximum bytes of space that a power loss may leave unwritten at the end of a file."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record.

    Its head begins at `offset`, and the next record at `end`.
    """

    offset: int
    end: int
    kind: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """One kind of file.

    `remedy` completes the error for a damaged file with what a user can do; it may use
    {path} and {offset}.
    """

    name: str
    magic: bytes
    version: int
    kinds: tuple[int, ...]
    remedy: str

    @property
    def header(self) -> bytes:
        return HEADER.pack(self.magic, self.version)

    def record(self, kind: int, payload: bytes, offset: int) -> bytes:
        """Return the bytes of a record to be appended at `offset`."""
        return self.head(kind, payload, offset) + payload

    def head(self, kind: int, payload: bytes, offset: int) -> bytes:
        check = self._check(len(payload), kind, offset)
        return HEAD.pack(len(payload), kind, check, xxhash.xxh3_64_intdigest(payload))

    def payload(self, piece: bytes, offset: int) -> bytes | None:
        """Return the payload of the record whose bytes `piece` was read at `offset`;
        None if the record is damaged.
        """
        if len(piece) < HEAD.size:
            return None
        nbytes, kind, check, digest = HEAD.unpack_from(piece)
        payload = piece[HEAD.size :]
        whole = check == self._check(nbytes, kind, offset) and len(payload) == nbytes
        return payload if whole and xxhash.xxh3_64_intdigest(payload) == digest else None

    def scan(self, path: Path, *, start: int = 0) -> Iterator[Record]:
        """Yield the complete records of a file, in order, up to its torn tail. `start`
        is the end of an earlier record: only the following records are then yielded.

        Raises CorruptJournalError, OSError.
        """
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            if start == 0:
                head = file.read(HEADER.size)
                torn = head != self.header and self.header.startswith(head.rstrip(b"\0"))
                if torn and _is_blank(file, size):
                    return  # the file was cut off while it was created
                self._check_header(path, head)
            offset = max(start, HEADER.size)
            file.seek(offset)
            while offset + HEAD.size <= size:
                piece = file.read(HEAD.size)
                if len(piece) < HEAD.size:
                    return  # the file was cut off meanwhile
                nbytes, kind, check, digest = HEAD.unpack(piece)
                if check != self._check(nbytes, kind, offset) or kind not in self.kinds:
                    if not _is_blank(file, size):
                        raise self.damaged(path, offset, f"record at byte {offset} is damaged")
                    return
                end = offset + HEAD.size + nbytes
                if end > size:
                    return
                payload = file.read(nbytes)
                if len(payload) < nbytes:
                    return
                if xxhash.xxh3_64_intdigest(payload) != digest:
                    if not (_unwritten(payload) and _is_blank(file, size)):
                        text = f"record at byte {offset} does not match its checksum"
                        raise self.damaged(path, offset, text)
                    return
                yield Record(offset=offset, end=end, kind=kind, payload=payload)
                offset = end

    def decoded(
        self, path: Path, kind: int, decode: Callable[[bytes], T], *, start: int = 0
    ) -> Iterator[tuple[Record, T]]:
        """Yield the records of `scan` that are of this kind, each with what `decode`
        makes of its payload.

        Raises CorruptJournalError also for a payload that does not decode.
        """
        for record in self.scan(path, start=start):
            if record.kind != kind:
                continue
            try:
                value = decode(record.payload)
            except (msgspec.DecodeError, ValueError, struct.error) as error:
                raise CorruptJournalError(
                    f"{path}: record at byte {record.offset} does not decode: {error}"
                ) from error
            yield record, value

    def _check_header(self, path: Path, data: bytes) -> None:
        magic, version = HEADER.unpack_from(data) if len(data) >= HEADER.size else (b"", 0)
        if magic != self.magic:
            raise self.damaged(path, 0, f"is not {self.name} at byte 0")
        if version != self.version:
            raise CorruptJournalError(
                f"{path}: schema version must be {self.version}, got {version} (byte "
                f"{len(self.magic)})"
            )

    def complete_bytes(self, path: Path) -> int:
        """Return the length in bytes of the header and all complete records; 0 without
        a file or a complete header. Raises the errors of `scan`.
        """
        end = self.header_bytes(path)
        for record in self.scan(path) if path.exists() else ():
            end = record.end
        return end

    def header_bytes(self, path: Path) -> int:
        """Return the length in bytes of the header; 0 without a file or a complete
        header.

        Raises OSError.
        """
        if not path.exists():
            return 0
        with opened(path) as file:
            return HEADER.size if file.read(HEADER.size) == self.header else 0

    def _check(self, nbytes: int, kind: int, offset: int) -> int:
        """Compute the checksum of length and kind, so that a damaged length does not
        look like a record that was cut off.
        """
        return xxhash.xxh32_intdigest(struct.pack("<IBQ", nbytes, kind, offset), seed=self.version)

    def damaged(self, path: Path, offset: int, problem: str) -> CorruptJournalError:
        """Return the error for a file that is damaged at `offset`."""
        return CorruptJournalError(
            f"{path}: {problem} ({path.stat().st_size} bytes)",
            self.remedy.format(path=path, offset=offset),
        )


def _is_blank(file: IO[bytes], size: int) -> bool:
    """Return whether no record follows in a file of this size: the file ends, or was
    extended but not yet written when the power failed.
    """
    if size - file.tell() > BLANK_BYTES:
        return False
    rest = file.read(max(0, size - file.tell()))
    return rest.count(0) == len(rest)


def _unwritten(payload: bytes) -> bool:
    """Return whether the payload ends in zeros, because its space was allocated but not
    written before a power loss.
    """
    return not payload or payload[-1] == 0
