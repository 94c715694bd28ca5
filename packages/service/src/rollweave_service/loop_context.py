"""A context for programs without an event loop: the base of the synchronous clients."""

import contextlib
from typing import Self

from rollweave.io.loop_thread import LoopThread


class LoopContext:
    """The base of a context manager for programs without an event loop. Its coroutines
    run in the loop of a thread. Contexts that `_open` enters into the stack are left at
    the end.
    """

    def __init__(self, name: str) -> None:
        self._loop = LoopThread(name)
        self._stack = contextlib.AsyncExitStack()

    async def _open(self) -> None:
        """Enter the contexts that the subclass needs into `_stack`."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._loop.start()
        try:
            self._loop.call(self._open())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._loop.call(self._stack.aclose())
        finally:
            self._loop.stop()
