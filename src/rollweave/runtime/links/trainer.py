"""The link to the trainer, and its other end, `serve`: each command goes to every rank,
one command at a time; the reply of rank 0 counts, and the death of any rank is the
trainer's.

Invariants: `ask` returns the trainer's reply or raises `TrainerLostError`; once the
trainer is lost, every later call raises; `lost` is done, with the reason, after death,
`kill` and `close` alike.
"""

import asyncio
import contextlib
import dataclasses
import functools
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeGuard

import msgspec

from rollweave.io.child import ChildProcess, Spawn, spawn
from rollweave.io.parent import Parent
from rollweave.io.wire import decoder_of, encode
from rollweave.schema.base import Struct
from rollweave.schema.errors import NonFiniteLossError, RollweaveError, TrainerError
from rollweave.schema.training import (
    Copied,
    Saved,
    SaveFailed,
    StopTrainer,
    StoreOpened,
    TrainerCommand,
    TrainerReady,
    TrainerReply,
    TrainFailed,
)

CLOSE_S = 5.0
"""Maximum time for the trainer to end by itself, in seconds: an interpreter with torch
shuts down.
"""

STRAGGLER_S = 15.0
"""Maximum time for the reply of rank 0 after another rank reported a failure, in
seconds: beyond it, rank 0 hangs in a collective operation.
"""

_decode = decoder_of(TrainerReply)


class TrainerLostError(TrainerError):
    """The trainer's process has ended, or was killed because it did not reply."""


class TrainerRefusedError(TrainerLostError):
    """The trainer cannot start, and another one would fail in the same way: its input
    is the same.
    """


class TrainerSpec(Struct, frozen=True, kw_only=True):
    """The specification of one rank of the trainer.

    `address` is that of the rank's host, and `store` that of the store of rank 0, at
    which all ranks meet if there are several. `config` is a `RunConfig` as JSON;
    `warm_up` asks for the supervised warm-up. If the model does not exist yet, `words`
    are the word tokens of the tokenizer that is built from scratch.
    """

    config: str
    model: str
    run_dir: str
    rank: int = 0
    world: int = 1
    address: str = "127.0.0.1"
    store: str = ""
    words: tuple[str, ...] = ()
    warm_up: bool = False


class TrainerLike(Protocol):
    """The trainer of one rank, as in `train/trainer.py`."""

    def handle(self, command: TrainerCommand, /) -> TrainerReply | None:
        """Execute one command, blocking; return None for `StopTrainer`."""

    def write(self, on_written: Callable[[TrainerReply], None], /) -> None:
        """Write the copy on another thread, which then calls `on_written` with `Saved`
        or `SaveFailed`.
        """


class TrainerBackend(Protocol):
    """The link to the trainer."""

    @property
    def lost(self) -> asyncio.Future[str]:
        """The reason of the loss; done once the trainer is gone."""

    async def ready(self) -> TrainerReady:
        """Wait until the trainer is built and warmed up."""

    async def ask(self, command: TrainerCommand) -> TrainerReply:
        """Let the trainer execute one command, and return its reply."""

    async def written(self) -> Saved | SaveFailed:
        """Wait for the reply that follows the last `Copied`."""

    async def close(self) -> None:
        """Ask the trainer to end, and kill it if it does not."""

    def kill(self) -> None:
        """End the trainer now, without waiting."""


BuildTrainer = Callable[[TrainerSpec, Callable[[str], None]], tuple[TrainerReady, TrainerLike]]
"""Build the trainer of one rank. Rank 0 of several calls the second argument with the
address of the store that it has opened, before it waits for the others.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Where one rank of the trainer runs: how to start a process there, what to add to
    its environment, and the address of the host.
    """

    spawn: Spawn = spawn
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    address: str = "127.0.0.1"


def serve(build: BuildTrainer) -> None:
    """Serve one rank in this process until `StopTrainer`, or the end of the parent.

    A trainer that can never start reports the reason, and waits for its parent to end
    it.
    """
    parent = Parent.from_arguments()
    spec = decoder_of(TrainerSpec)(parent.receive())
    built = _try_build(
        build, spec, lambda address: parent.send(encode(StoreOpened(address=address)))
    )
    parent.send(encode(built if isinstance(built, TrainFailed) else built[0]))
    commands = parent.queue()
    if isinstance(built, TrainFailed):
        commands.get()  # the parent would take our own end for the reason
        return
    _, trainer = built
    decode = decoder_of(TrainerCommand)
    while (reply := trainer.handle(decode(commands.get()))) is not None:
        parent.send(encode(reply))
        # only now; otherwise the reply that follows it could be sent first
        if isinstance(reply, Copied):
            trainer.write(lambda written: parent.send(encode(written)))


def _try_build(
    build: BuildTrainer, spec: TrainerSpec, announce: Callable[[str], None]
) -> tuple[TrainerReady, TrainerLike] | TrainFailed:
    """Build a trainer, or return the failure that its input causes every time.

    Raises other errors, such as a full disk.
    """
    try:
        return build(spec, announce)
    except OSError:
        raise
    except RollweaveError as error:
        return TrainFailed(error=str(error), nonfinite=isinstance(error, NonFiniteLossError))


def _nothing() -> None:
    return


