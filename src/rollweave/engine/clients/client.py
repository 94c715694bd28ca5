"""An engine behind a link, with all protocols of `base`, and the links: to a process,
on this host or another, whose messages are frames over the connection that
`io/child.Spawn` opens; and to a thread of this process, for debugging and for tests,
which shares the interpreter and cannot be killed by force.

Invariant: a waiter is either in exactly one of the tables of `EngineClient` or done;
the loss of the engine empties all tables.
"""

import asyncio
import contextlib
import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, assert_never

from rollweave.engine.clients.base import EngineLink, OnTokens, duplicate_id, fail, resolve
from rollweave.io.child import Spawn
from rollweave.io.wire import decoder_of, encode
from rollweave.schema.errors import EngineError, EngineLostError, KvError, WeightsError
from rollweave.schema.serving import (
    STREAM_S,
    Abort,
    Add,
    Beat,
    Beating,
    EngineCommand,
    EngineFatal,
    EngineReply,
    EngineSpec,
    EngineStats,
    ExportKv,
    FinishReason,
    Generated,
    GenerateRequest,
    GenerateResult,
    ImportKv,
    KvExported,
    KvImported,
    KvManifest,
    KvRefused,
    KvTransport,
    Load,
    LoadCheckpoint,
    Loaded,
    LoadFailed,
    Progress,
    Ready,
    ReleaseKv,
    Rerank,
    Resume,
    Sampled,
    Shutdown,
    Stage,
    Staged,
    StageFailed,
    Stats,
    Suspend,
    Suspended,
)
from rollweave.schema.weights import WeightManifest

T = TypeVar("T")

CLOSE_S = 3.0
"""Maximum seconds that an engine gets to end by itself: one step and its clean-up."""

OpenLink = Callable[[Callable[[EngineReply], None], Callable[[str], None]], EngineLink]
"""Starts an engine. The arguments are called with each reply, and once when the engine
is gone.
"""


