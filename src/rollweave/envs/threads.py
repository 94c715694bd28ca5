"""Threads for plain methods of environments, so that code that blocks delays only its
own trajectory; and descriptions of user values and exceptions that are safe whatever
their classes do.

An environment has one thread for its lifetime, because a resource that it opens (a
database connection, for example) may belong to the thread that opened it. Nothing
queues for a thread: there is one for each live environment and one for each reward
being computed, and `rollout.max_running` bounds the number of both.

Invariants: calls of one environment run one after another on one thread; an abandoned
call stays on its thread and is counted until it returns, and its environment is never
called again; threads are daemons, and nothing waits for one. No description raises,
because the attributes and methods of a foreign object are foreign code as well.
"""

import asyncio
import contextlib
import inspect
import os
import queue
import sysconfig
import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

from rollweave.schema.errors import EnvError, RollweaveError
from rollweave.schema.text import raised, shortened, valid

MAX_ABANDONED = 64
"""Maximum number of abandoned calls that have not returned; beyond this number no
environment gets a thread.
"""

Deliver = Callable[[Any, BaseException | None], None]
"""Receives a call's result, or the exception that it raised."""

_NAME = type.__dict__["__name__"]
"""The descriptor of a class's name; a metaclass may define another `__name__`."""

_LIBRARIES = (
    *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib")),
    f"{Path(__file__).parents[1]}{os.sep}",
    "<frozen ",
)
"""Prefixes of files that are not the user's own: files of Python, of installed
packages, and of Rollweave.
"""

MAIN_THREAD = (
    'signals need the main thread of a process: with isolation = "process", environments '
    "and the reward function of env jsonl run there"
)
"""Remedy of code that sets a signal handler or an alarm on another thread."""

_CAUSES = 8
"""Maximum number of an exception's causes that are examined."""


class Caller(Protocol):
    """Calls a user's method, plain or async."""

    def __call__(self, method: Callable[..., Any], *arguments: Any) -> Awaitable[Any]:
        """Return the method's result, which is awaited if needed."""


async def awaited(value: Any) -> Any:
    """Return the value, which is awaited if needed, since an environment's methods may
    be plain or async.
    """
    return await value if hasattr(value, "__await__") else value


async def call_inline(method: Callable[..., Any], *arguments: Any) -> Any:
    """Call the method on the calling thread. For methods that do not block, and for a
    process that does nothing else.
    """
    return await awaited(method(*arguments))


