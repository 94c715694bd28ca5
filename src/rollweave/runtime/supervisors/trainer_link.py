"""The link to the trainer, whose ranks are the workers of a role (`runtime/roles`).
Every rank executes every command, one command at a time; the reply of rank 0 is that of
the trainer, and the loss of any rank is that of the trainer.

Invariants: `ask` returns the trainer's reply or raises `TrainerLostError`; once the
trainer is lost, every later call raises; `lost` is done, with the reason, once the
trainer has ended, also by `kill` or `close`.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec

from rollweave.io.wire import encode
from rollweave.runtime.roles.group import WorkerGroup, WorkerPlace
from rollweave.runtime.roles.serving import constructor_codec, serve_worker
from rollweave.runtime.roles.worker import Worker, register
from rollweave.runtime.supervisors.stored_batches import RankCommand, executed
from rollweave.runtime.supervisors.supervisor import Link
from rollweave.runtime.tasks import on_thread
from rollweave.schema.base import Struct
from rollweave.schema.errors import RollweaveError, TrainerError
from rollweave.schema.roles import Arguments, WorkerError, WorkerLostError
from rollweave.schema.training import (
    Copied,
    Saved,
    SaveFailed,
    StopTrainer,
    TrainerCommand,
    TrainerReady,
    TrainerReply,
    TrainFailed,
)

T = TypeVar("T")

NAME = "trainer"
"""Name of the trainer's role in logs and errors."""

CLOSE_S = 5.0
"""Maximum seconds for a trainer in a thread to finish its last command."""


class TrainerLostError(TrainerError):
    """The trainer's process has ended, or was killed because it did not reply."""


class TrainerRefusedError(TrainerLostError):
    """The trainer cannot start, and another one would fail in the same way: its input
    is the same.
    """


class TrainerSpec(Struct, frozen=True, kw_only=True):
    """The specification of the trainer, the same for all ranks.

    `config` is a `RunConfig` as JSON; `warm_up` asks for the supervised warm-up. If the
    model does not exist yet, `words` are the word tokens of the tokenizer that is built
    from scratch.
    """

    config: str
    model: str
    words: tuple[str, ...] = ()
    warm_up: bool = False


class TrainerLike(Protocol):
    """The trainer of one rank, as in `train/trainer.py`."""

    def handle(self, command: TrainerCommand, /) -> TrainerReply | None:
        """Execute one command, blocking; return None for `StopTrainer`."""

    def write(self, on_written: Callable[[TrainerReply], None], /) -> None:
        """Write the copy on another thread, which then calls `on_written` with `Saved`
        or `SaveFailed` on rank 0.
        """


class TrainerBackend(Link, Protocol):
    """The link to the trainer."""

    async def ready(self) -> TrainerReady:
        """Wait until the trainer is built and warmed up."""

    async def ask(self, command: RankCommand) -> TrainerReply:
        """Let the trainer execute one command, and return its reply."""

    def bytes_of(self, command: RankCommand) -> int:
        """Return the number of bytes that `ask` sends to the trainer's processes for a
        command.
        """

    async def written(self) -> Saved | SaveFailed:
        """Wait for the reply that follows the last `Copied`."""


BuildTrainer = Callable[[TrainerSpec, Worker], tuple[TrainerReady, TrainerLike]]
"""Builds the trainer for the rank of a worker."""


class TrainerRank(Worker):
    """One rank of the trainer."""

    build: ClassVar[BuildTrainer]

    def __init__(self, spec: TrainerSpec) -> None:
        self._ready, self._trainer = type(self).build(spec, self)
        self._written: Future[TrainerReply] = Future()

    @register(mode="execute_first")
    def ready(self) -> TrainerReady:
        return self._ready

    @register(mode="execute_all")
    def handle(self, command: RankCommand) -> TrainerReply:
        """Execute any command but `StopTrainer`."""
        execute = executed(command)
        if isinstance(execute, TrainFailed):
            return execute
        reply = self._trainer.handle(execute)
        assert reply is not None, "every command but StopTrainer is answered"
        if isinstance(reply, Copied):
            self._written = Future()
            self._trainer.write(self._written.set_result)
        return reply

    @register(mode="execute_first", beside=True)
    def written(self) -> Saved | SaveFailed:
        """Wait for the reply that follows the last `Copied`."""
        reply = self._written.result()
        assert isinstance(reply, Saved | SaveFailed), "the reply to a copy"
        return reply

    def close(self) -> None:
        self._trainer.handle(StopTrainer())


def rank_class(build: BuildTrainer) -> type[TrainerRank]:
    """Return the class of workers whose trainers `build` builds."""
    return type("TrainerRank", (TrainerRank,), {"build": staticmethod(build)})


def serve(build: BuildTrainer) -> None:
    """Serve one rank in this process until it is stopped, or its parent ends."""
    rank = rank_class(build)
    serve_worker(lambda _: rank)


def _nothing() -> None:
    return


