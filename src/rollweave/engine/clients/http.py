"""An engine that is somewhere else, behind HTTP: `EngineBackend` but for weights and
KV, which are its owner's.

Invariants: every call is answered exactly once or raises, and all raise
`EngineLostError` once the engine is lost (`transport.py` says when); nothing of a
result is believed before it is checked (`dialects.check`), nor are log-probs that are
not those of the request's sampling (`probe.py`); a request that is cancelled, aborted
or out of time leaves no connection behind, which stops the generation at any server
that watches its clients.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar
from uuid import uuid4

import msgspec

from rollweave.engine.clients.base import OnTokens
from rollweave.engine.clients.dialects import check, dialect
from rollweave.engine.clients.probe import (
    Logprobs,
    exact_probe,
    inexactness,
    kind_of,
    objection,
    probes,
)
from rollweave.engine.clients.responses import ResponseError, parse
from rollweave.engine.clients.resuming import merged_result, remaining_request, unextended_result
from rollweave.engine.clients.transport import BODY_S, BusyError, OnRetry, Transport
from rollweave.schema.address import Hosts, parse_address
from rollweave.schema.base import Struct
from rollweave.schema.errors import EngineError, EngineLostError, KvError, WeightsError
from rollweave.schema.serving import (
    DialectName,
    EngineStats,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    KvManifest,
    KvTransport,
    LoadCheckpoint,
    Ready,
    Suspended,
)
from rollweave.schema.weights import WeightManifest

T = TypeVar("T")

Reference = Callable[[Sequence[int], Sequence[int]], Awaitable[Sequence[float] | None]]
"""Returns the log-probs at temperature 1 that the checkpoint gives the second tokens
after the first; None if unknown.
"""

ABORT_S = 2.0
"""Seconds that a server has to answer an aborted request with what there is, before we
hang up.
"""


class HttpSpec(Struct, frozen=True, kw_only=True):
    """Where an engine is, and what cannot be asked of it.

    `vocab` is the size of the model's vocabulary. `slots` bounds the requests under
    way, `kv_tokens` is for planning; our own server reports both itself. `token` is the
    server's bearer token, if it requires one. `text_only` admits a server without token
    ids, for evaluation alone.
    """

    name: str
    url: str
    vocab: int
    dialect: DialectName = "rollweave"
    model: str = ""
    slots: int = 64
    kv_tokens: int = 1 << 20
    text_only: bool = False
    token: str = ""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "url", parse_address(self.url, field="url"))
        for field in ("vocab", "slots", "kv_tokens"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")


@dataclass(slots=True)
class _Call:
    """A request under way.

    `wire_id` is its id at the server: fresh, and as long as all others. `stop` says why
    it must end.
    """

    wire_id: str
    answer: asyncio.Future[GenerateResult]
    stop: asyncio.Future[FinishReason]
    task: asyncio.Task[None] | None = None
    sent: bool = False


class HttpEngine:
    """`EngineBackend`. `start_s` bounds `ready`; `reply_s` connecting, a health check
    and a sample.

    `check_s` is the time between health checks, `body_s` bounds the time between an
    answer's first byte and its last. `encode_text` makes tokens of the text of a server
    that is `text_only`. `failed` is called after each failed try to reach a server that
    has not answered yet. With `reference`, `noted` is called if the server's log-probs
    are not those of the checkpoint in float32. Connects to `hosts` only; None: to any.
    """

    def __init__(
        self,
        spec: HttpSpec,
        *,
        start_s: float = 60.0,
        reply_s: float = 2.0,
        check_s: float = 5.0,
        body_s: float = BODY_S,
        encode_text: Callable[[str], Sequence[int]] | None = None,
        failed: OnRetry = lambda reason, tries, next_s: None,
        reference: Reference | None = None,
        noted: Callable[[str], None] = lambda text: None,
        hosts: Hosts | None = None,
    ) -> None:
        if spec.text_only is not (encode_text is not None):
            raise ValueError("encode_text must be given exactly where spec.text_only is true")
        self._spec, self._start_s, self._reply_s, self._check_s = spec, start_s, reply_s, check_s
        self._name, self._failed = spec.name, failed
        self._reference, self._noted = reference, noted
        self._dialect = dialect(spec.dialect, model=spec.model, encode_text=encode_text)
        self._loop = asyncio.get_running_loop()
        self._wire = Transport(
            spec.name, spec.url, token=spec.token, hosts=hosts, reply_s=reply_s, body_s=body_s
        )
        self._ready: asyncio.Future[Ready] = self._loop.create_future()
        self._calls: dict[str, _Call] = {}
        self._slots = asyncio.Semaphore(spec.slots)
        self._logprobs = Logprobs.UNKNOWN
        self._born = time.monotonic()
        self._prompt_tokens = self._cached_tokens = self._output_tokens = self._version = (
            self._running
        ) = 0
        self._life = self._loop.create_task(self._live(), name=f"watch {spec.name}")
        self.lost.add_done_callback(lambda _: self._fail_all())

    @property
    def lost(self) -> asyncio.Future[str]:
        return self._wire.lost

    @property
    def logprobs(self) -> Logprobs:
        """What the server's log-probs are of, as its probe told."""
        return self._logprobs

    async def ready(self) -> Ready:
        """Wait until the server is healthy and has answered a probe. A server that
        cannot serve training is lost at once.

        Its version is that of weights which are there already: 0 where the server tells
        none.
        """
        return await asyncio.shield(self._ready)

    def generate(
        self, request: GenerateRequest, heard: OnTokens | None = None
    ) -> asyncio.Future[GenerateResult]:
        """As the protocol says, but connections race: nothing is promised of the order
        of requests.

        Nothing is heard of a turn before it ends. Servers other than ours go on with
        one that was unextended_result as `resuming.py` says.
        """
        call = _Call(uuid4().hex, self._loop.create_future(), self._loop.create_future())
        if self.lost.done():
            call.answer.set_exception(EngineLostError(self.lost.result()))
        elif request.id in self._calls:
            call.answer.set_exception(
                EngineError(
                    f"request ids must be unique among live requests, got {request.id} again"
                )
            )
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
            _give(call.stop, FinishReason.ABORTED)

    def rerank(self, request_id: str, rank: float) -> None:
        """Nothing: a rank is said with the request, or never."""

    async def stats(self) -> EngineStats:
        """The server's own sample where it gives one; else what passed through here,
        with no word of its KV.
        """
        self._wire.must_live()
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
            uptime_s=time.monotonic() - self._born,
        )

    async def suspend(self) -> Suspended:
        self._not_ours(EngineError, "suspended")

    def resume(self) -> None:
        """Nothing: it was never suspended."""

    async def load(self, weights: WeightManifest | LoadCheckpoint) -> None:
        self._not_ours(WeightsError, "given weights")

    async def export_kv(self, tokens: Sequence[int], over: KvTransport) -> KvManifest:
        self._not_ours(KvError, "asked for its KV")

    async def import_kv(self, tokens: Sequence[int], manifest: KvManifest) -> int:
        self._not_ours(KvError, "given KV")

    def release_kv(self, export_id: str) -> None:
        """Nothing: none was exported."""

    async def close(self) -> None:
        """End our side. The server is its owner's."""
        tasks = [call.task for call in self._calls.values() if call.task is not None]
        self.kill()
        await asyncio.gather(self._life, *tasks, return_exceptions=True)
        await self._wire.closed()

    def kill(self) -> None:
        self._wire.lose("killed")
        self._life.cancel()
        self._wire.hang_up()

    # One request.

    async def _serve(self, call: _Call, request: GenerateRequest) -> None:
        """Answer the call, whatever happens."""
        work = self._loop.create_task(
            self._continued(call, request), name=f"{self._name} {request.id} at work"
        )
        try:
            either: set[asyncio.Future[Any]] = {work, call.stop}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and call.sent:
                await self._hurry(call, work)
            if work.done():
                result = work.result()
                if call.stop.done() and result.finish is FinishReason.ABORTED:
                    result = msgspec.structs.replace(result, finish=call.stop.result())
            else:
                result = unextended_result(request, call.stop.result())
            _give(call.answer, result)
        except EngineError as error:
            _fail(call.answer, error)
        except (
            Exception
        ) as error:  # a bug of ours is this request's failure, not a request that waits for ever
            _fail(call.answer, EngineError(f"{self._name}: {type(error).__name__}: {error}"))
        finally:
            work.cancel()  # which hangs up
            await asyncio.wait({work})

    async def _hurry(self, call: _Call, work: asyncio.Task[GenerateResult]) -> None:
        """Have the server answer now with what it has, if it can; it gets a while to do
        so.
        """
        asked = self._dialect.abort(call.wire_id)
        if asked is None:
            return
        with contextlib.suppress(EngineError, BusyError, TimeoutError):
            async with asyncio.timeout(self._reply_s):
                await self._wire.post_once(*asked)
        await asyncio.wait({work}, timeout=ABORT_S)

    async def _continued(self, call: _Call, request: GenerateRequest) -> GenerateResult:
        """The checked answer to a request, with the caller's id, and our times where
        the server tells none.
        """
        asked = self._loop.time()
        await asyncio.shield(self._ready)
        if why := objection(self._logprobs, request.sampling) or self._beyond(request):
            raise EngineError(f"{self._name}: {why}")
        rest = (
            request
            if self._dialect.resumes
            else remaining_request(request, text_only=self._spec.text_only)
        )
        if isinstance(rest, FinishReason):
            return unextended_result(request, rest)
        wired = msgspec.structs.replace(rest, id=call.wire_id)
        async with self._slots:
            self._running += 1
            budget = None
            if rest.budget_s and not self._dialect.keeps_time:
                budget = self._loop.call_later(rest.budget_s, _give, call.stop, FinishReason.TIME)
            try:
                call.sent = True
                result, took_s = await self._asked(wired)
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
        queue_s = max(0.0, self._loop.time() - asked - (generate_s - before_s))
        result = msgspec.structs.replace(
            result, id=request.id, queue_s=queue_s, generate_s=generate_s
        )
        return merged_result(request, result) if len(rest.tokens) > len(request.tokens) else result

    def _beyond(self, request: GenerateRequest) -> str:
        """What is wrong with the request's token ids, or "".

        One beyond the vocabulary kills vLLM with all that it runs.
        """
        resumed = request.resumed.tokens if request.resumed is not None else ()
        tokens, vocab = (*request.tokens, *resumed, *request.sampling.allowed), self._spec.vocab
        if request.tokens and 0 <= min(tokens) <= max(tokens) < vocab:
            return ""
        if not request.tokens:
            return "tokens must have at least one token, got none"
        return f"tokens must be in [0, {vocab}), got {min(tokens)} to {max(tokens)}"

    async def _asked(self, request: GenerateRequest) -> tuple[GenerateResult, float]:
        """The checked answer, and the seconds that it took."""
        body, took_s = await self._wire.post(
            self._dialect.generate_path, self._dialect.encode(request)
        )
        try:
            result = self._dialect.decode(request, body)
            check(request, result, vocab=self._spec.vocab)
        except ResponseError as error:
            raise ResponseError(f"{self._name}: {error}") from error
        return result, took_s

    # From the first health check to the loss.

    async def _live(self) -> None:
        try:
            async with asyncio.timeout(self._start_s):
                ready = await self._started()
        except TimeoutError:
            self._wire.lose(f"was not ready within {self._start_s:g} s: {self._wire.trouble}")
            return
        except EngineLostError:
            return
        except EngineError as error:
            hint = (
                "; for evaluation alone, set text_only"
                if self._spec.dialect == "completions"
                else ""
            )
            self._wire.lose(f"cannot be used in the dialect {self._spec.dialect}: {error}{hint}")
            return
        _give(self._ready, ready)
        while not self.lost.done():
            await asyncio.sleep(self._check_s)
            await self._wire.examine()

    async def _started(self) -> Ready:
        """Wait for health, and probe."""
        await self._wire.risen(self._failed)
        first, second = probes(self._spec.vocab)
        cold, _ = await self._asked(first)
        hot = cold if cold.text_only else (await self._asked(second))[0]
        self._logprobs = kind_of(cold, hot)
        if (
            self._reference is not None
            and not cold.text_only
            and not (cold.versions and cold.versions[-1].version > 0)
        ):
            # a later version has other weights than the checkpoint
            await self._compare(self._reference)
        slots, kv_tokens = self._spec.slots, self._spec.kv_tokens
        if self._dialect.ready_path:
            told = parse(await self._wire.get(self._dialect.ready_path), Ready)
            return msgspec.structs.replace(
                told, version=max(0, told.version), max_slots=min(slots, told.max_slots)
            )
        self._version = cold.versions[-1].version if cold.versions else 0
        return Ready(
            version=self._version, kv_total_tokens=kv_tokens, max_slots=slots, max_context=kv_tokens
        )

    async def _compare(self, reference: Reference) -> None:
        """Note log-probs that differ from the checkpoint's: a trainer would correct for
        rounding, not for staleness.
        """
        request = exact_probe(self._spec.vocab)
        try:
            result, _ = await self._asked(request)
        except ResponseError as error:
            self._noted(f"its log-probs cannot be compared with the checkpoint's: {error}")
            return
        ours = await reference(request.tokens, result.tokens)
        if ours is not None and (text := inexactness(result.logprobs, ours)):
            self._noted(text)

    def _fail_all(self) -> None:
        """The engine is lost: so is everything that waits for it."""
        waiters: list[asyncio.Future[Any]] = [
            self._ready,
            *(call.answer for call in self._calls.values()),
        ]
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(EngineLostError(self.lost.result()))
                waiter.exception()  # whoever still waits sees it; nobody has to

    def _forget(self, request_id: str, call: _Call) -> None:
        """The call is answered, or not wanted any more: end what still runs for it."""
        del self._calls[request_id]
        if call.task is not None:
            call.task.cancel()

    def _not_ours(self, kind: type[Exception], what: str) -> NoReturn:
        self._wire.must_live()
        raise kind(
            f"{self._name} cannot be {what} from here: an engine behind HTTP has an owner elsewhere"
        )


def _give(waiter: asyncio.Future[T], value: T) -> None:
    if not waiter.done():
        waiter.set_result(value)


def _fail(waiter: asyncio.Future[T], error: EngineError) -> None:
    if not waiter.done():
        waiter.set_exception(error)
