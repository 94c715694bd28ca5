"""Handle SIGINT and SIGTERM, in the main thread: no other thread can handle signals.

A signal escalates in three steps: the handler of `on_ending_signals` runs on the event
loop; if the loop is blocked, `Interrupted` is raised in the code that blocks it; if
even that does not end the process, a thread of `run_to_the_end` ends it, children
first.

Invariants: a second signal always takes effect, even while user code blocks the event
loop and never returns (the loop's own `add_signal_handler` calls its handler only when
the loop runs again); further signals do not interrupt the orderly end, which would
leave tasks unfinished, unless it takes very long. Service managers send SIGTERM once
and SIGKILL next, so a SIGTERM that a blocked loop does not handle counts as two
signals.
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

from rollweave.io.boot import INTERRUPTED
from rollweave.io.child import kill_all
from rollweave.schema.errors import Interrupted

T = TypeVar("T")

ENDING = (signal.SIGINT, signal.SIGTERM)

PATIENCE_S = 2.0
"""Maximum time until the loop handles a second signal, in seconds: far longer than any
code of ours blocks it.
"""

HELD_S = 3.0
"""Maximum time until the loop runs again after the request to end, in seconds; beyond
it a thread ends the process.
"""

ENDING_S = 15.0
"""Maximum duration of the end after a second signal, in seconds, while the loop still
runs.
"""

SHOW_CURSOR = "\x1b[?25h"
"""Terminal sequence that shows the cursor, which a progress display may have hidden."""

END_S = 5.0
"""Seconds for which the end ignores further signals: twice the time that children have
to end by themselves.
"""


@contextlib.contextmanager
def on_ending_signals(handle: Callable[[], object]) -> Iterator[None]:
    """Call `handle` on the running loop for each SIGINT and SIGTERM while the context
    is open. Do nothing outside the main thread.

    A second signal that the loop does not handle raises a KeyboardInterrupt in the code
    that blocks it: at once if the loop has not handled the first one either, otherwise
    after `PATIENCE_S`. Signals within `END_S` after a second one are ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    ending = _Ending(loop, handle)
    with _woken_by_signals(loop):
        former = {number: signal.signal(number, ending.signaled) for number in ENDING}
        try:
            yield
        finally:
            ending.close()
            for number, handler in former.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def _woken_by_signals(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Let each signal wake the loop. Python calls the handler of a signal that arrives
    just before the loop waits only after that wait.

    Within `run_to_the_end` the thread that receives signals wakes the loop.
    """
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    former = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        if former != -1:
            signal.set_wakeup_fd(former)
        else:
            loop.add_reader(read, os.read, read, 512)
        yield
    finally:
        if former == -1:
            signal.set_wakeup_fd(-1)
            loop.remove_reader(read)
        os.close(read)
        os.close(write)


class _Ending:
    """The state of the escalation inside the main thread.

    Signal handlers run between any two of its instructions.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, handle: Callable[[], object]) -> None:
        self._loop, self._handle = loop, handle
        self._received = 0
        self._pending = False
        """The loop has not handled the last signal yet."""
        self._closed = False
        self._interruption: Callable[[], Interrupted | None] = lambda: None
        """Weak reference to the interruption, which is alive while it unwinds the
        stack.
        """
        self._timing = False
        self._former: tuple[Any, tuple[float, float]] = (signal.SIG_DFL, (0.0, 0.0))
        """The former handler and timer of SIGALRM, while we use it."""
        self._handled = 0
        self._ending_until = math.inf
        """Monotonic time until which further signals are ignored, after two signals."""

    def signaled(self, number: int, _: object) -> None:
        if self._closed and time.monotonic() < self._ending_until:
            return
        if self._closed or (self._pending and self._received == 1):
            self._interrupt()
        self._received += 1
        self._pending = True
        self._loop.call_soon_threadsafe(self._on_loop)
        if (self._received > 1 or number == signal.SIGTERM) and not self._timing:
            self._timing = True
            self._former = (
                signal.signal(signal.SIGALRM, self._on_alarm),
                signal.setitimer(signal.ITIMER_REAL, PATIENCE_S),
            )

    def close(self) -> None:
        """Stop the escalation."""
        self._pending = False
        self._stop_timing()

    def _on_alarm(self, *_: object) -> None:
        if self._pending:
            self._interrupt()

    def _interrupt(self) -> None:
        self._closed = True
        self._ending_until = time.monotonic() + END_S
        interruption = Interrupted()
        self._interruption = weakref.ref(interruption)
        raise interruption

    def _on_loop(self) -> None:
        if self._interruption() is not None:
            return
        self._closed = False  # the code that blocked the loop has swallowed the interruption
        self._pending = False
        self._stop_timing()
        if self._handled >= 2 and time.monotonic() < self._ending_until:
            return
        self._handled += 1
        self._ending_until = time.monotonic() + END_S
        self._handle()

    def _stop_timing(self) -> None:
        if self._timing:
            self._timing = False
            handler, timer = self._former
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
            # restore the timer of the calling program, if it has one
            signal.setitimer(signal.ITIMER_REAL, *timer)


