"""Physical pages of memory that models share: each model has a range of addresses, and
pages move between the ranges without a copy (ROSE §4.1).

Invariants of the pool (`check`): a page is free or mapped in exactly one range at one
place; no place has two pages; the content of a page that is newly mapped is zero, so
that no model reads numbers of another.

Pages of a CPU's memory are parts of one memory file, which `mmap` places in ranges of
addresses. A page that was used keeps its memory, since the first use of a new one takes
milliseconds. Pages of a GPU's memory are those of the driver's virtual memory
management (`cuda.bindings.driver`). **This was not run on a GPU**:
`tests/gpu/test_lending.py` does, where there is one.
"""

import ctypes
import importlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from rollweave.schema.errors import ConfigError, PagesError

PAGE_BYTES = 2 << 20
"""Bytes of a page: the granularity of CUDA's virtual memory management."""


class PageDriver(Protocol):
    """Calls of the system or the GPU. Addresses and sizes are multiples of the page's
    bytes. All raise `PagesError` if the system refuses.
    """

    page_bytes: int

    def create(self, pages: int) -> None:
        """Create the physical pages, numbered from 0. Call it once."""

    def reserve(self, nbytes: int) -> int:
        """Reserve a range of addresses without memory, and return its first one."""

    def map(self, address: int, page: int) -> None:
        """Make a page readable and writable at an address, with zero as its content."""

    def unmap(self, address: int) -> None:
        """Make the page's bytes at an address unreadable again. The page stays."""

    def release(self, address: int, nbytes: int) -> None:
        """Free a range in which nothing is mapped."""

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """Return the bytes of a range, [nbytes] of uint8, whose first page is mapped: a
        GPU is recognized by it. Reading a page that is not mapped ends the process.
        """

    def close(self) -> None:
        """Free the physical pages."""


class PagePool:
    """`pages` physical pages of a driver."""

    def __init__(self, driver: PageDriver, pages: int) -> None:
        if pages < 1:
            raise ValueError(f"pages must be at least 1, got {pages}")
        self.driver, self.total = driver, pages
        driver.create(pages)
        self._free = list(range(pages - 1, -1, -1))
        self._ranges: list[PageRange] = []
        self.moved = 0
        """Number of pages that were mapped, since the pool was created."""

    @property
    def free(self) -> int:
        """Number of pages that are mapped nowhere."""
        return len(self._free)

    def reserve(self, pages: int) -> "PageRange":
        """Reserve addresses for this many pages, without any."""
        found = PageRange(self, pages)
        self._ranges.append(found)
        return found

    def take(self) -> int:
        """Take a free page. Raises `PagesError` without one."""
        if not self._free:
            raise PagesError(f"all {self.total} pages are in use")
        return self._free.pop()

    def give_back(self, page: int) -> None:
        """Free a page that is mapped nowhere any longer."""
        self._free.append(page)

    def forget(self, closed: "PageRange") -> None:
        """Forget a range that was closed."""
        self._ranges.remove(closed)

    def close(self) -> None:
        """Free all ranges and pages."""
        for each in list(self._ranges):
            each.close()
        self.driver.close()

    def check(self) -> None:
        """Assert the invariants of this module."""
        places = [
            *self._free,
            *(page for each in self._ranges for _, page in each.mapped()),
        ]
        assert sorted(places) == list(range(self.total)), "a page is lost, or in two places"


