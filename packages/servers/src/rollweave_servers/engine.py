"""An engine whose tokens come from an inference server: it takes the commands of an
engine's loop and translates them to the server's routes, in the way of the server's
kind.

Requests go through `engine/clients/http`. All other commands are executed one after the
other, in their order, except for staging, which maps and verifies the published bytes
while the server generates. A version that the server refuses before it has changed
anything leaves the former one serving. After any other failure of a control call, the
state of the server is not known: the engine ends with `EngineFatal`, and so does the
server.

KV is exported and imported by the kind's mover, if the engine has one. Ranks that
change later are ignored by servers that do not preempt, and memory is not given back.
"""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn, assert_never

import msgspec

from rollweave.engine.clients.base import OnTokens
from rollweave.engine.clients.http import HttpEngine, HttpSpec
from rollweave.engine.clients.streams import unextended_result
from rollweave.io.extras import USER_CODE_RULE, user_code_is_allowed
from rollweave.io.locked_folders import temporary_folder
from rollweave.schema.errors import ConfigError, EngineError, EngineLostError, WeightsError
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
    ExportKv,
    FinishReason,
    Generated,
    GenerateRequest,
    GenerateResult,
    ImportKv,
    Load,
    LoadCheckpoint,
    Loaded,
    LoadFailed,
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
from rollweave.weights.checkpoint import ModelShape, read_any_shape
from rollweave_servers.control import RefusedError
from rollweave_servers.kinds import ServerParts
from rollweave_servers.process import max_context
from rollweave_servers.published import (
    AdapterMerger,
    HeldWeights,
    published,
    published_model,
)
from rollweave_servers.reports import ProgressReports, UpdateTimes
from rollweave_servers.versions import PER_RANK
from rollweave_servers.vllm_kv import moved

REPLY_S = 10.0
"""Maximum seconds to connect, and for a health check: a server that computes a long
prompt on a busy CPU answers late.
"""

MAX_REQUESTS = 1 << 16
"""Maximum number of requests at a server that preempts: more than the core gives it."""

RANK_PAUSE_S = 0.05
"""Seconds after which a rank is sent again to a server that does not have its request
yet.
"""

END_S = 0.5
"""Maximum seconds from a failed call to the end of the server that caused it."""

Controlling = Suspend | Resume | Load | LoadCheckpoint


