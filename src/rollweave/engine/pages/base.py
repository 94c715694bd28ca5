"""The interface of a driver of pages, and the pool that counts them.

Invariants of the pool (`check`): a page is free or mapped in exactly one range at one
place; no place has two pages; the content of a page that is newly mapped is zero, so
that no model reads numbers of another.
"""

from collections.abc import Iterator
from typing import Protocol

import torch

from rollweave.schema.errors import PagesError

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
        GPU is recognized by it. Reading those that are not mapped ends the process.
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
