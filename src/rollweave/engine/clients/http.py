"""An engine behind HTTP. It only `Generates`: its weights and KV belong to its owner.

Invariants: every call is answered exactly once or raises, and all raise
`EngineLostError` once the engine is lost (see `transport.py`); every result is checked
before it is used (`dialects.check`), and log-probs are refused that do not match the
request's sampling (`probe.py`); a request that is cancelled, aborted or out of time
leaves no connection behind, which stops the generation at any server that watches its
clients.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import uuid4

import msgspec

from rollweave.engine.clients.base import OnTokens, duplicate_id, fail, resolve
from rollweave.engine.clients.dialects import Dialect, check, dialect
from rollweave.engine.clients.probe import (
    Logprobs,
    logprobs_kind,
    objection,
    probes,
)
from rollweave.engine.clients.responses import ResponseError, parse
from rollweave.engine.clients.streams import (
    REPORT_TOKENS,
    StreamedAnswer,
    StreamingDialect,
    merged_result,
    moved_delta,
    remaining_request,
    unextended_result,
)
from rollweave.engine.clients.transport import (
    BODY_S,
    SILENCE_S,
    BusyError,
    OnRetry,
    StatusError,
    Transport,
)
from rollweave.engine.matchers import CANNOT, GrammarCheck
from rollweave.schema.address import Hosts, parse_address
from rollweave.schema.base import Struct
from rollweave.schema.errors import EngineError, EngineLostError
from rollweave.schema.serving import (
    STREAM_S,
    DialectName,
    EngineStats,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Ready,
)

T = TypeVar("T")

DONE = b"[DONE]"
"""The event after the last part of a streamed answer."""

ABORT_S = 2.0
"""Maximum seconds that a server gets to answer an aborted request with the tokens so
far, before we disconnect.
"""


class HttpSpec(Struct, frozen=True, kw_only=True):
    """The address of an engine, and what it cannot be asked.

    `vocab` is the size of the model's vocabulary. `slots` bounds the concurrent
    requests, `kv_tokens` is for planning; a Rollweave server reports both itself.
    `token` is the server's bearer token, if it requires one.
    """

    name: str
    url: str
    vocab: int
    dialect: DialectName = "rollweave"
    model: str = ""
    slots: int = 64
    kv_tokens: int = 1 << 20
    token: str = ""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "url", parse_address(self.url, field="url"))
        for field in ("vocab", "slots", "kv_tokens"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")


@dataclass(slots=True)
class _Call:
    """A request in progress.

    `wire_id` is its id at the server: unique, and as long as all others. `stop` holds
    the reason to end it early.
    """

    wire_id: str
    answer: asyncio.Future[GenerateResult]
    stop: asyncio.Future[FinishReason]
    task: asyncio.Task[None] | None = None
    sent: bool = False
    on_tokens: OnTokens | None = None
    is_read: bool = False  # a client reads the tokens while they arrive
    streamed: StreamedAnswer | None = None


class HttpEngine:
    """`start_s` bounds `ready`; `reply_s` bounds connecting, a health check and a
    sample.

    `check_s` is the time between health checks, `body_s` bounds the time between an
    answer's first byte and its last, `silence_s` that between two parts of a streamed
    one. `on_retry` is called after each failed attempt to reach a server that has not
    answered yet. Connects to `hosts` only; None admits all.
    """

    def __init__(
        self,
        spec: HttpSpec,
        *,
        start_s: float = 60.0,
        reply_s: float = 2.0,
        check_s: float = 5.0,
        body_s: float = BODY_S,
        on_retry: OnRetry = lambda reason, tries, next_s: None,
        hosts: Hosts | None = None,
        silence_s: float = SILENCE_S,
        spoken: StreamingDialect | None = None,
        leased: bool = False,
    ) -> None:
        """`spoken` takes the place of the dialect that `spec` names, and the server's
        answers are streamed if their tokens are to be reported. `leased` is as in
        `Transport`.
        """
        self._spec, self._start_s, self._reply_s, self._check_s = spec, start_s, reply_s, check_s
        self._name, self._on_retry = spec.name, on_retry
        self._dialect: Dialect = spoken or dialect(spec.dialect, model=spec.model)
        self._streaming = spoken
        self._loop = asyncio.get_running_loop()
        self._wire = Transport(
            spec.name,
            spec.url,
            token=spec.token,
            hosts=hosts,
            reply_s=reply_s,
            body_s=body_s,
            silence_s=silence_s,
            leased=leased,
        )
        self._ready: asyncio.Future[Ready] = self._loop.create_future()
        self._calls: dict[str, _Call] = {}
        self._slots = asyncio.Semaphore(spec.slots)
        self._grammars = GrammarCheck()
        self._logprobs = Logprobs.UNKNOWN
        self._started_at = time.monotonic()
        self._prompt_tokens = self._cached_tokens = self._output_tokens = self._version = (
            self._running
        ) = 0
        self._watcher = self._loop.create_task(self._watch(), name=f"watch {spec.name}")
        self.lost.add_done_callback(lambda _: self._fail_all())

    @property
    def lost(self) -> asyncio.Future[str]:
        return self._wire.lost

    async def ready(self) -> Ready:
        """Wait until the server is healthy and has answered a probe. A server that
        cannot serve training is lost at once.

        The version is that of its current weights: 0 if the server reports none.
        """
        return await asyncio.shield(self._ready)

    def generate(
        self,
        request: GenerateRequest,
        on_tokens: OnTokens | None = None,
        *,
        report_s: float = STREAM_S,
    ) -> asyncio.Future[GenerateResult]:
        """Generate as in the protocol, except that connections race: the order of
        requests is not kept.

        Tokens are reported by servers with a `StreamingDialect` only, as soon as they
        arrive: one by one with a `report_s` of at most `STREAM_S`, else in parts of
        `REPORT_TOKENS`. Servers other than Rollweave's resume a turn as described in
        `streams.py`.
        """
        call = _Call(
            uuid4().hex,
            self._loop.create_future(),
            self._loop.create_future(),
            on_tokens=on_tokens,
            is_read=report_s <= STREAM_S,
        )
        if self.lost.done():
            call.answer.set_exception(EngineLostError(self.lost.result()))
        elif request.id in self._calls:
            call.answer.set_exception(duplicate_id(request.id))
        else:
            self._calls[request.id] = call
            call.task = self._loop.create_task(
                self._serve(call, request), name=f"{self._name} {request.id}"
            )
            call.answer.add_done_callback(lambda _: self._forget(request.id, call))
        return call.answer

    def abort(self, request_id: str) -> None:
        call = self._calls.get(request_id)
        if call is not None:
            resolve(call.stop, FinishReason.ABORTED)

    def wire_id(self, request_id: str) -> str | None:
        """Return the id that the server has for a request; None if it has none."""
        call = self._calls.get(request_id)
        return call.wire_id if call is not None and call.sent else None

    async def stats(self) -> EngineStats:
        """Return the server's sample if it provides one, else the requests and tokens
        of this client, without KV.
        """
        self._wire.raise_if_lost()
        if self._dialect.stats_path:
            return parse(await self._wire.get(self._dialect.stats_path), EngineStats)
        return EngineStats(
            version=self._version,
            running=self._running,
            waiting=len(self._calls) - self._running,
            kv_used_tokens=0,
            kv_total_tokens=self._ready.result().kv_total_tokens if self._ready.done() else 0,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            output_tokens=self._output_tokens,
            uptime_s=time.monotonic() - self._started_at,
        )

    async def close(self) -> None:
        """Close this client. The server belongs to its owner."""
        tasks = [call.task for call in self._calls.values() if call.task is not None]
        self.kill()
        await asyncio.gather(self._watcher, *tasks, return_exceptions=True)
        await self._wire.wait_closed()

    def kill(self) -> None:
        self._wire.mark_lost("killed")
        self._watcher.cancel()
        self._wire.disconnect()
        self._grammars.close()

    # One request

    async def _serve(self, call: _Call, request: GenerateRequest) -> None:
        """Answer the call in every case."""
        work = self._loop.create_task(
            self._generate(call, request), name=f"{self._name} {request.id} at work"
        )
        try:
            either: set[asyncio.Future[Any]] = {work, call.stop}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and call.sent:
                await self._request_abort(call, work)
            if work.done():
                result = self._fitting(request, work)
                if call.stop.done() and result.finish is FinishReason.ABORTED:
                    result = msgspec.structs.replace(result, finish=call.stop.result())
            else:
                result = self._reported(call, request, call.stop.result())
            resolve(call.answer, result)
        except EngineError as error:
            fail(call.answer, error)
        except (
            Exception
        ) as error:  # a bug of ours must fail this request, not leave it waiting forever
            fail(call.answer, EngineError(f"{self._name}: {type(error).__name__}: {error}"))
        finally:
            work.cancel()  # disconnects
            await asyncio.wait({work})

    def _fitting(
        self, request: GenerateRequest, work: asyncio.Task[GenerateResult]
    ) -> GenerateResult:
        """Return the answer, or `FinishReason.REFUSED` if the server cannot meet the
        constraint.
        """
        try:
            return work.result()
        except StatusError as error:
            if error.status != 400 or request.sampling.constraint is None:
                raise
            return GenerateResult.empty(request.id, FinishReason.REFUSED, str(error))

    async def _request_abort(self, call: _Call, work: asyncio.Task[GenerateResult]) -> None:
        """Ask the server to answer now with the tokens so far, if it can, and give it
        time to do so.
        """
        message = self._dialect.abort(call.wire_id)
        if message is None:
            return
        with contextlib.suppress(EngineError, BusyError, TimeoutError):
            async with asyncio.timeout(self._reply_s):
                await self._wire.post_once(*message)
        await asyncio.wait({work}, timeout=ABORT_S)

    async def _generate(self, call: _Call, request: GenerateRequest) -> GenerateResult:
        """Return the checked answer to a request, with the caller's id, and with our
        times if the server reports none.
        """
        started = self._loop.time()
        await asyncio.shield(self._ready)
        if why := objection(self._logprobs, request.sampling) or self._token_error(request):
            raise EngineError(f"{self._name}: {why}")
        if why := await self._constraint_error(request):
            return GenerateResult.empty(request.id, FinishReason.REFUSED, f"{CANNOT}{why}")
        rest = request if self._dialect.resumes else remaining_request(request)
        if isinstance(rest, FinishReason):
            return unextended_result(request, rest)
        starts_over = request.resumed is not None and len(rest.tokens) == len(request.tokens)
        wired = msgspec.structs.replace(rest, id=call.wire_id)
        async with self._slots:
            self._running += 1
            budget = None
            if rest.budget_s and not self._dialect.keeps_time:
                budget = self._loop.call_later(rest.budget_s, resolve, call.stop, FinishReason.TIME)
            try:
                call.sent = True
                if call.on_tokens is None or self._streaming is None or starts_over:
                    result, took_s = await self._post_checked(wired)
                else:
                    result, took_s = await self._stream_checked(
                        call, request, wired, self._streaming
                    )
            finally:
                self._running -= 1
                if budget is not None:
                    budget.cancel()
        self._prompt_tokens += len(request.tokens)
        self._cached_tokens += result.cached_tokens
        self._output_tokens += len(result.tokens) - result.resumed_tokens
        if result.versions:
            self._version = result.versions[-1].version
        generate_s = result.generate_s if self._dialect.keeps_time else took_s
        before_s = (
            request.resumed.generate_s
            if result.resumed_tokens and request.resumed is not None
            else 0.0
        )
        queue_s = max(0.0, self._loop.time() - started - (generate_s - before_s))
        result = msgspec.structs.replace(
            result, id=request.id, queue_s=queue_s, generate_s=generate_s
        )
        return merged_result(request, result) if len(rest.tokens) > len(request.tokens) else result

    def _token_error(self, request: GenerateRequest) -> str:
        """Return what is wrong with the request's token ids, or "".

        A token id beyond the vocabulary crashes vLLM with all of its requests.
        """
        resumed = request.resumed.tokens if request.resumed is not None else ()
        tokens, vocab = (*request.tokens, *resumed, *request.sampling.allowed), self._spec.vocab
        if request.tokens and 0 <= min(tokens) <= max(tokens) < vocab:
            return ""
        if not request.tokens:
            return "tokens must have at least one token, got none"
        return f"tokens must be in [0, {vocab}), got {min(tokens)} to {max(tokens)}"

    async def _constraint_error(self, request: GenerateRequest) -> str:
        """Return why the request's text cannot be constrained, or ""."""
        constraint = request.sampling.constraint
        if constraint is None or not self._dialect.checks_grammars:
            return ""
        return await self._grammars.why_not(constraint)

    async def _post_checked(self, request: GenerateRequest) -> tuple[GenerateResult, float]:
        """Return the checked answer, and the seconds that it took."""
        body, took_s = await self._wire.post(
            self._dialect.generate_path, self._dialect.encode(request)
        )
        try:
            result = self._dialect.decode(request, body)
            check(request, result, vocab=self._spec.vocab)
        except ResponseError as error:
            raise ResponseError(f"{self._name}: {error}") from error
        return result, took_s

    async def _stream_checked(
        self,
        call: _Call,
        request: GenerateRequest,
        wired: GenerateRequest,
        streaming: StreamingDialect,
    ) -> tuple[GenerateResult, float]:
        """Return the checked answer to `wired`, which is what remains of `request`, and
        the seconds that it took. Tokens are reported while they arrive.

        A turn that no client reads may be silent for any time, as with an answer in one
        piece: its server may preempt it, and its parts are long.
        """
        body = streaming.encode_streamed(wired, every=1 if call.is_read else REPORT_TOKENS)
        answer = StreamedAnswer(streaming.parts(wired), wired, vocab=self._spec.vocab)
        call.streamed = answer

        def on_event(event: bytes, took_s: float) -> None:
            delta = answer.read(event) if event != DONE else None
            if delta is not None and call.on_tokens is not None and not call.answer.done():
                call.on_tokens(moved_delta(request, delta, took_s))

        try:
            whole, took_s = await self._wire.stream(
                streaming.generate_path, body, on_event, patient=not call.is_read
            )
            result = streaming.decode(wired, whole) if whole else answer.result()
            check(wired, result, vocab=self._spec.vocab)
        except ResponseError as error:
            raise ResponseError(f"{self._name}: {error}") from error
        return result, took_s

    def _reported(
        self, call: _Call, request: GenerateRequest, finish: FinishReason
    ) -> GenerateResult:
        """Return a result with the tokens that were reported, and those that the
        request resumes.
        """
        if call.streamed is None:
            return unextended_result(request, finish)
        return merged_result(request, call.streamed.so_far(finish, id=request.id))

    # From the first health check to the loss

    async def _watch(self) -> None:
        try:
            async with asyncio.timeout(self._start_s):
                ready = await self._start()
        except TimeoutError:
            self._wire.mark_lost(f"was not ready within {self._start_s:g} s: {self._wire.trouble}")
            return
        except EngineLostError:
            return
        except EngineError as error:
            self._wire.mark_lost(f"cannot be used in the dialect {self._spec.dialect}: {error}")
            return
        resolve(self._ready, ready)
        while not self.lost.done():
            await asyncio.sleep(self._check_s)
            await self._wire.confirm_health()

    async def _start(self) -> Ready:
        """Wait until the server is healthy, and probe it."""
        await self._wire.wait_healthy(self._on_retry)
        first, second = probes(self._spec.vocab)
        greedy, _ = await self._post_checked(first)
        hot, _ = await self._post_checked(second)
        self._logprobs = logprobs_kind(greedy, hot)
        slots, kv_tokens = self._spec.slots, self._spec.kv_tokens
        if self._dialect.ready_path:
            ready = parse(await self._wire.get(self._dialect.ready_path), Ready)
            return msgspec.structs.replace(
                ready,
                version=max(0, ready.version),
                max_slots=min(slots, ready.max_slots),
                stages=False,
                moves_kv=False,
            )
        self._version = greedy.versions[-1].version if greedy.versions else 0
        return Ready(
            version=self._version,
            kv_total_tokens=kv_tokens,
            max_slots=slots,
            max_context=kv_tokens,
            moves_kv=False,
            preempts=False,
        )

    def _fail_all(self) -> None:
        """Fail all waiters, because the engine is lost."""
        error = EngineLostError(self.lost.result())
        fail(self._ready, error)
        for call in self._calls.values():
            fail(call.answer, error)

    def _forget(self, request_id: str, call: _Call) -> None:
        """End the work for a call that was answered or cancelled."""
        del self._calls[request_id]
        if call.task is not None:
            call.task.cancel()