class ServerEngine:
    """One engine of a kind. `reply` is called on the event loop's thread."""

    def __init__(
        self, kind: ServerParts, spec: EngineSpec, reply: Callable[[EngineReply], None]
    ) -> None:
        assert spec.server is not None, "an engine without a server"
        self._kind, self._name = kind, kind.name
        self._spec, self._settings, self._reply = spec, spec.server, reply
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_order: asyncio.Queue[Controlling] = asyncio.Queue()
        self._staged: HeldWeights | None = None
        self._staged_from: WeightManifest | None = None
        self._staging: asyncio.Task[None] | None = None
        self._live: set[str] = set()
        self._ranks: dict[str, float] = {}
        """Ranks that are on their way to the server, by request."""
        self._adapters: AdapterMerger | None = None
        self._suspended = False
        self._waiting: dict[str, GenerateRequest] = {}
        self._reports: dict[str, tuple[OnTokens, float]] = {}
        """The function that takes the tokens of each request, and the seconds for which
        they may wait.
        """
        self._progress = ProgressReports(reply)
        self._times, self._updated = UpdateTimes(), False
        self._brought_s = 0.0
        self._asking: asyncio.Task[None] | None = None
        """The last request for the server's metrics, made at `_asked_at`."""
        self._asked_at = 0.0
        self._kv_used: int | None = None
        """Tokens in the KV of the server's requests, by its last answer."""
        self._version, self._label = spec.version, "default"
        self._failed: asyncio.Future[NoReturn] = asyncio.get_running_loop().create_future()

    async def run(self, commands: "asyncio.Queue[EngineCommand]") -> None:
        """Serve until `Shutdown`, or until the server is lost, which is reported as
        `EngineFatal`.
        """
        try:
            if not (self._settings.is_ours or user_code_is_allowed()):
                raise EngineError(f"the server's interpreter and options {USER_CODE_RULE}")
            shape = read_any_shape(Path(self._spec.model))
            if not self._settings.addresses:
                await asyncio.to_thread(
                    self._kind.version,
                    self._settings.python,
                    routes=self._spec.routes,
                    moves_kv=self._settings.moves_kv,
                )
            with temporary_folder(f"rollweave-{self._settings.kind}-") as folder:
                self._folder = folder
                self._server = await self._kind.start(self._spec, shape, folder)
                await self._run(shape, commands)
        except (ConfigError, EngineError, OSError) as error:
            self._reply(EngineFatal(error=str(error)))

    async def _run(self, shape: ModelShape, commands: "asyncio.Queue[EngineCommand]") -> None:
        ended = asyncio.create_task(self._server.ended(), name=self._name)
        serving = asyncio.create_task(self._serve(shape, commands), name="serve")
        try:
            await asyncio.wait([ended, serving], return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                serving.result()
        except (EngineError, OSError) as error:
            self._lost(await self._reason(error, ended))
        else:
            if ended.done():
                self._lost(ended.result())
        finally:
            self._server.kill()
            for task in (serving, *self._tasks):
                task.cancel()
            await asyncio.gather(serving, *self._tasks, return_exceptions=True)
            await ended

    def _lost(self, reason: str) -> None:
        """Report the loss of the server, and before it the tokens that have arrived:
        other engines continue from them.
        """
        self._progress.flush()
        self._reply(EngineFatal(error=reason))

    async def _reason(self, error: Exception, ended: "asyncio.Task[str]") -> str:
        """Return why the server is lost: a call that breaks off because the server has
        ended may fail before that is known.
        """
        await asyncio.wait([ended], timeout=END_S)
        return ended.result() if ended.done() else str(error)

    async def _serve(self, shape: ModelShape, commands: "asyncio.Queue[EngineCommand]") -> None:
        spec, settings, kind = self._spec, self._settings, self._kind
        self._shape = shape
        self._dialect = kind.speak(spec, shape)
        if spec.lora_scale is not None:
            self._adapters = AdapterMerger(Path(spec.model), shape, scale=spec.lora_scale)
        where = HttpSpec(
            name=self._name,
            url=self._server.url,
            vocab=shape.vocab,
            dialect=kind.dialect,
            # one that preempts orders what waits by itself
            slots=MAX_REQUESTS if self._server.preempts else spec.max_slots,
            kv_tokens=spec.kv_tokens,
            token=self._server.token,
        )
        self._control = kind.control(spec, self._server)
        self._mover = kind.mover(spec, shape, self._server)
        if settings.addresses:
            try:
                await self._restore()
            except BaseException:
                await self._close_clients()
                raise
        self._http = HttpEngine(
            where,
            start_s=settings.start_s,
            reply_s=REPLY_S,
            spoken=self._dialect,
            leased=bool(settings.addresses),
        )
        try:
            await self._http.ready()
            await asyncio.to_thread(self._server.on_ready)
            await self._control.connect()
            self._reply(
                Ready(
                    version=spec.version,
                    kv_total_tokens=spec.kv_tokens,
                    max_slots=spec.max_slots,
                    max_context=max_context(spec, shape),
                    stages=True,
                    moves_kv=self._mover is not None,
                    preempts=self._server.preempts,
                )
            )
            handling = self._spawn(self._handle_all(commands), "commands")
            controlling = self._spawn(self._control_all(), "control")
            lost = self._http.lost
            waited: list[asyncio.Future[Any]] = [handling, controlling, lost, self._failed]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            if controlling.done():
                controlling.result()
            if lost.done():
                raise EngineLostError(lost.result())
            handling.result()
        finally:
            await self._http.close()
            await self._close_clients()

    async def _close_clients(self) -> None:
        await self._control.close()
        if self._mover is not None:
            await self._mover.close()

    async def _restore(self) -> None:
        """Give a server that others have used before the model's own weights, since
        they may have left it in any state. Raises EngineError.
        """
        control, label = self._control, str(max(0, self._spec.version))
        await control.connect()
        await control.reset(label)
        try:
            with closing(await asyncio.to_thread(self._hold_model)) as held:
                await control.check(held)
                await control.swap(held, label)
        except WeightsError as error:
            raise EngineError(f"{self._name} cannot have the model's weights: {error}") from error
        await control.resume()

    # Commands

    async def _handle_all(self, commands: "asyncio.Queue[EngineCommand]") -> None:
        while not isinstance(command := await commands.get(), Shutdown):
            self._handle(command)

    def _handle(self, command: EngineCommand) -> None:
        match command:
            case Add(request=request, report_s=report_s):
                self._add(request, report_s)
            case Abort(id=id):
                self._abort(id)
            case Suspend() | Resume() | Load() | LoadCheckpoint():
                self._in_order.put_nowait(command)
            case Stage(manifest=manifest):
                self._staging = self._spawn(self._stage(manifest, self._staging), "stage")
            case Stats():
                self._spawn(self._sample(), "stats")
            case Beat():
                self._beat()
            case ExportKv() | ImportKv():
                self._spawn(self._move(command), "kv")
            case ReleaseKv(id=id, abandoned=abandoned):
                if self._mover is not None and not abandoned:
                    self._mover.release(id)
            case Rerank(id=id, rank=rank):
                self._rerank(id, rank)
            case Shutdown():
                raise AssertionError("the caller ends")
            case _:
                assert_never(command)

    def _add(self, request: GenerateRequest, report_s: float | None) -> None:
        """Send a request, but not to a paused server, where an abort may not find
        it.
        """
        self._live.add(request.id)
        if report_s is not None:
            self._reports[request.id] = self._progress.of(request.id, report_s), report_s
        if self._suspended:
            self._waiting[request.id] = request
        else:
            self._send(request)

    def _abort(self, request_id: str) -> None:
        request = self._waiting.pop(request_id, None)
        if request is None:
            self._http.abort(request_id)
            return
        self._forget(request_id)
        self._reply(Generated(result=unextended_result(request, FinishReason.ABORTED)))

    def _rerank(self, request_id: str, rank: float) -> None:
        """Change a rank, on a server that preempts; others take a priority with the
        request only.
        """
        if not math.isfinite(rank):
            return
        if (request := self._waiting.get(request_id)) is not None:
            self._waiting[request_id] = msgspec.structs.replace(request, rank=rank)
        elif self._server.preempts and request_id in self._live:
            is_sending = request_id in self._ranks
            self._ranks[request_id] = rank
            if not is_sending:
                self._spawn(self._send_rank(request_id), "rank")

    async def _send_rank(self, request_id: str) -> None:
        """Send the newest rank of a request until the server has taken it, or the
        request is over: requests and ranks come by different connections.
        """
        while request_id in self._live:
            rank, id = self._ranks[request_id], self._http.wire_id(request_id)
            taken = id is not None and await self._control.rerank(id, -round(rank * PER_RANK))
            if taken and self._ranks[request_id] == rank:
                break
            if not taken:
                await asyncio.sleep(RANK_PAUSE_S)
        del self._ranks[request_id]

    def _send(self, request: GenerateRequest) -> None:
        on_tokens, report_s = self._reports.get(request.id, (None, STREAM_S))
        answer = self._http.generate(request, on_tokens, report_s=report_s)
        answer.add_done_callback(lambda done: self._answered(request.id, done))

    def _answered(self, request_id: str, answer: "asyncio.Future[GenerateResult]") -> None:
        error = None if answer.cancelled() else answer.exception()
        if isinstance(error, EngineLostError):
            return  # the reason is reported for all, after the tokens that have arrived
        self._forget(request_id)
        if answer.cancelled():
            return
        if error is None:
            result = answer.result()
        else:
            result = GenerateResult.empty(request_id, FinishReason.ERROR, str(error))
        self._reply(Generated(result=result))

    def _forget(self, request_id: str) -> None:
        self._live.discard(request_id)
        self._reports.pop(request_id, None)
        self._progress.drop(request_id)

    async def _move(self, command: ExportKv | ImportKv) -> None:
        self._reply(await moved(self._mover, command, name=self._name))

    async def _sample(self) -> None:
        stats, gauges = await self._http.stats(), await self._control.gauges()
        stats = msgspec.structs.replace(
            stats,
            version=self._version,
            running=int(gauges.get("running", stats.running)),
            waiting=int(gauges.get("waiting", stats.waiting)) + len(self._waiting),
            kv_used_tokens=round(gauges.get("kv_share", 0.0) * stats.kv_total_tokens),
            preemptions=int(gauges.get("preemptions", 0)),
        )
        self._reply(Sampled(stats=stats))

    def _beat(self) -> None:
        """Answer a heartbeat. A server that hangs does not answer a request for its
        metrics, of which one is always under way.
        """
        now = asyncio.get_running_loop().time()
        if self._asking is None or self._asking.done():
            self._asking, self._asked_at = self._spawn(self._ask(), "heartbeat"), now
        doing, for_s = "a request for the server's metrics", now - self._asked_at
        self._reply(Beating(doing=doing, for_s=for_s, kv_used=self._kv_used))

    async def _ask(self) -> None:
        share = (await self._control.gauges()).get("kv_share")
        self._kv_used = None if share is None else round(share * self._spec.kv_tokens)

    async def _control_all(self) -> NoReturn:
        while True:
            command = await self._in_order.get()
            match command:
                case Suspend(release=release):
                    if release:
                        raise EngineError(f"{self._name} cannot give back its memory")
                    await self._suspend()
                case Resume():
                    await self._resume()
                case Load(manifest=manifest):
                    await self._load_published(manifest)
                case LoadCheckpoint():
                    await self._load_checkpoint(command)
                case _:
                    assert_never(command)

    async def _suspend(self) -> None:
        if not self._suspended:
            await self._pause()
            self._suspended = True
        self._progress.flush()
        self._reply(Suspended(in_flight=len(self._live)))

    async def _resume(self) -> None:
        if self._suspended:
            await self._continue()
            self._suspended = False
            waiting, self._waiting = self._waiting, {}
            for request in waiting.values():
                self._send(request)

    async def _pause(self) -> None:
        self._times, self._updated = UpdateTimes(), False
        with self._times.measured("pause"):
            if self._mover is not None:
                await self._mover.pause()
            await self._control.pause()

    async def _continue(self) -> None:
        with self._times.measured("resume"):
            await self._control.resume()
        if self._mover is not None:
            self._mover.resume()
        if self._updated:
            self._times.report(self._version)

    # Weights

    async def _stage(self, manifest: WeightManifest, former: asyncio.Task[None] | None) -> None:
        """Map and verify a version while the server generates."""
        if former is not None:
            await asyncio.wait([former])
        self._drop_staged()
        key = {"version": manifest.version, "publication_id": manifest.publication_id}
        try:
            self._staged = await asyncio.to_thread(self._hold, manifest)
            self._staged_from = manifest
        except WeightsError as error:
            self._reply(StageFailed(**key, error=str(error)))
        else:
            self._reply(Staged(**key))

    def _drop_staged(self) -> None:
        if self._staged is not None:
            self._staged.close()
            self._staged = None

    async def _load_published(self, manifest: WeightManifest) -> None:
        if self._staging is not None:
            await asyncio.wait([self._staging])
        started = time.monotonic()
        try:
            if self._staged is None or self._staged_from != manifest:
                self._drop_staged()
                self._staged = await asyncio.to_thread(self._hold, manifest)
                self._staged_from = manifest
            await self._swap(self._staged)
        except WeightsError as error:
            self._reply(LoadFailed(version=manifest.version, error=str(error)))
        else:
            self._loaded(manifest.version, started)
        finally:
            self._drop_staged()

    async def _load_checkpoint(self, command: LoadCheckpoint) -> None:
        started = time.monotonic()
        try:
            with closing(await asyncio.to_thread(self._hold_checkpoint, command)) as held:
                await self._swap(held)
        except (WeightsError, OSError, ValueError) as error:
            self._reply(LoadFailed(version=command.version, error=str(error)))
        else:
            self._loaded(command.version, started)

    def _loaded(self, version: int, started: float) -> None:
        load_s = time.monotonic() - started
        # servers do not say how many tokens they compute again
        self._reply(Loaded(version=version, load_s=load_s, recompute_tokens=0))

    def _hold(self, manifest: WeightManifest) -> HeldWeights:
        """Verify a version and keep it; adapters are first added to the model's
        weights.
        """
        started = time.monotonic()
        if self._adapters is None:
            held = self._kind.hold(self._spec, manifest, self._shape, self._folder)
        else:
            with self._adapters.merged(manifest) as weights:
                held = self._kind.hold(self._spec, weights.manifest, self._shape, self._folder)
        self._brought_s = time.monotonic() - started
        return held

    def _hold_checkpoint(self, command: LoadCheckpoint) -> HeldWeights:
        with published(command) as publication:
            return self._hold(publication.manifest)

    def _hold_model(self) -> HeldWeights:
        with published_model(Path(self._spec.model), self._shape) as publication:
            return self._kind.hold(self._spec, publication.manifest, self._shape, self._folder)

    async def _swap(self, held: HeldWeights) -> None:
        """Make the server serve these weights.

        Raises WeightsError if it has refused them, and nothing has changed.
        """
        control, manifest = self._control, held.manifest
        if not self._suspended:
            await self._pause()
        self._times.seconds["bring"] = self._brought_s
        try:
            with self._times.measured("verify"):
                await control.check(held)
        except RefusedError as error:
            await control.give_up(self._label)
            if not self._suspended:
                await self._continue()
            raise WeightsError(f"weights version {manifest.version}: {error}") from error
        self._dialect.changed(manifest.version, manifest.publication_id)
        self._version, self._label = manifest.version, str(manifest.version)
        if self._mover is not None:
            self._mover.publication_id = manifest.publication_id
        with self._times.measured("swap"):
            await control.swap(held, self._label)
        self._updated = True
        if not self._suspended:
            await self._continue()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and not self._failed.done():
            self._failed.set_exception(task.exception() or EngineError("failed"))
