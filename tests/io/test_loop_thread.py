"""A loop in a thread runs coroutines for other threads, and leaves neither a task nor a
thread behind.
"""

import asyncio
import inspect
import threading

import pytest

from rollweave.io.loop_thread import LoopThread, run_apart


async def name_of_thread() -> str:
    return threading.current_thread().name


async def fail() -> None:
    raise KeyError("wrong")


async def stay(ended: threading.Event) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)  # the loop runs until the end of its tasks
        ended.set()


async def test_a_coroutine_runs_apart_although_a_loop_runs_here() -> None:
    assert run_apart(name_of_thread()) != threading.current_thread().name
    with pytest.raises(KeyError, match="wrong"):
        run_apart(fail())


def test_results_and_exceptions_come_back_and_the_end_cancels_tasks() -> None:
    late, left = stay(threading.Event()), threading.Event()

    async def leave_a_task() -> "asyncio.Task[None]":
        task = asyncio.create_task(stay(left))
        await asyncio.sleep(0)
        return task

    loop = LoopThread("the loop")
    loop.start()
    assert loop.call(name_of_thread()) == "the loop"
    with pytest.raises(KeyError, match="wrong"):
        loop.call(fail(), within_s=30.0)
    with pytest.raises(TimeoutError, match=r"^not done within 0\.01 s$"):
        loop.call(late, within_s=0.01)
    for _ in range(2):  # of which the loop has ended the first after the cancellation
        loop.call(name_of_thread())
    assert inspect.getcoroutinestate(late) == inspect.CORO_CLOSED
    task = loop.call(leave_a_task())
    loop.stop()
    assert left.is_set()
    assert task.cancelled()
    assert loop._loop.is_closed()
    assert (loop._thread.is_alive(), loop._thread.daemon) == (False, True)
