"""Events are handled in order, journaled before their commands are executed, and
nothing is executed after the stop.
"""

import asyncio
import typing
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rollweave.runtime.pump import TOGETHER, Effects, Pump, RunClock
from rollweave.schema import commands as c
from rollweave.schema.commands import Command, Finish, SetTimer, Warn
from rollweave.schema.events import Event, StopRequested, TimerFired, TrainerLost


class ScriptedCore:
    """A `CoreLike` that answers each event with the commands of a script."""

    def __init__(self, log: list[object], script: dict[type[Event], list[Command]]) -> None:
        self._log, self._script = log, script

    def handle(self, now: float, event: Event) -> list[Command]:
        self._log.append(("handled", type(event).__name__))
        if isinstance(event, TrainerLost):
            raise AssertionError("a bug of ours")
        return self._script.get(type(event), [])


class ListJournal:
    """A `Recorder` that keeps its records."""

    def __init__(self, log: list[object]) -> None:
        self._log = log
        self.records: list[tuple[float, Event]] = []

    def append(self, now: float, event: Event, commands: Sequence[Command], /) -> None:
        self.records.append((now, event))
        self._log.append(("journaled", type(event).__name__))


def warn(text: str) -> Warn:
    return Warn(component="test", message=text)


async def test_events_are_handled_in_order_and_journaled_before_their_effects() -> None:
    log: list[object] = []
    times = iter([1.0, 2.0, 3.0])
    journal = ListJournal(log)
    core = ScriptedCore(
        log, {TimerFired: [warn("a"), warn("b")], StopRequested: [Finish(error="")]}
    )
    pump: Pump

    def execute(command: Command) -> None:
        log.append(("executed", command.message if isinstance(command, Warn) else "finish"))
        if isinstance(command, Finish):
            pump.stop()

    pump = Pump(core, journal=journal, clock=lambda: next(times), execute=execute)
    pump.post(TimerFired(), lambda: log.append("then"))
    pump.post(StopRequested())
    await pump.run()
    assert log == [
        ("handled", "TimerFired"),
        ("journaled", "TimerFired"),
        ("handled", "StopRequested"),
        ("journaled", "StopRequested"),
        "then",
        ("executed", "a"),
        ("executed", "b"),
        ("executed", "finish"),
    ]
    assert journal.records == [(1.0, TimerFired()), (2.0, StopRequested())]


async def test_an_event_that_an_effect_posts_is_handled_next() -> None:
    log: list[object] = []
    core = ScriptedCore(log, {TimerFired: [SetTimer(at=1.0)], StopRequested: [Finish(error="")]})
    pump: Pump

    def execute(command: Command) -> None:
        if isinstance(command, SetTimer):
            pump.post(StopRequested())
        else:
            pump.stop()

    pump = Pump(core, journal=ListJournal(log), clock=lambda: 0.0, execute=execute)
    pump.post(TimerFired())
    await asyncio.wait_for(pump.run(), 5)
    assert log[-2:] == [("handled", "StopRequested"), ("journaled", "StopRequested")]


async def test_many_events_at_once_let_other_tasks_run() -> None:
    log: list[object] = []
    pump = Pump(
        ScriptedCore(log, {}), journal=ListJournal([]), clock=lambda: 0.0, execute=lambda _: None
    )
    for _ in range(10 * TOGETHER):
        pump.post(TimerFired())
    running = asyncio.create_task(pump.run())
    for turn in range(1, 11):
        await asyncio.sleep(0)
        assert len(log) == turn * TOGETHER
    pump.stop()
    await running
    assert len(log) == 10 * TOGETHER


async def test_a_bug_passes_through_after_earlier_events_are_journaled() -> None:
    log: list[object] = []
    executed: list[Command] = []
    journal = ListJournal(log)
    core = ScriptedCore(log, {TimerFired: [warn("a")]})
    pump = Pump(core, journal=journal, clock=lambda: 0.0, execute=executed.append)
    pump.post(TimerFired())
    pump.post(TrainerLost(epoch=0, error=""))
    with pytest.raises(AssertionError, match="a bug of ours"):
        await pump.run()
    assert journal.records == [(0.0, TimerFired())]
    assert executed == []  # the commands of a failed batch are not executed


async def test_nothing_is_executed_after_the_stop() -> None:
    executed: list[Command] = []
    core = ScriptedCore([], {TimerFired: [Finish(error=""), warn("late")]})
    pump: Pump

    def execute(command: Command) -> None:
        executed.append(command)
        pump.stop()

    pump = Pump(core, journal=ListJournal([]), clock=lambda: 0.0, execute=execute)
    pump.post(TimerFired())
    await pump.run()
    assert executed == [Finish(error="")]


def test_the_clock_continues_from_its_start() -> None:
    clock = RunClock(start=100.0)
    first, second = clock.now(), clock.now()
    assert 100.0 <= first <= second


def handlers(handle: Callable[[Any], None], *without: Any) -> dict[Any, Callable[[Any], None]]:
    return {kind: handle for kind in typing.get_args(c.Command) if kind not in without}


def test_a_command_goes_to_its_handler() -> None:
    got: list[object] = []
    effects = Effects(handlers(got.append, c.Warn), never=(c.Warn,))
    effects.execute(command := c.SetTimer(at=1.0))
    assert got == [command]
    with pytest.raises(AssertionError, match="executes no Warn"):
        effects.execute(c.Warn(component="", message=""))


def test_a_world_without_a_handler_for_a_command_is_refused() -> None:
    with pytest.raises(AssertionError, match="without a handler: Deliver"):
        Effects(handlers(print, c.Deliver))