class ThreadTrainer:
    """The trainer in a thread of this process.

    A running step cannot be killed, only ignored.
    """

    def __init__(
        self,
        spec: TrainerSpec,
        build: BuildTrainer,
        *,
        start_s: float,
        on_ready: Callable[[], None] = _nothing,
    ) -> None:
        self._start_s, self._on_ready = start_s, on_ready
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[str] = self._loop.create_future()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name=NAME, daemon=True)
        self._thread.start()
        self._rank: asyncio.Future[TrainerRank] = self._submit(lambda: rank_class(build)(spec))

    async def ready(self) -> TrainerReady:
        try:
            async with asyncio.timeout(self._start_s):
                rank = await self._unless_lost(self._rank)
        except TimeoutError:
            raise TrainerLostError(
                f"the trainer was not ready within {self._start_s:g} s"
            ) from None
        except TrainerLostError:
            raise
        except RollweaveError as error:
            raise TrainerRefusedError(str(error)) from None
        self._on_ready()
        return rank.ready()

    def bytes_of(self, _command: RankCommand) -> int:
        return 0

    async def ask(self, command: RankCommand) -> TrainerReply:
        rank = self._rank.result()
        return await self._unless_lost(self._submit(lambda: rank.handle(command)))

    async def written(self) -> Saved | SaveFailed:
        return await self._unless_lost(on_thread(self._rank.result().written, "written"))

    async def close(self) -> None:
        self.kill()
        await asyncio.to_thread(self._thread.join, CLOSE_S)

    def kill(self) -> None:
        self._jobs.put(None)
        if not self.lost.done():
            self.lost.set_result("the trainer was stopped")

    def _lose(self, error: BaseException) -> TrainerLostError:
        """Give up the trainer, which has raised an exception that none may raise."""
        if not self.lost.done():
            self.lost.set_result(f"{type(error).__name__}: {error}")
        return TrainerLostError(self.lost.result())

    async def _unless_lost(self, result: asyncio.Future[T]) -> T:
        """Wait for a result. Raises `TrainerLostError` as soon as the trainer is
        lost.
        """
        either: set[asyncio.Future[Any]] = {result, self.lost}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            raise TrainerLostError(self.lost.result())
        try:
            return result.result()
        except BaseException as error:
            if isinstance(error, RollweaveError) and not isinstance(error, OSError):
                raise
            raise self._lose(error) from None

    def _submit(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Execute a job on the thread, after all earlier ones."""
        result: asyncio.Future[T] = self._loop.create_future()
        result.add_done_callback(_retrieved)

        def execute() -> None:
            try:
                value = job()
            except BaseException as error:
                self._call(result.set_exception, error)
            else:
                self._call(result.set_result, value)

        self._jobs.put(execute)
        return result

    def _main(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _call(self, function: Callable[[Any], None], argument: Any) -> None:
        """Call `function` on the event loop."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(function, argument)


def _retrieved(result: asyncio.Future[Any]) -> None:
    """Mark an exception as retrieved: a waiter is not required."""
    if not result.cancelled():
        result.exception()


class ProcessTrainer:
    """The trainer as a group of workers, one process per rank.

    `on_ready` is called once all ranks are ready.
    """

    def __init__(
        self,
        spec: TrainerSpec,
        *,
        places: Sequence[WorkerPlace],
        logs: Path,
        start_s: float,
        on_ready: Callable[[], None] = _nothing,
    ) -> None:
        """Start one rank at each of `places`. Raises OSError."""
        self._start_s, self._on_ready = start_s, on_ready
        self._ranks = WorkerGroup(
            NAME,
            TrainerRank,
            places=places,
            logs=logs,
            arguments=constructor_codec(TrainerRank).encode((spec,), {}),
        )

    @property
    def lost(self) -> asyncio.Future[str]:
        return self._ranks.lost

    async def ready(self) -> TrainerReady:
        try:
            await self._ranks.ready(self._start_s)
        except WorkerError as error:
            self.kill()
            failure = error.failures[0]
            if RollweaveError.__name__ in failure.kinds and OSError.__name__ not in failure.kinds:
                raise TrainerRefusedError(failure.text) from None
            raise TrainerLostError(str(error)) from None
        except WorkerLostError as error:
            raise TrainerLostError(str(error)) from None
        self._on_ready()
        ready: TrainerReady = await self._first("ready")
        return ready

    def bytes_of(self, command: RankCommand) -> int:
        return len(encode(command)) * self._ranks.world_size

    async def ask(self, command: RankCommand) -> TrainerReply:
        arguments = Arguments(args=(msgspec.Raw(encode(command)),))
        everywhere = dict.fromkeys(range(self._ranks.world_size), arguments)
        reply: TrainerReply = await self._call("handle", everywhere)
        return reply

    async def written(self) -> Saved | SaveFailed:
        reply: Saved | SaveFailed = await self._first("written")
        return reply

    async def close(self) -> None:
        await self._ranks.close()

    def kill(self) -> None:
        self._ranks.kill()

    async def _first(self, method: str) -> Any:
        """Call a method of rank 0."""
        return await self._call(method, {0: self._ranks.encode(method)})

    async def _call(self, method: str, arguments: Mapping[int, Arguments]) -> Any:
        """Call a method, and return the result of rank 0."""
        try:
            replies = await self._ranks.call(method, arguments, failure_of=_failure_of)
        except WorkerLostError as error:
            raise TrainerLostError(str(error)) from None
        except WorkerError as error:  # a trainer replies with its failures: this is a bug
            self._ranks.lose(error.failures[0].rank, error.failures[0].text)
            raise TrainerLostError(str(error)) from None
        return replies[0]


def _failure_of(reply: object) -> str:
    """Return the error that a reply reports, or ""."""
    return reply.error if isinstance(reply, TrainFailed | SaveFailed) else ""
