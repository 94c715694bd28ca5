"""SIGINT and SIGTERM, for whoever runs in the main thread: no other can take signals.

Invariant: whoever asks twice is heard, also where code of the user's holds up the event loop and will never give it back. The
loop's own `add_signal_handler` could not do that: it calls nobody before the loop comes round.
"""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

ENDING = (signal.SIGINT, signal.SIGTERM)

PATIENCE_S = 2.0
"""Seconds in which the loop must have come round to a second signal: far longer than anything of ours holds it up."""


@contextlib.contextmanager
def on_ending_signals(handle: Callable[[], object]) -> Iterator[None]:
    """Call `handle`, on the running loop, for each of them that comes while the context is open. Elsewhere: do nothing.

    A second one that the loop does not hear is a KeyboardInterrupt in the code that holds it up: at once where the loop has not
    heard the first either, after `PATIENCE_S` otherwise.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ending = _Ending(asyncio.get_running_loop(), handle)
    former = {number: signal.signal(number, ending.signalled) for number in ENDING}
    try:
        yield
    finally:
        ending.close()
        for number, handler in former.items():
            signal.signal(number, handler)


class _Ending:
    """What came of the signals so far. Handlers run between any two instructions of the main thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, handle: Callable[[], object]) -> None:
        self._loop, self._handle = loop, handle
        self._asked = 0
        self._unheard = False
        """The loop has yet to come round to the last one."""
        self._closed = False
        self._timing = False

    def signalled(self, *_: object) -> None:
        if self._unheard or self._closed:
            self._interrupt()
        self._asked += 1
        self._unheard = True
        self._loop.call_soon_threadsafe(self._hear)
        if self._asked > 1:
            self._timing = True
            signal.signal(signal.SIGALRM, self._waited)  # only now: the alarm may be somebody else's before
            signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)

    def close(self) -> None:
        """Nothing is waited for any more."""
        self._unheard = False
        self._stop_timing()

    def _waited(self, *_: object) -> None:
        if self._unheard:
            self._interrupt()

    def _interrupt(self) -> None:
        self._closed = True
        raise KeyboardInterrupt

    def _hear(self) -> None:
        if not self._closed:
            self._unheard = False
            self._stop_timing()
            self._handle()

    def _stop_timing(self) -> None:
        if self._timing:
            self._timing = False
            signal.setitimer(signal.ITIMER_REAL, 0)
