"""Pages of a CPU's memory: parts of one memory file, which `mmap` places in ranges of
addresses. A page that was used keeps its memory, since the first use of a new one takes
milliseconds.
"""

import ctypes
import os

import torch

from rollweave.engine.pages.base import PAGE_BYTES
from rollweave.schema.errors import PagesError

PROT_NONE, PROT_READ, PROT_WRITE = 0, 1, 2
MAP_SHARED, MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS, MAP_NORESERVE = (
    1,
    2,
    0x10,
    0x20,
    0x4000,
)
FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class MmapPages:
    """The driver of a CPU (`PageDriver`). `page_bytes` is a multiple of the system's
    page.
    """

    def __init__(self, page_bytes: int = PAGE_BYTES) -> None:
        if page_bytes < 1 or page_bytes % os.sysconf("SC_PAGESIZE"):
            raise ValueError(
                f"page_bytes must be a multiple of the system's page, got {page_bytes}"
            )
        self.page_bytes = page_bytes
        self._fd = os.memfd_create("rollweave-pages", os.MFD_CLOEXEC)

    def create(self, pages: int) -> None:
        try:
            os.ftruncate(self._fd, pages * self.page_bytes)
        except OSError as error:
            raise PagesError(f"no room for {pages} pages: {error}") from error

    def reserve(self, nbytes: int) -> int:
        return _mmap(None, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)

    def map(self, address: int, page: int) -> None:
        size = self.page_bytes
        flags = MAP_SHARED | MAP_FIXED
        _mmap(address, size, PROT_READ | PROT_WRITE, flags, self._fd, page * size)
        ctypes.memset(address, 0, size)

    def unmap(self, address: int) -> None:
        flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED
        _mmap(address, self.page_bytes, PROT_NONE, flags)

    def release(self, address: int, nbytes: int) -> None:
        if _libc.munmap(address, nbytes):
            raise PagesError(f"munmap: {os.strerror(ctypes.get_errno())}")

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)

    def close(self) -> None:
        os.close(self._fd)


def _mmap(
    address: int | None,
    nbytes: int,
    protection: int,
    flags: int,
    fd: int = -1,
    offset: int = 0,
) -> int:
    found = _libc.mmap(address, nbytes, protection, flags, fd, offset)
    if found is None or found == FAILED:
        raise PagesError(f"mmap of {nbytes} bytes: {os.strerror(ctypes.get_errno())}")
    return int(found)
