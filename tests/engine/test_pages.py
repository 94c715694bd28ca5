"""Pages that move between ranges: both drivers against one suite, walks against a slow
reference, and memory that is not mapped, in a process of its own.
"""

import enum
import signal
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollweave.engine.pages import CudaPages, MmapPages, PageDriver, PagePool, driver_of
from rollweave.schema.errors import ConfigError, PagesError

PAGE = 8192


class Result(enum.Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_VALUE = 1


class StandIn:
    """The calls of CUDA's driver that the pages use, on the CPU. Wrong calls get the
    driver's errors.
    """

    CUresult = Result
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemLocation = CUmemAllocationProp = CUmemAccessDesc = SimpleNamespace

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._created: set[int] = set()
        self._mapped: dict[int, int] = {}
        self._accessible: set[int] = set()
        self._ranges: dict[int, int] = {}
        self._next = 1 << 40
        self.calls: list[str] = []

    def cuMemGetAllocationGranularity(self, *_: Any) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, 2 << 20

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[Result, int]:
        if len(self._created) == self._most:
            return Result.CUDA_ERROR_OUT_OF_MEMORY, 0
        handle = len(self._created)
        self._created.add(handle)
        return Result.CUDA_SUCCESS, handle

    def cuMemAddressReserve(self, size: int, *_: Any) -> tuple[Result, int]:
        address, self._next = self._next, self._next + size
        self._ranges[address] = size
        return Result.CUDA_SUCCESS, address

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, _: int) -> tuple[Result]:
        inside = any(at <= address < at + length for at, length in self._ranges.items())
        if not inside or address in self._mapped or handle not in self._created:
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        self._mapped[address] = handle
        return (Result.CUDA_SUCCESS,)

    def cuMemSetAccess(self, address: int, *_: Any) -> tuple[Result]:
        self._accessible.add(address)
        return (Result.CUDA_SUCCESS,)

    def cuMemsetD8(self, address: int, value: int, size: int) -> tuple[Result]:
        ready = address in self._mapped and address in self._accessible and not value
        return (Result.CUDA_SUCCESS if ready else Result.CUDA_ERROR_INVALID_VALUE,)

    def cuCtxSynchronize(self) -> tuple[Result]:
        self.calls.append("synchronize")
        return (Result.CUDA_SUCCESS,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[Result]:
        if address not in self._mapped or self.calls.pop() != "synchronize":
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        del self._mapped[address]
        self._accessible.discard(address)
        return (Result.CUDA_SUCCESS,)

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Result]:
        busy = any(address <= at < address + size for at in self._mapped)
        known = self._ranges.pop(address, None) == size
        return (Result.CUDA_SUCCESS if known and not busy else Result.CUDA_ERROR_INVALID_VALUE,)

    def cuMemRelease(self, handle: int) -> tuple[Result]:
        self._created.remove(handle)
        return (Result.CUDA_SUCCESS,)


DRIVERS: dict[str, Callable[[], PageDriver]] = {
    "mmap": lambda: MmapPages(PAGE),
    "cuda": lambda: CudaPages(StandIn()),
}


@pytest.fixture(params=DRIVERS)
def make(request: pytest.FixtureRequest) -> Callable[[], PageDriver]:
    return DRIVERS[request.param]


MOVES = st.lists(st.tuples(st.booleans(), st.integers(0, 1), st.integers(0, 5)), max_size=40)


@given(name=st.sampled_from(list(DRIVERS)), moves=MOVES)
def test_a_walk_maps_as_a_table_says(name: str, moves: list[tuple[bool, int, int]]) -> None:
    pool = PagePool(DRIVERS[name](), 4)
    ranges = [pool.reserve(5), pool.reserve(5)]
    table: set[tuple[int, int]] = set()
    for add, number, place in moves:
        key = (number, place)
        if add:
            if place >= 5 or key in table:
                with pytest.raises(ValueError, match="place must be an empty one"):
                    ranges[number].map(place)
            elif len(table) == 4:
                with pytest.raises(PagesError, match="all 4 pages are in use"):
                    ranges[number].map(place)
            else:
                ranges[number].map(place)
                table.add(key)
        elif key in table:
            ranges[number].unmap(place)
            table.remove(key)
        else:
            with pytest.raises(ValueError, match="place must be a mapped one"):
                ranges[number].unmap(place)
        pool.check()
        assert {(n, p) for n, each in enumerate(ranges) for p, _ in each.mapped()} == table
        assert pool.free == 4 - len(table)
    pool.close()


