"""An event loop in a separate thread, for programs that have none, and for code that
does not know whether its thread has one.
"""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def run_apart(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine in an event loop of another thread, since the caller's thread
    may have a running loop. Return its result or raise its exception.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


class LoopThread:
    """Runs coroutines between `start` and `stop`, for any other thread."""

    def __init__(self, name: str) -> None:
        self._name = name

    def start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T], *, within_s: float | None = None) -> T:
        """Run the coroutine in the loop, and return its result or raise its exception.

        An exception in the waiting thread, such as KeyboardInterrupt, cancels the
        coroutine, and is raised once the coroutine has ended. TimeoutError is raised
        after `within_s` seconds; the coroutine is then cancelled, but not waited for.
        """
        tasks: list[asyncio.Task[T]] = []
        done = threading.Event()

        def begin() -> None:
            tasks.append(self._loop.create_task(coroutine))
            tasks[0].add_done_callback(lambda _: done.set())

        self._loop.call_soon_threadsafe(begin)
        try:
            ended = done.wait(within_s)
        except BaseException:
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            done.wait()
            raise
        if not ended:
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            raise TimeoutError(f"not done within {within_s:g} s")
        return tasks[0].result()

    def stop(self) -> None:
        """Cancel all tasks of the loop, and end the thread."""
        self.call(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
