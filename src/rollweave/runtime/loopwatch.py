"""Detect code that blocks the event loop, and name it while it still does: while the
loop is blocked, no trajectory advances.

A thread notices that the loop's heartbeats stop, and inspects the stack of the loop's
thread. Invariants: foreign code is named within a second, once each time that it blocks
the loop; a suspension of the process does not count as blocking.
"""

import asyncio
import contextlib
import inspect
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import NamedTuple, Self

from rollweave.record.trace import CONTROLLER, Trace
from rollweave.schema.commands import Warn
from rollweave.schema.errors import DiskError

BEAT_S = 0.2
"""Seconds between two heartbeats of the loop, and between two checks of the thread."""

MISSED = 3
"""Number of checks without a heartbeat after which the loop counts as blocked: on a
busy machine, two can occur by chance.
"""

COMPONENT = "event loop"
"""Component of the warnings."""

_LIBRARY = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_PACKAGES = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


class Culprit(NamedTuple):
    """The code that blocks the loop."""

    name: str
    """`module:Class.method`, or `module:function`."""
    place: str
    """File and line at which it blocks."""
    is_async: bool

    @property
    def now(self) -> str:
        """The warning for while the code blocks the loop."""
        advice = "; call what blocks by asyncio.to_thread" if self.is_async else ""
        return (
            f"{self.name} is blocking the event loop ({self.place}): no trajectory advances until "
            f"it returns{advice}"
        )

    def later(self, seconds: float) -> str:
        """Return a warning for when the code has returned."""
        return f"{self.name} blocked the event loop for {seconds:.1f} s ({self.place})"


class Pulse:
    """The heartbeats of a loop, and the checks of them by another thread."""

    def __init__(self, now: float) -> None:
        self._lock = threading.Lock()
        self._beats, self._beat_at = 0, now
        self._seen, self._missed = -1, 0
        self._culprit: Culprit | None = None

    def beat(self, now: float) -> tuple[Culprit, float] | None:
        """Count a heartbeat at `now`, in seconds. Return what blocked the loop before
        it, and the seconds since the last one, if a check has named it.
        """
        with self._lock:
            culprit, self._culprit = self._culprit, None
            blocked_s, self._beat_at = now - self._beat_at, now
            self._beats += 1
        return None if culprit is None else (culprit, blocked_s)

    def check(self, find: Callable[[], Culprit | None]) -> Culprit | None:
        """Return what `find` finds, if this is the check number `MISSED` in a row
        without a heartbeat before its end.
        """
        beats = self._beats
        self._missed = self._missed + 1 if beats == self._seen else 0
        self._seen = beats
        culprit = find() if self._missed == MISSED else None
        with self._lock:
            if culprit is None or self._beats != beats:
                return None
            self._culprit = culprit
        return culprit


class LoopWatch:
    """Watches the running event loop from its own thread, while the context is open."""

    def __init__(
        self, *, on_blocked: Callable[[Culprit], None], on_over: Callable[[Culprit, float], None]
    ) -> None:
        """`on_blocked` is called at once, on the watching thread; `on_over` afterwards,
        with the duration in seconds, on the loop.
        """
        self._on_blocked, self._on_over = on_blocked, on_over
        self._ended = threading.Event()
        self._pulse = Pulse(time.monotonic())

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="loop watch", daemon=True)
        self._beat()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._handle.cancel()
        self._ended.set()
        self._thread.join()

    def _beat(self) -> None:
        over = self._pulse.beat(time.monotonic())
        self._handle = self._loop.call_later(BEAT_S, self._beat)
        if over is not None:
            self._on_over(*over)

    def _watch(self) -> None:
        while not self._ended.wait(BEAT_S):
            culprit = self._pulse.check(self._find)
            if culprit is not None:
                self._on_blocked(culprit)

    def _find(self) -> Culprit | None:
        return find_culprit(sys._current_frames().get(self._loop_thread))


@contextlib.contextmanager
def watched(
    *,
    show: Callable[[Warn], None],
    warn: Callable[[Warn], None],
    trace: Trace,
    clock: Callable[[], float],
) -> Iterator[None]:
    """Watch a world's running loop: `show` a warning at once, from any thread; record a
    warning and a span once the loop runs again.
    """

    def on_over(culprit: Culprit, seconds: float) -> None:
        with contextlib.suppress(DiskError):  # the world meets that error itself
            warn(Warn(component=COMPONENT, message=culprit.later(seconds)))
            trace.span(CONTROLLER, COMPONENT, culprit.name, clock() - seconds, clock())

    with LoopWatch(
        on_blocked=lambda culprit: show(Warn(component=COMPONENT, message=culprit.now)),
        on_over=on_over,
    ):
        yield


def find_culprit(frame: FrameType | None) -> Culprit | None:
    """Find the first foreign function that our code called, on the stack that ends with
    `frame`; None without one.
    """
    first: FrameType | None = None
    last: FrameType | None = None
    in_package = False
    for each in reversed(list(_stack(frame))):
        if _is_library(each):
            continue
        if each.f_globals.get("__name__", "").partition(".")[0] == "rollweave":
            in_package = True
        elif in_package and first is None:
            first = each
        if first is not None and not each.f_code.co_filename.startswith(_PACKAGES):
            last = each
    if first is None:
        return None
    last = last or first
    is_async = bool(first.f_code.co_flags & inspect.CO_COROUTINE)
    return Culprit(_name(first), f"{last.f_code.co_filename}:{last.f_lineno}", is_async)


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames from the innermost one to the outermost one of the event loop's
    callback.
    """
    while frame is not None and frame.f_globals.get("__name__") != "asyncio.events":
        yield frame
        frame = frame.f_back


def _is_library(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith("<frozen ") or (
        file.startswith(_LIBRARY) and not file.startswith(_PACKAGES)
    )


def _name(frame: FrameType) -> str:
    """Name a method by the class of its object, which may have inherited it."""
    owner = frame.f_locals.get("self", frame.f_locals.get("cls"))
    kind = owner if isinstance(owner, type) else type(owner)
    if owner is not None and hasattr(kind, frame.f_code.co_name):
        return f"{kind.__module__}:{kind.__qualname__}.{frame.f_code.co_name}"
    return f"{frame.f_globals.get('__name__')}:{frame.f_code.co_qualname}"