@given(MOVES)
def test_bytes_stay_where_they_are_and_new_pages_are_zero(
    moves: list[tuple[bool, int, int]],
) -> None:
    pool = PagePool(MmapPages(PAGE), 10)
    ranges = [pool.reserve(5), pool.reserve(5)]
    views = [each.tensor().view(5, PAGE) for each in ranges]
    content: dict[tuple[int, int], int] = {}
    for step, (add, number, place) in enumerate(moves):
        key = (number, place % 5)
        if add and key not in content:
            ranges[number].map(key[1])
            assert not views[number][key[1]].any(), "a page has numbers of another model"
            views[number][key[1]] = content[key] = 1 + step
        elif not add and key in content:
            ranges[number].unmap(key[1])
            del content[key]
        for (other, at), value in content.items():
            assert (views[other][at] == value).all()
    del views
    pool.close()


def test_two_number_formats_share_the_pages() -> None:
    pool = PagePool(MmapPages(PAGE), 2)
    wide, narrow = pool.reserve(2), pool.reserve(2)
    wide.map(1)
    narrow.map(0)
    floats = wide.tensor().view(torch.float32)
    halves = narrow.tensor().view(torch.bfloat16)
    floats[PAGE // 4 :] = float("nan")
    halves[: PAGE // 2] = 2.0
    wide.unmap(1)
    narrow.map(1)
    assert torch.isfinite(halves).all(), "the poison stayed in the page"
    assert halves[: PAGE // 2].sum() == PAGE


@pytest.mark.extended
def test_a_page_that_is_not_mapped_cannot_be_read() -> None:
    program = f"""
from rollweave.engine.pages import PagePool
from rollweave.engine.pages import MmapPages
pool = PagePool(MmapPages({PAGE}), 1)
pages = pool.reserve(2)
pages.map(0)
view = pages.tensor()
assert view[0] == 0
pages.unmap(0)
print("unmapped", flush=True)
view[0].item()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.stdout.strip() == b"unmapped"
    assert done.returncode == -signal.SIGSEGV


def test_the_driver_names_the_call_that_fails() -> None:
    with pytest.raises(PagesError, match=r"cuMemCreate: .*CUDA_ERROR_OUT_OF_MEMORY"):
        PagePool(CudaPages(StandIn(most=3)), 4)


def test_page_sizes_and_counts_are_checked(make: Callable[[], PageDriver]) -> None:
    with pytest.raises(ValueError, match="pages must be at least 1, got 0"):
        PagePool(make(), 0)
    pool = PagePool(make(), 1)
    with pytest.raises(ValueError, match="pages must be at least 1, got 0"):
        pool.reserve(0)
    pool.close()
    with pytest.raises(ValueError, match="page_bytes must be a multiple of the system's page"):
        MmapPages(100)


def test_a_device_has_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(driver_of(torch.device("cpu"), PAGE), MmapPages)
    gpu, current = torch.device("cuda:1"), list[torch.device]()
    module = "cuda.bindings.driver"
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match="unless cuda-bindings is installed, got cuda:1"):
        driver_of(gpu, PAGE)
    monkeypatch.setitem(sys.modules, module, StandIn())
    monkeypatch.setattr("rollweave.engine.pages.make_current", current.append)
    pages = driver_of(gpu, PAGE)
    assert isinstance(pages, CudaPages)
    assert (pages.page_bytes, current) == (2 << 20, [gpu])
    pages.close()
