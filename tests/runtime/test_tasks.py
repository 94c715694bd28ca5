"""The task group owns all tasks: none outlives it, and no error is swallowed."""

import asyncio
import threading

import pytest

from rollweave.core.policy.waiting import Wait
from rollweave.runtime.tasks import Tasks, name_long_waits, on_thread


async def forever(ended: list[str], name: str) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append(name)


async def fail(error: Exception) -> None:
    raise error


async def test_cancel_all_ends_all_without_an_error() -> None:
    ended: list[str] = []
    async with Tasks() as tasks:
        tasks.spawn(forever(ended, "a"), "a")
        tasks.spawn(forever(ended, "b"), "b")
        await asyncio.sleep(0)
        assert len(tasks) == 2
        tasks.cancel_all()
        last = tasks.spawn(forever(ended, "late"), "late")
    assert sorted(ended) == ["a", "b"]
    assert last.cancelled()
    assert len(tasks) == 0


async def test_an_error_ends_the_other_tasks_and_passes_through() -> None:
    ended: list[str] = []

    async def world() -> None:
        async with Tasks() as tasks:
            tasks.spawn(forever(ended, "a"), "a")
            await asyncio.sleep(0)
            tasks.spawn(fail(LookupError("our bug, ours alone")), "b")
            await asyncio.Event().wait()

    with pytest.raises(LookupError, match="ours alone"):
        await world()
    assert ended == ["a"]


async def test_several_errors_are_an_exception_group() -> None:
    async def world() -> None:
        async with Tasks() as tasks:
            tasks.spawn(fail(LookupError()), "a")
            tasks.spawn(fail(ValueError()), "b")

    with pytest.raises(ExceptionGroup) as raised:
        await world()
    assert {type(error) for error in raised.value.exceptions} == {LookupError, ValueError}


async def test_a_call_on_a_thread_returns_its_value_or_raises() -> None:
    assert await on_thread(lambda: 1 + 1, "adds") == 2
    with pytest.raises(ZeroDivisionError):
        await on_thread(lambda: 1 // 0, "divides")
    with pytest.raises(RuntimeError, match="StopIteration"):
        await on_thread(lambda: next(iter(())), "ends")


async def test_a_call_that_never_returns_can_be_abandoned() -> None:
    stuck = asyncio.ensure_future(on_thread(threading.Event().wait, "stuck"))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stuck, 0.01)


async def test_a_long_wait_is_reported_with_its_line() -> None:
    lines: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    task = asyncio.create_task(
        name_long_waits(
            lambda: [Wait(component="relay r1 on host b", what="starting", since=2.0)],
            clock=lambda: 43.0,
            report=lambda component, line: lines.put_nowait((component, line)),
        )
    )
    try:
        expected = ("relay r1 on host b", "waiting 41 s for relay r1 on host b: starting")
        assert await asyncio.wait_for(lines.get(), 60) == expected
    finally:
        task.cancel()
