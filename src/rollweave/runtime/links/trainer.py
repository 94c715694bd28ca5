"""The way to the trainer: one question at a time, to every rank; rank 0's reply counts,
any rank's death is the trainer's.

Invariants: `ask` returns the trainer's reply or raises `TrainerLostError`; once the
trainer is lost every later call raises; `lost` is done, with the reason, after death,
`kill` and `close` alike.
"""

import asyncio
import contextlib
import functools
import queue
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeGuard

import msgspec

from rollweave.io.child import Child, spawn
from rollweave.io.wire import decoder_of, encode
from rollweave.schema.base import Struct
from rollweave.schema.errors import NonFiniteLossError, RollweaveError, TrainerError
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

CLOSE_S = 5.0
"""Seconds that the trainer has to end by itself: an interpreter with torch shuts down."""

STRAGGLER_S = 15.0
"""Seconds that rank 0 has to answer after another rank has said that it failed; then it
hangs in a collective operation.
"""

_decode = decoder_of(TrainerReply)


class TrainerLostError(TrainerError):
    """The trainer's process is gone, or does not answer and was killed."""


class TrainerRefusedError(TrainerLostError):
    """The trainer cannot start, and another would fail in the same way: its input is
    the same.
    """


class TrainerSpec(Struct, frozen=True, kw_only=True):
    """How to build one rank of the trainer. `config` is a `RunConfig` as JSON;
    `warm_up` asks for the supervised warm-up.

    `words` are the whole words of a tokenizer that is built from scratch, where `model`
    does not exist yet.
    """

    config: str
    model: str
    run_dir: str
    rank: int = 0
    world: int = 1
    words: tuple[str, ...] = ()
    warm_up: bool = False


class TrainerLike(Protocol):
    """The trainer, as `train/trainer.py` has it."""

    def handle(self, command: TrainerCommand, /) -> TrainerReply | None:
        """Execute one command; blocks."""

    def write(self, later: Callable[[TrainerReply], None], /) -> None:
        """Write the copy on another thread, which calls `later` with `Saved` or
        `SaveFailed`.
        """


class TrainerBackend(Protocol):
    """What effects see of the trainer."""

    @property
    def lost(self) -> asyncio.Future[str]:
        """Done, with the reason, once the trainer is gone."""

    async def ready(self) -> TrainerReady:
        """Wait until it is built and warmed up."""

    async def ask(self, command: TrainerCommand) -> TrainerReply:
        """Have one command executed."""

    async def written(self) -> Saved | SaveFailed:
        """Wait for the reply that follows the `Copied` that `ask` returned last."""

    async def close(self) -> None:
        """Ask it to end, and kill it if it does not."""

    def kill(self) -> None:
        """End it now, without waiting."""


BuildTrainer = Callable[[TrainerSpec], tuple[TrainerReady, TrainerLike]]


def started(
    build: BuildTrainer, spec: TrainerSpec
) -> tuple[TrainerReady, TrainerLike] | TrainFailed:
    """The trainer and its first word; or why there is none, where its input is at
    fault. Raises what chance may have done.
    """
    try:
        return build(spec)
    except OSError:
        raise  # a full disk, say
    except RollweaveError as error:
        return TrainFailed(error=str(error), nonfinite=isinstance(error, NonFiniteLossError))


def _nothing() -> None:
    return


