"""Memory that processes of a host share, and the bookkeeping of its bytes: memory files
that any process can map once they are sealed, ranges of bytes, and work in threads that
write into such memory.

This module does not import torch.
"""

import asyncio
import bisect
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from rollweave.schema.errors import WeightsError
from rollweave.schema.weights import WeightManifest, WeightPart

T = TypeVar("T")

READ_CHUNK = 1 << 20
"""Bytes hashed or copied in one call: enough to amortize a call, few enough to stay in
the cache between hashing and copying.
"""

F_SEAL_FUTURE_WRITE = 0x10  # <linux/fcntl.h>, since 5.1


def seal(fd: int, *, in_flight: bool = False) -> None:
    """Seal memory file `fd` against changes. Raises OSError while it is mapped for
    writing.

    With `in_flight`, its pages may still be leaving through sockets, which the kernel
    counts as writers. Existing writable mappings are then not detected and are the
    caller's responsibility; new mappings, and writes, are refused from now on.
    """
    writes = F_SEAL_FUTURE_WRITE if in_flight else fcntl.F_SEAL_WRITE
    fcntl.fcntl(
        fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | writes
    )


def open_payload(location: str, nbytes: int, *, where: str) -> int:
    """Open the payload of exactly `nbytes` bytes at `location`, and return its
    descriptor, which the caller closes.

    Raises `WeightsError`, whose text begins with `where`.
    """
    try:
        # Without O_NONBLOCK a recycled descriptor that is a pipe would block forever.
        fd = os.open(location, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise WeightsError(f"{where}: cannot open, the publisher is gone? ({error})") from error
    status = os.fstat(fd)
    sealed = is_sealed(fd)
    if sealed and status.st_size == nbytes:
        return fd
    os.close(fd)
    if not sealed:  # it may be truncated under a mapping, which would kill the reader
        raise WeightsError(f"{where}: not a payload, which is a sealed memory file")
    raise WeightsError(f"{where}: {status.st_size} bytes, the manifest says {nbytes}")


def read_payload(location: str, nbytes: int, *, where: str) -> mmap.mmap | bytearray:
    """Map the payload of exactly `nbytes` bytes at `location`. Writes to it stay
    private. Raises as `open_payload` does.
    """
    fd = open_payload(location, nbytes, where=where)
    try:
        if nbytes == 0:
            return bytearray()
        return mmap.mmap(fd, nbytes, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise WeightsError(f"{where}: cannot read ({error})") from error
    finally:
        os.close(fd)


def read_into(view: memoryview, fd: int, offset: int = 0) -> int:
    """Read bytes of a file from `offset` on into `view`, and return their number, which
    is less than the view's length only at the end of the file. Raises OSError.
    """
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done : done + READ_CHUNK]], offset + done)
        if count == 0:
            break
        done += count
    return done


def hash_file(content: Any, fd: int, start: int, stop: int) -> None:
    """Add bytes `[start, stop)` of a file to a hash. Raises OSError if they are not
    there.
    """
    with memoryview(bytearray(min(READ_CHUNK, stop - start))) as buffer:
        while start < stop:
            count = os.preadv(fd, [buffer[: stop - start]], start)
            if count == 0:
                raise OSError(f"shrank to {start} bytes")
            content.update(buffer[:count])
            start += count


