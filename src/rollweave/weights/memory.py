"""Memory files: bytes that every process of the host can map once they are sealed.

No torch here.
"""

import asyncio
import bisect
import fcntl
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from rollweave.schema.errors import WeightsError

T = TypeVar("T")

READ_CHUNK = 1 << 20
"""Bytes hashed or copied at once: large enough to amortise a call, small enough to stay
in the cache between the two.
"""

F_SEAL_FUTURE_WRITE = 0x10  # <linux/fcntl.h>, since 5.1


def seal(fd: int, *, in_flight: bool = False) -> None:
    """Let nobody change the memory file `fd` any more. Raises OSError while it is
    mapped for writing.

    `in_flight`: pages of it may be on their way out of sockets, which the kernel takes
    for writers. Then what is mapped for writing is not looked for, which is for the
    caller to see to; nobody can map it so, or write to it, from now on.
    """
    writes = F_SEAL_FUTURE_WRITE if in_flight else fcntl.F_SEAL_WRITE
    fcntl.fcntl(
        fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | writes
    )


def read_payload(location: str, nbytes: int, *, where: str) -> mmap.mmap | bytearray:
    """What lies at `location`, of exactly `nbytes` bytes: mapped where it is sealed,
    else copied. Writes to it stay here.

    Raises `WeightsError`, whose text begins with `where`.
    """
    try:
        # Without O_NONBLOCK a recycled descriptor that is a pipe would block for ever.
        fd = os.open(location, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise WeightsError(f"{where}: cannot open, the publisher is gone? ({error})") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise WeightsError(f"{where}: not a payload")
        if status.st_size != nbytes:
            raise WeightsError(f"{where}: {status.st_size} bytes, the manifest says {nbytes}")
        if nbytes == 0:
            return bytearray()
        if is_sealed(fd):
            return mmap.mmap(fd, nbytes, access=mmap.ACCESS_COPY)
        # A plain file may be truncated under a mapping, which would kill the reader:
        # copy, then verify the copy.
        payload = bytearray(nbytes)
        with memoryview(payload) as view:
            done = 0
            while done < nbytes:
                count = os.readv(fd, [view[done : done + READ_CHUNK]])
                if count == 0:
                    raise WeightsError(f"{where}: shrank to {done} bytes while it was read")
                done += count
        return payload
    except OSError as error:
        raise WeightsError(f"{where}: cannot read ({error})") from error
    finally:
        os.close(fd)


def is_sealed(fd: int) -> bool:
    """Whether `fd` is a memory file that nobody can change any more."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False  # not a memfd
    return bool(seals & fcntl.F_SEAL_SHRINK and seals & (fcntl.F_SEAL_WRITE | F_SEAL_FUTURE_WRITE))


def available_bytes() -> int:
    """Bytes that this process can still claim: of the host's memory, and of its control
    group's where that has a limit.
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
        pass  # no such group, or an older kind
    return left


async def in_thread(
    function: Callable[..., T], *arguments: Any, undo: Callable[[T], None] | None = None
) -> T:
    """As `asyncio.to_thread`, but it has ended when this returns, even where we are
    cancelled: it writes into memory of ours.

    `undo` gets a result that nobody takes any more.
    """
    running = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        if running.exception() is None and undo is not None:
            undo(running.result())
        raise


class Ranges:
    """A set of byte positions. Neighbouring ranges are one."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._stops, strict=True)

    def add(self, start: int, stop: int) -> None:
        """Bytes `[start, stop)` are there."""
        if start >= stop:
            return
        low, high = bisect.bisect_left(self._stops, start), bisect.bisect_right(self._starts, stop)
        if low < high:
            start, stop = min(start, self._starts[low]), max(stop, self._stops[high - 1])
        self._starts[low:high], self._stops[low:high] = [start], [stop]

    def remove(self, start: int, stop: int) -> None:
        """Bytes `[start, stop)` are not there any more."""
        if start >= stop:
            return
        low, high = bisect.bisect_right(self._stops, start), bisect.bisect_left(self._starts, stop)
        held = zip(self._starts[low:high], self._stops[low:high], strict=True)
        kept = [
            (a, b)
            for first, last in held
            for a, b in ((first, min(last, start)), (max(first, stop), last))
            if a < b
        ]
        self._starts[low:high], self._stops[low:high] = [a for a, _ in kept], [b for _, b in kept]

    def missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        """What of `[start, stop)` is not there."""
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
        """Whether any of `[start, stop)` is there."""
        return start < stop and self.missing(start, stop) != [(start, stop)]
