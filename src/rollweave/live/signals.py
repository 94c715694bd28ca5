"""SIGINT and SIGTERM, for whoever runs in the main thread: no other can take signals.

Invariants: whoever asks twice is heard, also where code of the user's holds up the event loop and will never give it back
(the loop's own `add_signal_handler` could not do that: it calls nobody before the loop comes round); whoever asks more often
does not break off the end that is under way, which would leave tasks in the middle of it, unless that takes very long.
"""

import asyncio
import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator

ENDING = (signal.SIGINT, signal.SIGTERM)

PATIENCE_S = 2.0
"""Seconds in which the loop must have come round to a second signal: far longer than anything of ours holds it up."""

END_S = 5.0
"""Seconds that the end may take before one more signal breaks it off: twice what children have to end by themselves."""


@contextlib.contextmanager
def on_ending_signals(handle: Callable[[], object]) -> Iterator[None]:
    """Call `handle`, on the running loop, for each of them that comes while the context is open. Elsewhere: do nothing.

    A second one that the loop does not hear is a KeyboardInterrupt in the code that holds it up: at once where the loop has not
    heard the first either, after `PATIENCE_S` otherwise. What comes in the `END_S` after a second one is not passed on.
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
        self._heard = 0
        self._ending_until = math.inf
        """By the monotonic clock, once there were two."""

    def signalled(self, *_: object) -> None:
        if self._closed and time.monotonic() < self._ending_until:
            return
        if self._closed or (self._unheard and self._asked == 1):
            self._interrupt()
        self._asked += 1
        self._unheard = True
        self._loop.call_soon_threadsafe(self._hear)
        if self._asked > 1 and not self._timing:
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
        self._ending_until = time.monotonic() + END_S
        raise KeyboardInterrupt

    def _hear(self) -> None:
        if self._closed:
            return
        self._unheard = False
        self._stop_timing()
        if self._heard >= 2 and time.monotonic() < self._ending_until:
            return
        self._heard += 1
        self._ending_until = time.monotonic() + END_S
        self._handle()

    def _stop_timing(self) -> None:
        if self._timing:
            self._timing = False
            signal.setitimer(signal.ITIMER_REAL, 0)
