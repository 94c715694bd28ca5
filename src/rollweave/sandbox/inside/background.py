"""What is read while no call is: output of background jobs, so that none of them blocks
on a full pipe. Python 3.9, stdlib.
"""

from __future__ import annotations

import contextlib
import select
from collections.abc import Callable


class BackgroundReader:
    """File descriptors and what to do once they are readable.

    `watch` and `unwatch` work while another thread waits.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._readers: dict[int, Callable[[], None]] = {}

    def watch(self, fd: int, read: Callable[[], None]) -> None:
        """`read` is called, by whoever waits, when there is something; it must not
        block.
        """
        self._readers[fd] = read
        self._epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        """A `read` that another thread is in may still finish.

        Unknown descriptors are ignored.
        """
        if self._readers.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def wait(self, fd: int) -> None:
        """Return when `fd`, which is watched, is readable; meanwhile read the others."""
        while True:
            happened = self._epoll.poll()
            for ready, _ in happened:
                read = self._readers.get(ready)
                if read is not None:
                    read()
            if any(ready == fd for ready, _ in happened):
                return
