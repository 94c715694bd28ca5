"""The pump: inbox → core → journal → effects, the only place that calls the core; the
run's clock; and the execution of commands by a table from their types to handlers.

Invariants: events are handled one by one, in the order in which they were posted; an
event is in the journal before any of its commands is executed; a command is executed at
most once, in the life that handled its event, and never by a replay. A handler neither
blocks nor raises for what happens in the world; the part that cannot do its work posts
the event of the failure. After `Finish` nothing is executed.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, get_args

from rollweave.schema import commands as c
from rollweave.schema.commands import Command
from rollweave.schema.errors import RollweaveError
from rollweave.schema.events import Event, TimerFired

INBOX_EVENTS = 1 << 17
"""Maximum number of waiting events.

The pools bound the events that the world can cause at once to far less; more is a bug,
not load.
"""

TOGETHER = 256
"""Maximum number of events that are handled before other tasks of the event loop run:
some milliseconds.
"""


class RunClock:
    """Measures a run's time in seconds, over all its lives.

    It never goes back. A resumed run continues from `start`, where its journal ends:
    time between two lives does not count.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._start = start
        self._created = time.monotonic()

    def now(self) -> float:
        return self._start + (time.monotonic() - self._created)


class PostEvent(Protocol):
    """The signature of `Pump.post`."""

    def __call__(self, event: Event, then: Callable[[], None] | None = None, /) -> None:
        """Queue an event; call `then` once it is in the journal."""


class CoreLike(Protocol):
    """The core, as the pump uses it."""

    def handle(self, now: float, event: Event) -> list[Command]:
        """Handle one event, and return the commands that it causes."""


class Recorder(Protocol):
    """The journal, as the pump uses it."""

    def append(self, now: float, event: Event, commands: Sequence[Command], /) -> None:
        """Record one handled event, which then survives the death of this process."""


class InboxOverflowError(RollweaveError):
    """More events wait than the bounded pools can cause."""


class Pump:
    """`post` events from the event loop's thread, and `run` until `stop`."""

    def __init__(
        self,
        core: CoreLike,
        *,
        journal: Recorder,
        clock: Callable[[], float],
        execute: Callable[[Command], None],
    ) -> None:
        self._core, self._journal, self._clock, self._execute = core, journal, clock, execute
        self._inbox: deque[tuple[Event, Callable[[], None] | None]] = deque()
        self._wake = asyncio.Event()
        self._stopped = False

    def post(self, event: Event, then: Callable[[], None] | None = None) -> None:
        """Queue an event.

        `then` is called once the event is handled and in the journal, before its
        commands are executed.
        """
        if len(self._inbox) >= INBOX_EVENTS:
            raise InboxOverflowError(f"{INBOX_EVENTS} events wait; the next one is {event}")
        self._inbox.append((event, then))
        self._wake.set()

    def stop(self) -> None:
        """Let `run` return once it has handled the current event."""
        self._stopped = True
        self._wake.set()

    async def run(self) -> None:
        """Handle events until `stop`.

        An exception of the core, the journal or an effect is a bug, and passes through.
        """
        while not self._stopped:
            await self._wake.wait()
            self._wake.clear()
            self._drain(min(len(self._inbox), TOGETHER))
            if self._inbox:
                self._wake.set()
                await asyncio.sleep(0)

    def _drain(self, count: int) -> None:
        """Handle `count` events, then execute the commands of all of them."""
        commands: list[Command] = []
        callbacks: list[Callable[[], None]] = []
        for _ in range(count):
            event, then = self._inbox.popleft()
            now = self._clock()
            caused = self._core.handle(now, event)
            self._journal.append(now, event, caused)
            commands.extend(caused)
            if then is not None:
                callbacks.append(then)
        for callback in callbacks:
            callback()
        for command in commands:
            if self._stopped:
                return
            self._execute(command)


Handlers = Mapping[type[c.Command], Callable[[Any], None]]
"""The handler of each type of command. A handler takes the command."""


class Effects:
    """Executes commands by their handlers.

    Every command must have a handler, except for commands that the world never gets.
    """

    def __init__(self, handlers: Handlers, *, never: Collection[type[c.Command]] = ()) -> None:
        known = {*handlers, *never}
        missing = [kind.__name__ for kind in get_args(c.Command) if kind not in known]
        assert not missing, f"commands without a handler: {', '.join(missing)}"
        self._handlers = handlers

    def execute(self, command: c.Command) -> None:
        """Begin what the command asks for."""
        handler = self._handlers.get(type(command))
        assert handler is not None, f"this world executes no {type(command).__name__}: {command}"
        handler(command)


class Timer:
    """The one timer of the core. Setting it again replaces it."""

    def __init__(self, clock: Callable[[], float], post: Callable[[Event], None]) -> None:
        self._clock, self._post = clock, post
        self._handle: asyncio.TimerHandle | None = None

    def set(self, command: c.SetTimer) -> None:
        self.cancel()
        delay = max(0.0, command.at - self._clock())
        self._handle = asyncio.get_running_loop().call_later(delay, self._fire)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        self._post(TimerFired())
