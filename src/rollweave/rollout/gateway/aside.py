"""Work that a client controls, outside the event loop. A thread does work that is
proportional to the size of a request (parsing, rendering and tokenizing it). A process,
which can be ended, checks grammars, whose work has no such bound
(`engine/grammar_check`).

Invariants: small requests wait for neither the thread nor the process; the thread does
one piece of work at a time; every piece ends by itself, and lets other threads run
meanwhile.
"""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from rollweave.engine.grammar_check import GrammarCheck
from rollweave.rollout.gateway.refusals import RequestError

T = TypeVar("T")

INLINE: Final = 1 << 14
"""Maximum number of bytes, or of characters, that are parsed or rendered on the event
loop, which takes some milliseconds.
"""

INLINE_TOKENS: Final = 1 << 12
"""Maximum number of tokens of an answer that is written on the event loop."""

WAIT_S: Final = 120.0
"""Maximum seconds for which a request waits for the thread."""


class Aside:
    """The thread and the process of one gateway. Both start when they are needed. All
    calls belong to one event loop.
    """

    def __init__(self, *, wait_s: float = WAIT_S) -> None:
        self.grammars = GrammarCheck()
        self._wait_s = wait_s
        self._thread: ThreadPoolExecutor | None = None

    async def run(
        self,
        work: Callable[[], T],
        *,
        size: int,
        most: int = INLINE,
        line: asyncio.Lock | None = None,
    ) -> T:
        """Return the result of work, or raise its exception. Work of a size above
        `most` runs on the thread; such work with the same `line` runs one piece at a
        time.

        Raises RequestError if the thread does not finish it in time.
        """
        if size <= most:
            return work()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="large-requests")
        try:
            async with asyncio.timeout(self._wait_s), line or contextlib.nullcontext():
                return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except TimeoutError:
            rule = f"a large request must be prepared within {self._wait_s:g} s: try again later"
            raise RequestError(503, rule, code="unavailable") from None

    def close(self) -> None:
        """End both. Work in progress on the thread ends by itself."""
        self.grammars.close()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None
