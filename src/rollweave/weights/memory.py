"""Memory files: bytes that every process of the host can map once they are sealed.

No torch here.
"""

import fcntl
import mmap
import os
import stat

from rollweave.schema.errors import WeightsError

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