def run_to_the_end(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` as `asyncio.run` does, but end the process on signals even if the loop
    or the end is blocked.

    Outside the main thread this is `asyncio.run`.
    """
    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(main)
    with _LastResort() as last_resort:
        try:
            return asyncio.run(last_resort.watch(main))
        except (Interrupted, asyncio.CancelledError) as error:
            if isinstance(error, Interrupted) or last_resort.interrupted:
                raise KeyboardInterrupt from None
            raise


class _LastResort:
    """A thread that receives signals through the wakeup descriptor, independently of
    the main thread, and can end the process.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._closed = False
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
        self._closed = True
        os.close(self._write)
        self._thread.join()
        os.close(self._read)

    async def watch(self, main: Coroutine[Any, Any, T]) -> T:
        """Await `main`, whose loop answers with heartbeats once signals have come."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(_unless_interrupted)
        try:
            return await main
        except Interrupted:
            # it has left the loop once, and must not again while asyncio ends all tasks
            self.interrupted = True
            raise asyncio.CancelledError from None
        finally:
            self._ended_at = time.monotonic()

    def _listen(self) -> None:
        received: list[tuple[int, float]] = []
        while not self._closed:
            timeout = PATIENCE_S / 10 if received else None
            readable, _, _ = select.select([self._read], [], [], timeout)
            if readable:
                now = time.monotonic()
                self._beat_at = self._beat_at if received else now
                received += [
                    (number, now) for number in os.read(self._read, 512) if number in ENDING
                ]
            elif too_late(received, self._beat_at, self._ended_at, time.monotonic()):
                exit_now()
            if received and self._loop is not None:
                # the loop may be closed: then only the return is left
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._beat)

    def _beat(self) -> None:
        self._beat_at = time.monotonic()


def _unless_interrupted(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handle a loop's exception as by default, but ignore interrupted tasks."""
    if not isinstance(context.get("exception"), Interrupted):
        loop.default_exception_handler(context)


def too_late(
    received: Sequence[tuple[int, float]], beat_at: float, ended_at: float, now: float
) -> bool:
    """Return whether the process must end now.

    `received` lists signals and their times; `beat_at` is the time of the loop's last
    heartbeat, `ended_at` the time at which the loop's work ended.
    """
    twice = len(received) > 1
    if not twice and all(number != signal.SIGTERM for number, _ in received):
        return False
    last = max([beat_at, *(at for _, at in received[:2])])
    if now - last > HELD_S:
        return True
    second_at = received[1][1] if twice else math.inf
    return now - second_at > min(ENDING_S, HELD_S + max(0.0, ended_at - second_at))


def exit_now() -> NoReturn:
    """End the children, then this process, at once."""
    kill_all()
    with contextlib.suppress(OSError):
        os.write(2, f"{SHOW_CURSOR if os.isatty(2) else ''}interrupted\n".encode())
    os._exit(INTERRUPTED)
