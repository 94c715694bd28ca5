"""An event loop whose clock jumps to the next timer as soon as nothing else is left to
do: hours of pauses and deadlines take no time, and happen at exact times.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

HORIZON_S = 100_000.0
"""Virtual seconds after which a test fails: it would never end."""


class _Jumping(selectors.SelectSelector):
    """Waits for nothing: if no file is ready, the time of the next timer has come."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "every task waits for something that no timer brings"
            self.now += max(0.0, timeout)
            assert self.now < HORIZON_S, "something is repeated without an end"
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """The time of the loop begins at 0. Threads and processes are not waited for."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the virtual seconds that have passed."""
        return self._jumping.now


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