def is_sealed(fd: int) -> bool:
    """Return whether `fd` is a memory file that is sealed against changes."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False  # not a memfd
    return bool(seals & fcntl.F_SEAL_SHRINK and seals & (fcntl.F_SEAL_WRITE | F_SEAL_FUTURE_WRITE))


def available_bytes() -> int:
    """Return the bytes that this process can still allocate, limited by the host's
    memory and by its control group.
    """
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    left = int(fields["MemAvailable"].split()[0]) << 10
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (
            (group / "memory.max").read_text().strip(),
            int((group / "memory.current").read_text()),
        )
        usage = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        if limit != "max":
            left = min(
                left, int(limit) - used + int(usage["inactive_file"]) + int(usage["active_file"])
            )
    except (OSError, ValueError, KeyError):
        pass  # there is no such group, or it is of cgroup v1
    return left


async def in_thread(
    function: Callable[..., T], *arguments: Any, undo: Callable[[T], None] | None = None
) -> T:
    """Run like `asyncio.to_thread`, but return only after the function has ended, even
    when cancelled: it writes into our memory.

    `undo` receives the result if the caller was cancelled.
    """
    running = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        if running.exception() is None and undo is not None:
            undo(running.result())
        raise


class PayloadDigest:
    """The digest of a version, from its bytes in order (`WeightManifest.digest`)."""

    def __init__(self, parts: Sequence[WeightPart] = ()) -> None:
        self._hashes = [xxhash.xxh3_128() for _ in range(max(1, len(parts)))]
        self._parted = bool(parts)
        self._pieces = sorted(
            (start, stop, number)
            for number, part in enumerate(parts)
            for start, stop in part.ranges
        )
        self._next = self._at = 0

    def update(self, data: memoryview | bytes) -> None:
        """Add the bytes that follow."""
        if not self._parted:
            self._hashes[0].update(data)
            return
        with memoryview(data) as view:
            begin, self._at = self._at, self._at + len(view)
            while self._next < len(self._pieces):
                start, stop, number = self._pieces[self._next]
                low, high = max(start, begin), min(stop, self._at)
                if low < high:
                    self._hashes[number].update(view[low - begin : high - begin])
                if stop > self._at:
                    break
                self._next += 1

    def hexdigest(self) -> str:
        digests = [content.hexdigest() for content in self._hashes]
        return combined_digest(digests) if self._parted else digests[0]


def combined_digest(digests: Sequence[str]) -> str:
    """Return the digest of a version whose parts have these digests."""
    return xxhash.xxh3_128_hexdigest(",".join(digests).encode())


class Ranges:
    """A set of byte positions, as disjoint half-open ranges in order. Adjacent ranges
    are merged.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._stops, strict=True)

    def add(self, start: int, stop: int) -> None:
        """Add bytes `[start, stop)`."""
        if start >= stop:
            return
        low, high = bisect.bisect_left(self._stops, start), bisect.bisect_right(self._starts, stop)
        if low < high:
            start, stop = min(start, self._starts[low]), max(stop, self._stops[high - 1])
        self._starts[low:high], self._stops[low:high] = [start], [stop]

    def remove(self, start: int, stop: int) -> None:
        """Remove bytes `[start, stop)`."""
        if start >= stop:
            return
        low, high = bisect.bisect_right(self._stops, start), bisect.bisect_left(self._starts, stop)
        overlapping = zip(self._starts[low:high], self._stops[low:high], strict=True)
        kept = [
            (a, b)
            for first, last in overlapping
            for a, b in ((first, min(last, start)), (max(first, stop), last))
            if a < b
        ]
        self._starts[low:high], self._stops[low:high] = [a for a, _ in kept], [b for _, b in kept]

    def missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the ranges of `[start, stop)` that are not in the set."""
        gaps, at = [], start
        for number in range(bisect.bisect_right(self._stops, start), len(self._starts)):
            low, high = self._starts[number], self._stops[number]
            if low >= stop:
                break
            if low > at:
                gaps.append((at, low))
            at = high
        if at < stop:
            gaps.append((at, stop))
        return gaps

    def touches(self, start: int, stop: int) -> bool:
        """Return whether any of `[start, stop)` is in the set."""
        return start < stop and self.missing(start, stop) != [(start, stop)]


def read_version(manifest: WeightManifest, location: str) -> mmap.mmap | bytearray:
    """Return the payload of a version, as `read_payload` does, after checking its
    digest.

    `location` is the manifest's location or another name of the same memory. Raises
    `WeightsError`.
    """
    where = f"weights version {manifest.version} at {manifest.location}"
    buffer = read_payload(location, manifest.nbytes, where=where)
    content = PayloadDigest(manifest.parts)
    with memoryview(buffer) as view:
        for start in range(0, len(view), READ_CHUNK):
            content.update(view[start : start + READ_CHUNK])
    if content.hexdigest() != manifest.digest:
        raise WeightsError(
            f"{where}: digest {content.hexdigest()}, the manifest says {manifest.digest}"
        )
    return buffer