class EngineClient:
    """An engine behind a link.

    `start_s` bounds `ready`, `reply_s` suspending, staging, loading and sampling.
    """

    def __init__(self, name: str, open_link: OpenLink, *, start_s: float, reply_s: float) -> None:
        self._name = name
        self._start_s, self._reply_s = start_s, reply_s
        self._loop = asyncio.get_running_loop()
        self._lost: asyncio.Future[str] = self._loop.create_future()
        self._ready: asyncio.Future[Ready] = self._loop.create_future()
        self._generating: dict[str, asyncio.Future[GenerateResult]] = {}
        self._on_tokens: dict[str, OnTokens] = {}
        self._waiting: defaultdict[type, deque[asyncio.Future[Any]]] = defaultdict(deque)
        """The waiters of commands that are answered in order, by the reply for which
        they wait.
        """
        self._kv_waiters: dict[str, asyncio.Future[KvExported | KvImported | KvRefused]] = {}
        self._numbers = itertools.count()
        self._fatal = ""
        self._link = open_link(self._on_reply, self._on_lost)

    @property
    def lost(self) -> asyncio.Future[str]:
        return self._lost

    async def ready(self) -> Ready:
        return await self._within(asyncio.shield(self._ready), self._start_s, "become ready")

    def generate(
        self,
        request: GenerateRequest,
        on_tokens: OnTokens | None = None,
        *,
        report_s: float = STREAM_S,
    ) -> asyncio.Future[GenerateResult]:
        waiter: asyncio.Future[GenerateResult] = self._loop.create_future()
        if self._lost.done():
            waiter.set_exception(EngineLostError(self._lost.result()))
        elif request.id in self._generating:
            waiter.set_exception(duplicate_id(request.id))
        else:
            self._generating[request.id] = waiter
            if on_tokens is not None:
                self._on_tokens[request.id] = on_tokens
            waiter.add_done_callback(lambda done: self._on_done(request.id, done))
            self._link.send(Add(request=request, report_s=None if on_tokens is None else report_s))
        return waiter

    def _on_done(self, request_id: str, waiter: asyncio.Future[GenerateResult]) -> None:
        if waiter.cancelled() and self._generating.get(request_id) is waiter:
            self._forget(request_id)
            self._link.send(Abort(id=request_id))

    def _forget(self, request_id: str) -> asyncio.Future[GenerateResult] | None:
        self._on_tokens.pop(request_id, None)
        return self._generating.pop(request_id, None)

    def abort(self, request_id: str) -> None:
        if request_id in self._generating:
            self._link.send(Abort(id=request_id))

    def rerank(self, request_id: str, rank: float) -> None:
        if request_id in self._generating:
            self._link.send(Rerank(id=request_id, rank=rank))

    async def export_kv(self, tokens: Sequence[int], over: KvTransport) -> KvManifest:
        reply = await self._request_kv(ExportKv(id=self._new_id(), tokens=tuple(tokens), over=over))
        assert isinstance(reply, KvExported), reply
        return reply.manifest

    async def import_kv(self, tokens: Sequence[int], manifest: KvManifest) -> int:
        reply = await self._request_kv(
            ImportKv(id=self._new_id(), tokens=tuple(tokens), manifest=manifest)
        )
        assert isinstance(reply, KvImported), reply
        return reply.moved_tokens

    def release_kv(self, export_id: str, *, abandoned: bool = False) -> None:
        self._link.send(ReleaseKv(id=export_id, abandoned=abandoned))

    async def _request_kv(self, command: ExportKv | ImportKv) -> KvExported | KvImported:
        self._raise_if_lost()
        waiter: asyncio.Future[KvExported | KvImported | KvRefused] = self._loop.create_future()
        self._kv_waiters[command.id] = waiter
        self._link.send(command)
        try:
            reply = await waiter
        finally:
            self._kv_waiters.pop(command.id, None)
        if isinstance(reply, KvRefused):
            raise KvError(reply.error)
        return reply

    def _new_id(self) -> str:
        return f"kv{next(self._numbers)}"

    async def suspend(self, *, release: bool = False) -> Suspended:
        return await self._request(Suspend(release=release), Suspended, "suspend")

    def resume(self) -> None:
        self._link.send(Resume())

    async def stage(self, weights: WeightManifest) -> None:
        await self._request(Stage(manifest=weights), Staged, "receive weights")

    async def load(self, weights: WeightManifest | LoadCheckpoint) -> None:
        command = weights if isinstance(weights, LoadCheckpoint) else Load(manifest=weights)
        await self._request(command, Loaded, "load weights")

    async def stats(self) -> EngineStats:
        return (await self._request(Stats(), Sampled, "report its state")).stats

    async def beat(self) -> Beating:
        return await self._request(Beat(), Beating, "answer a heartbeat")

    async def close(self) -> None:
        if not self._lost.done():
            self._link.send(Shutdown())
            await asyncio.wait([self._lost], timeout=CLOSE_S)
        self._link.kill()
        await self._link.wait_closed()

    def kill(self) -> None:
        self._link.kill()

    async def _request(
        self,
        command: Suspend | Stage | Load | LoadCheckpoint | Stats | Beat,
        kind: type[T],
        what: str,
    ) -> T:
        """Send a command, and return its reply, which is of this kind. Raises
        WeightsError if the engine refuses the weights.
        """
        self._raise_if_lost()
        waiter: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        # A cancelled waiter stays queued, so that its reply is not matched to the next
        # one.
        self._waiting[kind].append(waiter)
        self._link.send(command)
        return await self._within(waiter, self._reply_s, what)

    async def _within(self, waiter: asyncio.Future[T], limit_s: float, what: str) -> T:
        try:
            async with asyncio.timeout(limit_s):
                return await waiter
        except TimeoutError:
            self._link.kill()
            raise EngineLostError(
                f"{self._name} did not {what} within {limit_s:g} s and was killed"
            ) from None

    def _raise_if_lost(self) -> None:
        if self._lost.done():
            raise EngineLostError(self._lost.result())

    def _on_reply(self, reply: EngineReply) -> None:
        match reply:
            case Generated(result=result):
                self._on_generated(result)
            case Progress(pieces=deltas):
                for delta in deltas:
                    on_tokens, waiter = (
                        self._on_tokens.get(delta.id),
                        self._generating.get(delta.id),
                    )
                    if on_tokens is not None and waiter is not None and not waiter.done():
                        on_tokens(delta)
            case Suspended() | Staged() | Loaded() | Sampled() | Beating():
                resolve(self._next_waiter(type(reply)), reply)
            case StageFailed(error=error):
                fail(self._next_waiter(Staged), WeightsError(error))
            case LoadFailed(error=error):
                fail(self._next_waiter(Loaded), WeightsError(error))
            case KvExported() | KvImported() | KvRefused():
                self._on_kv_reply(reply)
            case Ready():
                resolve(self._ready, reply)
            case EngineFatal(error=error):
                self._fatal = error
                self._link.kill()
            case _:
                assert_never(reply)

    def _next_waiter(self, kind: type) -> asyncio.Future[Any] | None:
        """Return the oldest waiter for a reply of this kind, if any."""
        return self._waiting[kind].popleft() if self._waiting[kind] else None

    def _on_generated(self, result: GenerateResult) -> None:
        waiter = self._forget(result.id)
        if waiter is None or waiter.done():
            return  # the caller cancelled it, and it is forgotten here
        if result.finish is FinishReason.ERROR:
            waiter.set_exception(EngineError(result.error or "the engine gave no reason"))
        else:
            waiter.set_result(result)

    def _on_kv_reply(self, reply: KvExported | KvImported | KvRefused) -> None:
        waiter = self._kv_waiters.get(reply.id)
        resolve(waiter, reply)
        if waiter is None and isinstance(reply, KvExported):
            self.release_kv(reply.manifest.id)  # the requester has given up

    def _on_lost(self, reason: str) -> None:
        if self._lost.done():
            return
        self._lost.set_result(f"{self._name}: {self._fatal or reason}")
        error = EngineLostError(self._lost.result())
        waiters: list[asyncio.Future[Any]] = [
            self._ready,
            *self._generating.values(),
            *self._kv_waiters.values(),
            *itertools.chain.from_iterable(self._waiting.values()),
        ]
        for waiter in waiters:
            fail(waiter, error)
        self._generating.clear()
        self._on_tokens.clear()
        self._waiting.clear()
        self._kv_waiters.clear()


