"""Reads the output of background jobs while no call runs, so that no job blocks on a
full pipe. Needs Python 3.9 and its standard library alone.
"""

from __future__ import annotations

import contextlib
import select
from collections.abc import Callable


class BackgroundReader:
    """File descriptors, each with a function that is called when the descriptor is
    readable.

    `watch` and `unwatch` may be called while another thread waits.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._readers: dict[int, Callable[[], None]] = {}

    def watch(self, fd: int, read: Callable[[], None]) -> None:
        """Have the waiting thread call `read`, which must not block, whenever `fd` is
        readable.
        """
        self._readers[fd] = read
        self._epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        """Stop watching `fd`; an unknown descriptor is ignored.

        A call of `read` on another thread may still be running afterwards.
        """
        if self._readers.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def wait(self, fd: int) -> None:
        """Read the other descriptors until the watched `fd` is readable."""
        while True:
            happened = self._epoll.poll()
            for ready, _ in happened:
                read = self._readers.get(ready)
                if read is not None:
                    read()
            if any(ready == fd for ready, _ in happened):
                return
