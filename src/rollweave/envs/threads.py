"""Threads for plain methods of environments: code that blocks delays only its own
trajectory.

An environment has a thread for its life, because what it opens (a database connection,
for example) may belong to the thread that opened it. Nothing queues for a thread: there
is one for each live environment, whose number `rollout.max_running` and
`rollout.init_slots` bound, and one for each reward being computed, whose number
`rollout.eval_slots` bounds.

Invariants: calls of one environment run one after another on one thread; a call that is
abandoned stays on its thread and is counted until it returns, and its environment is
never called again; threads are daemons, and nothing waits for one.
"""

import asyncio
import contextlib
import inspect
import queue
import threading
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from rollweave.envs.foreign import text_of
from rollweave.schema.errors import EnvError

LEFT_BEHIND = 64
"""Maximum number of abandoned calls that have not returned; beyond it no environment
gets a thread.
"""


class Via(Protocol):
    """A way to call a user's method, plain or async."""

    def __call__(self, method: Callable[..., Any], *arguments: Any) -> Awaitable[Any]:
        """Return the method's result, awaited if needed."""


async def awaited(value: Any) -> Any:
    """Return the value, awaited if needed: an environment's methods may be plain or
    async.
    """
    return await value if hasattr(value, "__await__") else value


async def directly(method: Callable[..., Any], *arguments: Any) -> Any:
    """`Via` the calling thread: for methods that do not block, and for a process that
    does nothing else.
    """
    return await awaited(method(*arguments))


async def apart(method: Callable[..., Any], *arguments: Any) -> Any:
    """`Via` a thread for this call only."""
    threads = EnvThreads()
    thread = threads.lease("one call")
    try:
        return await thread.via(method, *arguments)
    finally:
        thread.release()
        threads.close()


def needs_thread(kind: type[Any]) -> bool:
    """True if environments of this class have plain methods that may block: all may,
    unless the class sets `blocking = False`.

    An inherited `blocking` does not count, because it says nothing about the methods
    that the class adds.
    """
    methods = (getattr(kind, name, None) for name in ("reset", "step", "close"))
    plain = any(
        method is not None and not inspect.iscoroutinefunction(method) for method in methods
    )
    return plain and vars(kind).get("blocking", True) is not False


class EnvThreads:
    """The threads of a run. All calls belong to the event loop's thread."""

    def __init__(self) -> None:
        self.left_behind: Counter[str] = Counter()
        """Number of abandoned calls that have not returned, by what was called."""
        self.on_left: Callable[[str], None] = lambda text: None
        """Called with a sentence for each call that is abandoned."""
        self._idle: list[_Worker] = []
        self._workers: weakref.WeakSet[_Worker] = weakref.WeakSet()
        self._closed = False

    def lease(self, name: str) -> "EnvThread":
        """Lease a thread for environment `name`.

        Raises EnvError if too many calls do not return.
        """
        if self._closed:
            raise EnvError("the run is ending")
        if (count := self.left_behind.total()) >= LEFT_BEHIND:
            most, _ = self.left_behind.most_common(1)[0]
            raise EnvError(
                f"at most {LEFT_BEHIND} calls of environments may be left behind, got {count}, "
                f"most of them in {most}; "
                'isolation = "process" ends calls that do not return'
            )
        worker = self._idle.pop() if self._idle else _Worker()
        self._workers.add(worker)
        return EnvThread(self, name, worker)

    def give_back(self, worker: "_Worker") -> None:
        """End the lease of an idle thread."""
        self._idle.append(worker)

    def leave(self, what: str) -> None:
        """Count an abandoned call, and warn of it."""
        self.left_behind[what] += 1
        count = self.left_behind.total()
        self.on_left(
            f"{what} was given up and has not returned: its thread is left behind ({count} so "
            "far); "
            'isolation = "process" ends such calls'
        )

    def returned(self, what: str) -> None:
        """Uncount an abandoned call, which has returned after all."""
        self.left_behind[what] -= 1
        self.left_behind += Counter()

    def close(self) -> None:
        """End all threads: idle ones at once, each other one when its call returns."""
        self._closed = True
        for worker in self._workers:
            worker.end()


class EnvThread:
    """The thread of one environment, or of one reward. Runs one call at a time."""

    def __init__(self, threads: EnvThreads, name: str, worker: "_Worker") -> None:
        self._threads, self._name = threads, name
        self._worker: _Worker | None = worker
        self._calling = ""
        self.left = False
        """True if a call was abandoned: the environment must not be called again."""

    async def via(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call as `Via` does: on the event loop if `method` is async, otherwise on the
        thread.
        """
        if inspect.iscoroutinefunction(method):
            return await method(*arguments)
        # a partial's name is that of its function
        name = getattr(getattr(method, "func", method), "__name__", "call")
        return await awaited(await self.run(name, lambda: method(*arguments)))

    async def run(self, what: str, call: Callable[[], Any]) -> Any:
        """Run `call` on the thread.

        If the caller is cancelled before the call returns, the call is abandoned.
        """
        if self.left or self._worker is None:
            raise EnvError(f"{self._name} is not called again: a call of it has not returned")
        assert not self._calling, "an environment has one call at a time"
        self._calling = what = f"{what} of {self._name}"
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def settle(value: Any, error: BaseException | None) -> None:
            self._calling = ""
            if self.left:
                self._threads.returned(what)
            elif not answer.done():  # or the caller was cancelled at this very moment
                # a GeneratorExit as a future's exception would close all that await it
                answer.set_result((value, error))

        def deliver(value: Any, error: BaseException | None) -> None:
            # the event loop is closed: nothing waits for it
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, value, error)

        self._worker.put(call, deliver)
        try:
            value, error = await answer
        finally:
            self._leave()
        if error is not None:
            raise error
        return value

    def release(self) -> None:
        """End the lease; harmless when repeated. A call under way is abandoned."""
        self._leave()
        worker, self._worker = self._worker, None
        if worker is not None:
            self._threads.give_back(worker)

    def _leave(self) -> None:
        """Abandon the call under way, if there is one."""
        if not self._calling or self.left:
            return
        self.left = True
        if self._worker is not None:
            self._worker.end()  # once the call returns
            self._worker = None
        self._threads.leave(self._calling)


Deliver = Callable[[Any, BaseException | None], None]
"""Receives a call's result, or the exception that it raised."""


class _Worker:
    """A daemon thread that runs one call after another."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Deliver] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=_work, args=(self._calls,), name="environment", daemon=True).start()
        weakref.finalize(self, self._calls.put, None)  # a forgotten environment leaves no thread

    def put(self, call: Callable[[], Any], deliver: Deliver) -> None:
        self._calls.put((call, deliver))

    def end(self) -> None:
        self._calls.put(None)


def _work(calls: "queue.SimpleQueue[tuple[Callable[[], Any], Deliver] | None]") -> None:
    while (job := calls.get()) is not None:
        call, deliver = job
        value = None
        try:
            value = call()
        except StopIteration as raised:  # a coroutine cannot raise it
            deliver(None, RuntimeError(f"StopIteration: {text_of(raised)}"))
        except BaseException as raised:
            deliver(None, raised)
        else:
            deliver(value, None)
        # keep no references to what an environment holds until the next call
        del job, call, deliver, value