JOIN_S = 5.0
"""Maximum seconds that the thread gets to finish its current step."""


class LoopLike(Protocol):
    """An engine on a thread (`engine/thread`)."""

    def post(self, command: EngineCommand) -> None:
        """Queue a command, from any thread."""

    def run(self) -> None:
        """Serve until `Shutdown`, on the calling thread."""


MakeLoop = Callable[[EngineSpec, Callable[[EngineReply], None]], LoopLike]


class ThreadLink:
    """`EngineLink` to a loop on a daemon thread.

    After `kill` its replies are ignored, even while it still computes.
    """

    def __init__(
        self,
        spec: EngineSpec,
        make_loop: MakeLoop,
        model_ready: asyncio.Future[None],
        on_reply: Callable[[EngineReply], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_reply, self._on_lost = on_reply, on_lost
        self._killed = False
        self._engine = make_loop(spec, self._from_thread)
        self._thread = threading.Thread(target=self._main, name=f"engine-{spec.id}", daemon=True)
        model_ready.add_done_callback(self._start)

    def send(self, command: EngineCommand) -> None:
        if not self._killed:
            self._engine.post(command)

    def kill(self) -> None:
        if not self._killed:
            self._killed = True
            self._engine.post(Shutdown())
            self._loop.call_soon(self._on_lost, "killed")

    async def wait_closed(self) -> None:
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, JOIN_S)

    def _start(self, _: asyncio.Future[None]) -> None:
        if not self._killed:
            self._thread.start()

    def _main(self) -> None:
        reason = "ended"
        try:
            self._engine.run()
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
        self._call(self._on_lost, reason)

    def _from_thread(self, reply: EngineReply) -> None:
        self._call(self._deliver, reply)

    def _deliver(self, reply: EngineReply) -> None:
        if not self._killed:
            self._on_reply(reply)

    def _call(self, function: Callable[[T], None], argument: T) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(function, argument)


def in_thread(
    spec: EngineSpec, make_loop: MakeLoop, *, model_ready: asyncio.Future[None]
) -> OpenLink:
    """Return how `EngineClient` starts an engine in a thread of this process, once
    `model_ready` is done.
    """
    return lambda on_reply, on_lost: ThreadLink(spec, make_loop, model_ready, on_reply, on_lost)


_decode = decoder_of(EngineReply)


class ProcessLink:
    """`EngineLink` to a process, which receives an `EngineSpec` as its first frame."""

    def __init__(
        self,
        spec: EngineSpec,
        *,
        spawn: Spawn,
        log: Path,
        model_ready: asyncio.Future[None],
        on_reply: Callable[[EngineReply], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._on_reply = on_reply
        self._child = spawn(name=spec.id, log=log, on_frame=self._on_frame, on_gone=on_lost)
        model_ready.add_done_callback(lambda _: self._child.send(encode(spec)))

    @property
    def pid(self) -> int:
        return self._child.pid

    def send(self, command: EngineCommand) -> None:
        self._child.send(encode(command))

    def kill(self) -> None:
        self._child.kill()

    async def wait_closed(self) -> None:
        await self._child.gone()

    def _on_frame(self, payload: bytes) -> None:
        self._on_reply(_decode(payload))


def in_process(
    spec: EngineSpec, *, spawn: Spawn, log: Path, model_ready: asyncio.Future[None]
) -> OpenLink:
    """Return how `EngineClient` starts an engine as a process.

    The process starts at once and takes seconds to import its modules; it loads its
    model once `model_ready` is done.
    """
    return lambda on_reply, on_lost: ProcessLink(
        spec,
        spawn=spawn,
        log=log,
        model_ready=model_ready,
        on_reply=on_reply,
        on_lost=on_lost,
    )