def needs_thread(kind: type[Any]) -> bool:
    """Return whether environments of this class have plain methods that may block. All
    plain methods may block unless the class sets `blocking = False`.

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
        self.abandoned: Counter[str] = Counter()
        """Number of abandoned calls that have not returned, by the name of the method
        and its environment.
        """
        self.on_abandoned: Callable[[str], None] = lambda text: None
        """Called with a warning for each abandoned call."""
        self._idle: list[_Worker] = []
        self._workers: weakref.WeakSet[_Worker] = weakref.WeakSet()
        self._closed = False

    def lease(self, name: str) -> "EnvThread":
        """Lease a thread for environment `name`.

        Raises EnvError if too many calls do not return.
        """
        if self._closed:
            raise EnvError("the run is ending")
        if (count := self.abandoned.total()) >= MAX_ABANDONED:
            most, _ = self.abandoned.most_common(1)[0]
            raise EnvError(
                f"at most {MAX_ABANDONED} calls of environments may be abandoned, got {count}, "
                f'most of them in {most}; isolation = "process" ends calls that do not return'
            )
        worker = self._idle.pop() if self._idle else _Worker()
        self._workers.add(worker)
        return EnvThread(self, name, worker)

    def give_back(self, worker: "_Worker") -> None:
        """End the lease of an idle thread."""
        self._idle.append(worker)

    def count_abandoned(self, what: str) -> None:
        """Count an abandoned call, and warn of it."""
        self.abandoned[what] += 1
        count = self.abandoned.total()
        self.on_abandoned(
            f"{what} was abandoned and has not returned: its thread is lost ({count} so far); "
            'isolation = "process" ends such calls'
        )

    def returned(self, what: str) -> None:
        """Stop counting an abandoned call, which has returned after all."""
        self.abandoned[what] -= 1
        self.abandoned += Counter()

    def close(self) -> None:
        """End all threads: idle threads immediately, the others when their calls
        return.
        """
        self._closed = True
        for worker in self._workers:
            worker.end()


class EnvThread:
    """The thread of one environment, or of one reward. Runs one call at a time."""

    def __init__(self, threads: EnvThreads, name: str, worker: "_Worker") -> None:
        self._threads, self._name = threads, name
        self._worker: _Worker | None = worker
        self._calling = ""
        self.has_abandoned = False
        """True if a call was abandoned: the environment must not be called again."""

    async def via(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call `method` as a `Caller` does: on the event loop if the method is async,
        otherwise on the thread.
        """
        if inspect.iscoroutinefunction(method):
            return await method(*arguments)
        # A partial has the name of its function.
        name = getattr(getattr(method, "func", method), "__name__", "call")
        return await awaited(await self.run(name, lambda: method(*arguments)))

    async def run(self, what: str, call: Callable[[], Any]) -> Any:
        """Run `call` on the thread.

        If the caller is cancelled before the call returns, the call is abandoned.
        """
        if self.has_abandoned or self._worker is None:
            raise EnvError(f"{self._name} is not called again: a call of it has not returned")
        assert not self._calling, "an environment has one call at a time"
        self._calling = what = f"{what} of {self._name}"
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def settle(value: Any, error: BaseException | None) -> None:
            self._calling = ""
            if self.has_abandoned:
                self._threads.returned(what)
            elif not answer.done():  # the caller may have been cancelled just now
                # A GeneratorExit as a future's exception would close every coroutine
                # that awaits it.
                answer.set_result((value, error))

        def deliver(value: Any, error: BaseException | None) -> None:
            # The event loop may be closed: then nothing waits for the result.
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
        """End the lease. Idempotent. A call in progress is abandoned."""
        self._leave()
        worker, self._worker = self._worker, None
        if worker is not None:
            self._threads.give_back(worker)

    def _leave(self) -> None:
        """Abandon the call in progress, if there is one."""
        if not self._calling or self.has_abandoned:
            return
        self.has_abandoned = True
        if self._worker is not None:
            self._worker.end()  # once the call returns
            self._worker = None
        self._threads.count_abandoned(self._calling)


class _Worker:
    """A daemon thread that runs one call after another."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Deliver] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=_work, args=(self._calls,), name="environment", daemon=True).start()
        weakref.finalize(self, self._calls.put, None)  # an unreferenced worker's thread ends

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
        # Hold no references to an environment's objects until the next call.
        del job, call, deliver, value


def type_name(value: Any) -> str:
    """Return the name of the value's class."""
    return str(_NAME.__get__(type(value)))


def text_of(error: BaseException) -> str:
    """Return the exception's text, as valid text of limited length."""
    try:
        return shortened("".join(str(error)))
    except BaseException:
        return "(its text cannot be shown)"


def describe_error(method: str, error: BaseException) -> str:
    """Return the error and the place in the code where it was raised: the last line of
    the user's own code, or, without a line of the user's, the last line of any code.
    """
    text = text_of(error)
    if _needs_main_thread(error):
        text = f"{text}; {MAIN_THREAD}"
    # `isinstance` would also consult the exception's `__class__`.
    if issubclass(type(error), RollweaveError):
        return f"{method}: {text}"
    return valid(raised(method, type_name(error), text, _place(error)))


def _needs_main_thread(error: BaseException) -> bool:
    """Return whether `signal.signal` has raised this error or one of the error's
    causes.
    """
    cause: BaseException | None = error
    try:
        for _ in range(_CAUSES):
            if cause is None:
                return False
            if type(cause) is ValueError and str(cause).startswith("signal only works in main"):
                return True
            cause = cause.__cause__ or cause.__context__
    except BaseException:
        pass
    return False


def _place(error: BaseException) -> str:
    try:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
        last = (own or frames)[-1:]
        return "".join(f"{frame.filename}:{frame.lineno}" for frame in last)
    except BaseException:
        return ""


def running_task() -> asyncio.Task[Any] | None:
    """Return the task that is running now, if any.

    A GeneratorExit that arrives while the task of the coroutine runs was raised by the
    code that it awaits. When Python closes a coroutine, its task does not run.
    """
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs
        return None