class PageRange:
    """A range of addresses for `pages` pages of a pool."""

    def __init__(self, pool: PagePool, pages: int) -> None:
        if pages < 1:
            raise ValueError(f"pages must be at least 1, got {pages}")
        self.pages, self._pool = pages, pool
        self._bytes = pool.driver.page_bytes
        self.address = pool.driver.reserve(pages * self._bytes)
        self._mapped: dict[int, int] = {}

    def mapped(self) -> Iterator[tuple[int, int]]:
        """Yield the places with a page, and the pages."""
        yield from self._mapped.items()

    def tensor(self) -> torch.Tensor:
        """Return the bytes of the range, [pages * page bytes] of uint8. Its first page
        must be mapped.
        """
        return self._pool.driver.tensor(self.address, self.pages * self._bytes)

    def map(self, place: int) -> None:
        """Map a free page at a place that has none. Raises `PagesError` without a free
        page, and ValueError for a wrong place.
        """
        if not 0 <= place < self.pages or place in self._mapped:
            raise ValueError(f"place must be an empty one of {self.pages}, got {place}")
        page = self._pool.take()
        try:
            self._pool.driver.map(self.address + place * self._bytes, page)
        except BaseException:
            self._pool.give_back(page)
            raise
        self._mapped[place] = page
        self._pool.moved += 1

    def unmap(self, place: int) -> None:
        """Return the page at a place to the pool. Raises ValueError without one."""
        if place not in self._mapped:
            raise ValueError(f"place must be a mapped one, got {place}")
        self._pool.driver.unmap(self.address + place * self._bytes)
        self._pool.give_back(self._mapped.pop(place))

    def close(self) -> None:
        """Return all pages, and free the addresses."""
        for place in list(self._mapped):
            self.unmap(place)
        self._pool.driver.release(self.address, self.pages * self._bytes)
        self._pool.forget(self)


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


class CudaPages:
    """The driver of GPU number `device` (`PageDriver`). `driver` is the module of the
    driver's calls.
    """

    def __init__(self, driver: Any, device: int = 0) -> None:
        self._driver, self._device = driver, device
        self._handles: list[Any] = []
        place = driver.CUmemLocation()
        place.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        place.id = device
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location = place
        self._access = driver.CUmemAccessDesc()
        self._access.location = place
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        (least,) = self._call(
            "cuMemGetAllocationGranularity",
            self._properties,
            driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
        )
        self.page_bytes = -(-PAGE_BYTES // int(least)) * int(least)

    def create(self, pages: int) -> None:
        for _ in range(pages):
            (handle,) = self._call("cuMemCreate", self.page_bytes, self._properties, 0)
            self._handles.append(handle)

    def reserve(self, nbytes: int) -> int:
        (address,) = self._call("cuMemAddressReserve", nbytes, self.page_bytes, 0, 0)
        return int(address)

    def map(self, address: int, page: int) -> None:
        size = self.page_bytes
        self._call("cuMemMap", address, size, 0, self._handles[page], 0)
        self._call("cuMemSetAccess", address, size, [self._access], 1)
        self._call("cuMemsetD8", address, 0, size)

    def unmap(self, address: int) -> None:
        self._call("cuCtxSynchronize")  # no kernel may still read the page
        self._call("cuMemUnmap", address, self.page_bytes)

    def release(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", address, nbytes)

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        return torch.as_tensor(_Bytes(address, nbytes), device=f"cuda:{self._device}")

    def close(self) -> None:
        for handle in self._handles:
            self._call("cuMemRelease", handle)
        self._handles.clear()

    def _call(self, name: str, *arguments: Any) -> Sequence[Any]:
        """Call the driver, and return its results without the status."""
        answer: tuple[Any, ...] = getattr(self._driver, name)(*arguments)
        status, *results = answer
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise PagesError(f"{name}: {status}")
        return results


class _Bytes:
    """A range of a GPU's addresses, as other libraries describe their arrays to
    torch.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def driver_of(device: torch.device, page_bytes: int) -> PageDriver:
    """Return the driver of a device's pages, of `page_bytes` or more. Call it on the
    thread that uses it.

    Raises ConfigError for a GPU without the package that calls its driver.
    """
    if device.type == "cpu":
        return MmapPages(page_bytes)
    try:
        driver: Any = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise ConfigError(
            f"--device must be cpu with --lend unless cuda-bindings is installed, got {device}: "
            f"{error}"
        ) from None
    make_current(device)
    return CudaPages(driver, device.index or 0)


def make_current(device: torch.device) -> None:
    """Make torch's context of a GPU that of the calling thread."""
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
