"""The pump: inbox → core → journal → effects. The only place where the core is called.

Invariants: events are handled one by one, in the order in which they were posted; an
event is in the journal before any of its commands is executed; a command is executed at
most once, in the life that handled its event, and never by a replay.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from rollweave.schema.commands import Command
from rollweave.schema.errors import RollweaveError
from rollweave.schema.events import Event

INBOX_EVENTS = 1 << 17
"""Events that may wait.

The pools bound what the world can say at once to far less; more is a bug, not a load.
"""

TOGETHER = 256
"""Events that are handled in one go, some milliseconds: whoever else lives on this loop
has a turn after that.
"""


class CoreLike(Protocol):
    """What the pump needs of the core."""

    def handle(self, now: float, event: Event) -> list[Command]:
        """Take one event; return what to do."""


class Recorder(Protocol):
    """What the pump needs of the journal."""

    def append(self, now: float, event: Event, commands: Sequence[Command], /) -> None:
        """Record one handled event. On return it survives our death."""


class InboxOverflowError(RollweaveError):
    """More events wait than the bounded pools can cause."""


class Pump:
    """`post` from the event loop's thread; `run` until `stop`."""

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

        `then` is called once it is handled and in the journal, before its commands are
        executed.
        """
        if len(self._inbox) >= INBOX_EVENTS:
            raise InboxOverflowError(f"{INBOX_EVENTS} events wait; the next one is {event}")
        self._inbox.append((event, then))
        self._wake.set()

    def stop(self) -> None:
        """Let `run` return after the event that it handles now."""
        self._stopped = True
        self._wake.set()

    async def run(self) -> None:
        """Handle events until `stop`.

        What the core, the journal or an effect raises is a bug of ours and passes
        through.
        """
        while not self._stopped:
            await self._wake.wait()
            self._wake.clear()
            self._drain(min(len(self._inbox), TOGETHER))
            if self._inbox:
                self._wake.set()
                await asyncio.sleep(0)

    def _drain(self, count: int) -> None:
        """Handle `count` events, then begin all their effects."""
        commands: list[Command] = []
        followers: list[Callable[[], None]] = []
        for _ in range(count):
            event, then = self._inbox.popleft()
            now = self._clock()
            caused = self._core.handle(now, event)
            self._journal.append(now, event, caused)
            commands.extend(caused)
            if then is not None:
                followers.append(then)
        for follower in followers:
            follower()
        for command in commands:
            if self._stopped:
                return
            self._execute(command)