class _Answers:
    """The waiter for rank 0's next reply, and what ends all waiting.

    Shared by both backends.
    """

    def __init__(self, on_ready: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self._on_ready = on_ready
        self.lost: asyncio.Future[str] = loop.create_future()
        self.first: asyncio.Future[TrainerReply] = loop.create_future()
        self.waiter: asyncio.Future[TrainerReply] = self.first
        self.writing: asyncio.Future[Saved | SaveFailed] | None = None

    def must_live(self) -> None:
        if self.lost.done():
            raise TrainerLostError(self.lost.result())

    def expect(self) -> asyncio.Future[TrainerReply]:
        self.must_live()
        assert self.waiter.done(), "the trainer takes one command at a time"
        self.waiter = asyncio.get_running_loop().create_future()
        return self.waiter

    def is_late(self, reply: TrainerReply) -> TypeGuard[Saved | SaveFailed]:
        """True for a reply that follows a `Copied`."""
        return (
            self.writing is not None
            and not self.writing.done()
            and isinstance(reply, Saved | SaveFailed)
        )

    def give(self, reply: TrainerReply) -> None:
        if self.is_late(reply):
            assert self.writing is not None, "a caller waits for it"
            self.writing.set_result(reply)
            return
        if isinstance(reply, Copied):
            self.writing = asyncio.get_running_loop().create_future()
        if isinstance(reply, TrainerReady):
            self._on_ready()
        if not self.waiter.done():
            self.waiter.set_result(reply)

    def lose(self, reason: str) -> None:
        if self.lost.done():
            return
        self.lost.set_result(reason)
        if not self.waiter.done():
            self.waiter.set_exception(TrainerLostError(reason))
            self.waiter.exception()  # whoever still waits sees it; nobody has to
        if self.writing is not None and not self.writing.done():
            self.writing.set_exception(TrainerLostError(reason))
            self.writing.exception()

    async def written(self) -> Saved | SaveFailed:
        assert self.writing is not None, "a copy was made"
        return await asyncio.shield(self.writing)

    async def ready(self, limit_s: float) -> TrainerReady:
        try:
            async with asyncio.timeout(limit_s):
                reply = await asyncio.shield(self.first)
        except TimeoutError:
            raise TrainerLostError(f"the trainer was not ready within {limit_s:g} s") from None
        if isinstance(reply, TrainFailed):
            raise TrainerRefusedError(reply.error)
        if not isinstance(reply, TrainerReady):
            raise TrainerLostError(
                f"the trainer cannot start: it said {type(reply).__name__} instead of ready"
            )
        return reply


class ThreadTrainer:
    """The trainer in a thread of this process.

    A step that runs cannot be killed, only ignored.
    """

    def __init__(
        self,
        spec: TrainerSpec,
        build: BuildTrainer,
        *,
        start_s: float,
        on_ready: Callable[[], None] = _nothing,
    ) -> None:
        self._start_s = start_s
        self._answers = _Answers(on_ready)
        self._loop = asyncio.get_running_loop()
        self._questions: queue.SimpleQueue[TrainerCommand] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._main, args=(spec, build), name="trainer", daemon=True
        )
        self._thread.start()

    @property
    def lost(self) -> asyncio.Future[str]:
        return self._answers.lost

    async def ready(self) -> TrainerReady:
        return await self._answers.ready(self._start_s)

    async def ask(self, command: TrainerCommand) -> TrainerReply:
        waiter = self._answers.expect()
        self._questions.put(command)
        return await waiter

    async def written(self) -> Saved | SaveFailed:
        return await self._answers.written()

    async def close(self) -> None:
        self.kill()
        await asyncio.to_thread(self._thread.join, CLOSE_S)

    def kill(self) -> None:
        self._questions.put(StopTrainer())
        self._answers.lose("the trainer was stopped")

    def _main(self, spec: TrainerSpec, build: BuildTrainer) -> None:
        try:
            found = started(build, spec)
            if isinstance(found, TrainFailed):
                self._say(self._answers.give, found)
                return
            ready, trainer = found
            self._say(self._answers.give, ready)
            while not isinstance(command := self._questions.get(), StopTrainer):
                reply = trainer.handle(command)
                assert reply is not None, "every command but StopTrainer is answered"
                self._say(self._answers.give, reply)
                if isinstance(reply, Copied):
                    trainer.write(functools.partial(self._say, self._answers.give))
            self._say(self._answers.lose, "the trainer has ended")
        except BaseException as error:
            self._say(self._answers.lose, f"{type(error).__name__}: {error}")

    def _say(self, function: Callable[..., None], argument: object) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(function, argument)


class ProcessTrainer:
    """The trainer as one child process a rank.

    `on_ready` is called as soon as rank 0 is ready.
    """

    def __init__(
        self,
        spec: TrainerSpec,
        *,
        logs: Path,
        env: Mapping[str, str],
        start_s: float,
        module: str,
        on_ready: Callable[[], None] = _nothing,
    ) -> None:
        self._start_s = start_s
        self._answers = _Answers(on_ready)
        self._straggler: asyncio.TimerHandle | None = None
        self._children: list[Child] = []
        self._answered = [0] * spec.world  # replies by rank
        port = str(_free_port()) if spec.world > 1 else ""
        for rank in range(spec.world):
            own = {**env, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(spec.world)}
            if spec.world > 1:
                own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            child = spawn(
                name=f"trainer-{rank}",
                module=module,
                log=logs / f"trainer-{rank}.log",
                env=own,
                on_frame=lambda payload, rank=rank: self._on_reply(rank, payload),  # type: ignore[misc]
                on_gone=lambda reason, rank=rank: self._on_gone(rank, reason),  # type: ignore[misc]
            )
            child.send(encode(msgspec.structs.replace(spec, rank=rank)))
            self._children.append(child)

    @property
    def lost(self) -> asyncio.Future[str]:
        return self._answers.lost

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children]

    async def ready(self) -> TrainerReady:
        try:
            return await self._answers.ready(self._start_s)
        except TrainerLostError:
            self.kill()
            raise

    async def ask(self, command: TrainerCommand) -> TrainerReply:
        waiter = self._answers.expect()
        payload = encode(command)
        for child in self._children:
            child.send(payload)
        return await waiter

    async def written(self) -> Saved | SaveFailed:
        return await self._answers.written()

    async def close(self) -> None:
        if not self._answers.lost.done():
            payload = encode(StopTrainer())
            for child in self._children:
                child.send(payload)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await asyncio.gather(*(child.gone() for child in self._children))
        self.kill()
        await asyncio.gather(*(child.gone() for child in self._children))

    def kill(self) -> None:
        for child in self._children:
            child.kill()

    def _on_reply(self, rank: int, payload: bytes) -> None:
        reply = _decode(payload)
        if rank == 0 and self._answers.is_late(reply):
            self._answers.give(reply)
            return
        self._answered[rank] += 1
        if rank == 0:
            if self._straggler is not None:
                self._straggler.cancel()
                self._straggler = None
            self._answers.give(reply)
        elif (
            isinstance(reply, TrainFailed | SaveFailed)
            and self._straggler is None
            and self._answered[0] < self._answered[rank]
        ):
            loop = asyncio.get_running_loop()
            self._straggler = loop.call_later(
                STRAGGLER_S, self._on_gone, rank, f"failed alone: {reply.error}"
            )

    def _on_gone(self, rank: int, reason: str) -> None:
        if self._straggler is not None:
            self._straggler.cancel()
            self._straggler = None
        self._answers.lose(f"trainer rank {rank}: {reason}")
        self.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
