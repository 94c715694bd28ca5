"""SIGINT and SIGTERM, for code that runs in the main thread: no other thread can handle
signals.

Invariants: a second signal always takes effect, even while user code blocks the event
loop and never returns (the loop's own `add_signal_handler` calls its handler only when
the loop runs again); further signals do not interrupt the orderly end that is under
way, which would leave tasks unfinished, unless it takes very long. If even an
interruption does not end the process (`run_to_the_end`), a thread ends it, children
first. Supervisors send SIGTERM once and kill next, so a SIGTERM that a blocked loop
does not notice counts as two signals.
"""

import asyncio
import contextlib
import math
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, NoReturn, Self, TypeVar

from rollweave.io.child import kill_all
from rollweave.schema.errors import Interrupted

T = TypeVar("T")

ENDING = (signal.SIGINT, signal.SIGTERM)

PATIENCE_S = 2.0
"""Seconds in which the loop must have come round to a second signal: far longer than
anything of ours holds it up.
"""

HELD_S = 3.0
"""Seconds within which the loop must run again after the process was asked to end;
otherwise a thread ends the process.
"""

ENDING_S = 15.0
"""Maximum duration of the end after a second signal, in seconds, while the loop still
runs.
"""

INTERRUPTED = 130
"""Exit status that shells give a program that Ctrl-C ended."""

SHOW_CURSOR = "\x1b[?25h"

END_S = 5.0
"""Seconds that the end may take before one more signal breaks it off: twice what
children have to end by themselves.
"""


@contextlib.contextmanager
def on_ending_signals(handle: Callable[[], object]) -> Iterator[None]:
    """Call `handle`, on the running loop, for each of them that comes while the context
    is open. Elsewhere: do nothing.

    A second one that the loop does not hear is a KeyboardInterrupt in the code that
    holds it up: at once where the loop has not heard the first either, after
    `PATIENCE_S` otherwise. What comes in the `END_S` after a second one is not passed
    on.
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
    """What came of the signals so far.

    Handlers run between any two instructions of the main thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, handle: Callable[[], object]) -> None:
        self._loop, self._handle = loop, handle
        self._asked = 0
        self._unheard = False
        """The loop has yet to come round to the last one."""
        self._closed = False
        self._interruption: Callable[[], Interrupted | None] = lambda: None
        """Reference to the interruption, which lives while it unwinds the stack."""
        self._timing = False
        self._former: tuple[Any, tuple[float, float]] = (signal.SIG_DFL, (0.0, 0.0))
        """The handler and the timer of the alarm, while it is ours."""
        self._heard = 0
        self._ending_until = math.inf
        """By the monotonic clock, once there were two."""

    def signalled(self, number: int, _: object) -> None:
        if self._closed and time.monotonic() < self._ending_until:
            return
        if self._closed or (self._unheard and self._asked == 1):
            self._interrupt()
        self._asked += 1
        self._unheard = True
        self._loop.call_soon_threadsafe(self._hear)
        if (self._asked > 1 or number == signal.SIGTERM) and not self._timing:
            self._timing = True
            self._former = (
                signal.signal(signal.SIGALRM, self._waited),
                signal.setitimer(signal.ITIMER_REAL, PATIENCE_S),
            )

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
        interruption = Interrupted()
        self._interruption = weakref.ref(interruption)
        raise interruption

    def _hear(self) -> None:
        if self._interruption() is not None:
            return
        self._closed = False  # the code that blocked the loop has swallowed the interruption
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
            handler, timer = self._former
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
            # restore the timer of the program that calls us, if it has one
            signal.setitimer(signal.ITIMER_REAL, *timer)


def run_to_the_end(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` as `asyncio.run` does, but end the process when signals ask for it,
    even if the loop or the end is blocked.

    Outside the main thread this is `asyncio.run`.
    """
    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(main)
    with _LastResort() as last_resort:
        try:
            return asyncio.run(last_resort.seen(main))
        except (Interrupted, asyncio.CancelledError) as error:
            if isinstance(error, Interrupted) or last_resort.interrupted:
                raise KeyboardInterrupt from None
            raise


class _LastResort:
    """A thread that receives signals through the wakeup descriptor, whatever the main
    thread does, and can end the process.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._over = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beat_at = 0.0
        self._ended_at = math.inf

    def __enter__(self) -> Self:
        self._read, self._write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._write, False)
        self._former = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="last resort", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._former)
        self._over = True
        os.close(self._write)
        self._thread.join()
        os.close(self._read)

    async def seen(self, main: Coroutine[Any, Any, T]) -> T:
        """Await `main`, and watch the beats of its loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(_unless_interrupted)
        try:
            return await main
        except (
            Interrupted
        ):  # it has left the loop once, and must not again while asyncio ends all tasks
            self.interrupted = True
            raise asyncio.CancelledError from None
        finally:
            self._ended_at = time.monotonic()

    def _listen(self) -> None:
        asked: list[tuple[int, float]] = []
        while not self._over:
            readable, _, _ = select.select([self._read], [], [], PATIENCE_S / 10 if asked else None)
            if readable:
                now = time.monotonic()
                self._beat_at = self._beat_at if asked else now
                asked += [(number, now) for number in os.read(self._read, 512) if number in ENDING]
            elif too_late(asked, self._beat_at, self._ended_at, time.monotonic()):
                leave()
            if asked and self._loop is not None:
                # the loop is closed: nothing is left but to return
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._beat)

    def _beat(self) -> None:
        self._beat_at = time.monotonic()


def _unless_interrupted(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handle a loop's exception by default, but ignore tasks that were interrupted."""
    if not isinstance(context.get("exception"), Interrupted):
        loop.default_exception_handler(context)


def too_late(
    asked: Sequence[tuple[int, float]], beat_at: float, ended_at: float, now: float
) -> bool:
    """True if the signals, which came at these times, have waited long enough.

    `ended_at` is when the loop's own work ended.
    """
    twice = len(asked) > 1
    if not twice and all(number != signal.SIGTERM for number, _ in asked):
        return False
    last = max([beat_at, *(at for _, at in asked[:2])])
    if now - last > HELD_S:
        return True
    return twice and now - asked[1][1] > min(ENDING_S, HELD_S + max(0.0, ended_at - asked[1][1]))


def leave() -> NoReturn:
    """End the children, then the process, at once."""
    kill_all()
    with contextlib.suppress(OSError):
        os.write(2, f"{SHOW_CURSOR if os.isatty(2) else ''}interrupted\n".encode())
    os._exit(INTERRUPTED)