class _Replies:
    """The future replies of rank 0, and the loss of the trainer, for both backends."""

    def __init__(self, on_ready: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self._on_ready = on_ready
        self.lost: asyncio.Future[str] = loop.create_future()
        self.first: asyncio.Future[TrainerReply] = loop.create_future()
        self.waiter: asyncio.Future[TrainerReply] = self.first
        self.writing: asyncio.Future[Saved | SaveFailed] | None = None

    def expect(self) -> asyncio.Future[TrainerReply]:
        """Return the future of the next reply. Raises `TrainerLostError`."""
        if self.lost.done():
            raise TrainerLostError(self.lost.result())
        assert self.waiter.done(), "the trainer takes one command at a time"
        self.waiter = asyncio.get_running_loop().create_future()
        return self.waiter

    def is_late(self, reply: TrainerReply) -> TypeGuard[Saved | SaveFailed]:
        """Return whether this is the reply that follows a `Copied`."""
        return (
            self.writing is not None
            and not self.writing.done()
            and isinstance(reply, Saved | SaveFailed)
        )

    def receive(self, reply: TrainerReply) -> None:
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
            self.waiter.exception()  # mark it as retrieved: a waiter is not required
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
                f"the trainer cannot start: it sent {type(reply).__name__} instead of TrainerReady"
            )
        return reply


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
        self._start_s = start_s
        self._replies = _Replies(on_ready)
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[TrainerCommand] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._main, args=(spec, build), name="trainer", daemon=True
        )
        self._thread.start()

    @property
    def lost(self) -> asyncio.Future[str]:
        return self._replies.lost

    async def ready(self) -> TrainerReady:
        return await self._replies.ready(self._start_s)

    async def ask(self, command: TrainerCommand) -> TrainerReply:
        waiter = self._replies.expect()
        self._commands.put(command)
        return await waiter

    async def written(self) -> Saved | SaveFailed:
        return await self._replies.written()

    async def close(self) -> None:
        self.kill()
        await asyncio.to_thread(self._thread.join, CLOSE_S)

    def kill(self) -> None:
        self._commands.put(StopTrainer())
        self._replies.lose("the trainer was stopped")

    def _main(self, spec: TrainerSpec, build: BuildTrainer) -> None:
        try:
            built = _try_build(build, spec, lambda _: None)
            if isinstance(built, TrainFailed):
                self._call(self._replies.receive, built)
                return
            ready, trainer = built
            self._call(self._replies.receive, ready)
            while not isinstance(command := self._commands.get(), StopTrainer):
                reply = trainer.handle(command)
                assert reply is not None, "every command but StopTrainer is answered"
                self._call(self._replies.receive, reply)
                if isinstance(reply, Copied):
                    trainer.write(functools.partial(self._call, self._replies.receive))
            self._call(self._replies.lose, "the trainer has ended")
        except BaseException as error:
            self._call(self._replies.lose, f"{type(error).__name__}: {error}")

    def _call(self, function: Callable[..., None], argument: object) -> None:
        """Call `function` on the event loop."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(function, argument)


class ProcessTrainer:
    """The trainer as one child process per rank.

    `on_ready` is called as soon as rank 0 is ready.
    """

    def __init__(
        self,
        spec: TrainerSpec,
        *,
        places: Sequence[RankPlace],
        logs: Path,
        start_s: float,
        module: str,
        on_ready: Callable[[], None] = _nothing,
    ) -> None:
        """Start one rank at each of `places`. Raises OSError."""
        self._start_s = start_s
        self._replies = _Replies(on_ready)
        self._straggler: asyncio.TimerHandle | None = None
        self._children: list[ChildProcess] = []
        self._reply_counts = [0] * len(places)
        """Number of replies by rank."""
        self._specs = [
            msgspec.structs.replace(spec, rank=rank, world=len(places), address=place.address)
            for rank, place in enumerate(places)
        ]
        try:
            for rank, place in enumerate(places):
                self._children.append(self._start(rank, place, logs, module))
        except OSError:
            self.kill()
            raise
        self._children[0].send(encode(self._specs[0]))

    def _start(self, rank: int, place: RankPlace, logs: Path, module: str) -> ChildProcess:
        return place.spawn(
            name=f"trainer-{rank}",
            module=module,
            log=logs / f"trainer-{rank}.log",
            env=place.env,
            on_frame=lambda payload: self._on_reply(rank, payload),
            on_gone=lambda reason: self._on_gone(rank, reason),
        )

    @property
    def lost(self) -> asyncio.Future[str]:
        return self._replies.lost

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children]

    async def ready(self) -> TrainerReady:
        try:
            return await self._replies.ready(self._start_s)
        except TrainerLostError:
            self.kill()
            raise

    async def ask(self, command: TrainerCommand) -> TrainerReply:
        waiter = self._replies.expect()
        payload = encode(command)
        for child in self._children:
            child.send(payload)
        return await waiter

    async def written(self) -> Saved | SaveFailed:
        return await self._replies.written()

    async def close(self) -> None:
        if not self._replies.lost.done():
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
        if isinstance(reply, StoreOpened):
            for spec, child in zip(self._specs[1:], self._children[1:], strict=True):
                child.send(encode(msgspec.structs.replace(spec, store=reply.address)))
            return
        if rank == 0 and self._replies.is_late(reply):
            self._replies.receive(reply)
            return
        self._reply_counts[rank] += 1
        if rank == 0:
            if self._straggler is not None:
                self._straggler.cancel()
                self._straggler = None
            self._replies.receive(reply)
        elif (
            isinstance(reply, TrainFailed | SaveFailed)
            and self._straggler is None
            and self._reply_counts[0] < self._reply_counts[rank]
        ):
            loop = asyncio.get_running_loop()
            self._straggler = loop.call_later(
                STRAGGLER_S, self._on_gone, rank, f"failed alone: {reply.error}"
            )

    def _on_gone(self, rank: int, reason: str) -> None:
        if self._straggler is not None:
            self._straggler.cancel()
            self._straggler = None
        self._replies.lose(f"trainer rank {rank}: {reason}")
        self.kill()
