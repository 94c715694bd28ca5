"""Serves an engine over HTTP: in Rollweave's own dialect, and in ProRL's.
OpenAI's APIs are those of `rollout/gateway/front`, for the same server.

Invariants: token ids and log-probs are returned exactly as the engine gave them; a
field that would change the sampling and that the engine cannot honor is refused (400),
never dropped; a client that disconnects, or that a limit cuts off, leaves no generation
behind; the number of requests in flight is bounded (429). The guard in front of the
server decides which requests are admitted.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from rollweave.engine.clients.base import Generates, MovesKv, OnTokens
from rollweave.engine.clients.dialects import (
    ABORT_PATH,
    GENERATE_PATH,
    READY_PATH,
    STATS_PATH,
)
from rollweave.engine.clients.remote_prefill import (
    PREFILL_PATH,
    RELEASE_PATH,
    KvRelease,
    Prefill,
    RemotePrefill,
)
from rollweave.engine.clients.serving_metrics import ServingMetrics
from rollweave.io.http.bodies import BODY_S, body_of
from rollweave.io.http.exposition import exposition
from rollweave.io.http.fields import openai_error, refused_field, shown, struct_error
from rollweave.schema.base import as_json
from rollweave.schema.errors import EngineError, EngineLostError, KvError
from rollweave.schema.serving import (
    STREAM_S,
    EngineStats,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    KvManifest,
    Sampling,
)

MAX_REQUESTS = 1024
"""Maximum number of requests in flight: twenty times the number that an engine serves
at once.

More would only wait, and clients may choose another engine.
"""

REQUEST_BYTES = 64 << 20
"""Maximum number of bytes in a request: a prompt of ten million tokens."""

RETRY_S = 1
"""Seconds that a client should wait after it was refused because of the load."""

T = TypeVar("T")
Fields = TypeVar("Fields", bound=msgspec.Struct)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _ParamError(EngineError):
    """The request cannot be fulfilled. `param` is the field that is wrong, or None."""

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        self.param = param


class _Abort(msgspec.Struct, frozen=True):
    id: str


class _Prorl(msgspec.Struct, frozen=True):
    """ProRL's `/generate`."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None


class EngineServer:
    """The handlers of one engine. Prompts are computed for other servers if the engine
    moves KV.

    `model` is its name in answers; `BODY_S` and `MAX_REQUESTS` are the default limits.
    With `prompts`, the KV of prompts comes from another server. With `prompts_only`,
    the engine computes prompts for such servers, and samples no second token.
    """

    def __init__(
        self,
        engine: Generates,
        *,
        model: str,
        read_s: float = BODY_S,
        max_requests: int = MAX_REQUESTS,
        prompts: RemotePrefill | None = None,
        prompts_only: bool = False,
    ) -> None:
        self._engine, self.model = engine, model
        self._prompts, self._prompts_only = prompts, prompts_only
        self._read_s, self._max_requests = read_s, max_requests
        self._in_flight = 0
        self.metrics = ServingMetrics()
        """The metrics of all requests: also of those that `rollout/gateway/front`
        serves.
        """

    def application(self) -> web.Application:
        """Return the application. Serve it with `handler_cancellation`, without which
        generation continues after a client disconnects.
        """
        app = web.Application(middlewares=[_errors_as_json])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/ping", self._health),
                web.get("/version", self._version),
                web.get("/load", self._load),
                web.get("/metrics", self._report),
                web.get(READY_PATH, self._ready),
                web.get(STATS_PATH, self._stats),
                web.post(GENERATE_PATH, self._rollweave),
                web.post(ABORT_PATH, self._abort),
                web.post("/generate", self._prorl_generate),
            ]
        )
        if isinstance(self._engine, MovesKv):
            app.add_routes(
                [
                    web.post(PREFILL_PATH, partial(self._prefill, self._engine)),
                    web.post(RELEASE_PATH, partial(self._release, self._engine)),
                ]
            )
        return app

    async def _health(self, _: web.Request) -> web.Response:
        if self._engine.lost.done():
            raise EngineLostError(self._engine.lost.result())
        return _json({"status": "ok"})

    async def _version(self, _: web.Request) -> web.Response:
        return _json({"version": version("rollweave")})

    async def _load(self, _: web.Request) -> web.Response:
        return _json({"server_load": self._in_flight})

    async def _ready(self, _: web.Request) -> web.Response:
        return _json(await self._engine.ready())

    async def _stats(self, _: web.Request) -> web.Response:
        return _json(await self.stats())

    async def _report(self, _: web.Request) -> web.Response:
        """Answer in Prometheus' text format."""
        samples = self.metrics.samples(await self.stats())
        return web.Response(text=exposition(samples), content_type="text/plain")

    async def _rollweave(self, request: web.Request) -> web.StreamResponse:
        async def answer(request: web.Request) -> web.StreamResponse:
            return _json(_met(await self.generate(await self._read(request, GenerateRequest))))

        return await self._counted(request, answer)

    async def _abort(self, request: web.Request) -> web.Response:
        self._engine.abort((await self._read(request, _Abort)).id)
        return _json({})

    async def _prefill(self, engine: MovesKv, request: web.Request) -> web.StreamResponse:
        return await self._counted(request, partial(self._prefilled, engine))

    async def _prefilled(self, engine: MovesKv, request: web.Request) -> web.Response:
        """Compute a prompt here, whatever `prompts` is, and export its KV."""
        asked = await self._read(request, Prefill)
        await self._generate(
            GenerateRequest(
                id=_new_id(),
                tokens=asked.tokens,
                sampling=Sampling(max_tokens=1),
                rank=asked.rank,
            )
        )
        export = asyncio.ensure_future(engine.export_kv(asked.tokens, "tcp"))
        try:
            return _json(await asyncio.shield(export))
        except asyncio.CancelledError:
            export.add_done_callback(partial(_release_unread, engine))
            raise

    async def _release(self, engine: MovesKv, request: web.Request) -> web.Response:
        engine.release_kv((await self._read(request, KvRelease)).id)
        return _json({})

    async def _prorl_generate(self, request: web.Request) -> web.StreamResponse:
        return await self._counted(request, self._prorl_answer)

    async def _prorl_answer(self, request: web.Request) -> web.Response:
        body = await self._read_honored(request, _Prorl)
        sampling = Sampling(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=max(0, body.top_k or 0),
            max_tokens=body.max_tokens,
            seed=_seed(body.seed),
        )
        asked = GenerateRequest(id=_new_id(), tokens=body.prompt_ids, sampling=sampling)
        try:
            result = _met(await self.generate(asked))
        except EngineError as error:
            rule = str(error).removeprefix("ValueError: ")
            if not rule.startswith("tokens "):
                raise
            raise _ParamError(f"prompt_ids {rule.removeprefix('tokens ')}", "prompt_ids") from error
        return _json({"response_ids": result.tokens, "logprobs": result.logprobs})

    async def _counted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Return the handler's answer, or its error, and count the request."""
        with self.metrics.request() as outcome:
            response = await _errors_as_json(request, handler)
            refused = "refused" if response.status < 500 else "failed"
            outcome.name = "answered" if response.status < 400 else refused
            return response

    async def _read_honored(self, request: web.Request, kind: type[Fields]) -> Fields:
        """Return the fields that `kind` has.

        Raises _ParamError for any other field with a non-neutral value.
        """
        fields = await self._read(request, dict[str, Any])
        honored = set(kind.__struct_fields__)
        others = {name: value for name, value in fields.items() if name not in honored}
        refused = refused_field(others)
        if refused is not None:
            name, rule = refused
            raise _ParamError(f"{shown(name)} {rule}, got {others[name]!r:.100}", name)
        try:
            return msgspec.convert(
                {name: value for name, value in fields.items() if name in honored}, kind
            )
        except msgspec.ValidationError as error:
            raise _refusal(error, fields) from None

    async def _read(self, request: web.Request, kind: type[T]) -> T:
        body = await body_of(request, most=REQUEST_BYTES, seconds=self._read_s)
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise _refusal(error, _value_of(body)) from None
        except RecursionError:
            raise EngineError("the body must be JSON of fewer levels") from None

    def has_room(self, count: int = 1) -> bool:
        """Return whether `count` further requests are taken."""
        return self._in_flight + count <= self._max_requests

    async def stats(self) -> EngineStats:
        """Return a sample of the engine's state."""
        return await self._engine.stats()

    async def generate(
        self,
        request: GenerateRequest,
        on_tokens: OnTokens | None = None,
        *,
        report_s: float = STREAM_S,
    ) -> GenerateResult:
        """Generate a result. Cancelling this cancels the request at the engine.

        Raises EngineError for a request that the engine refuses.
        """
        if self._prompts_only and request.sampling.max_tokens > 1:
            raise EngineError(
                "max_tokens must be 1 on an engine that computes prompts only, got "
                f"{request.sampling.max_tokens}"
            )
        return await self._generate(request, on_tokens, report_s=report_s, prompts=self._prompts)

    async def _generate(
        self,
        request: GenerateRequest,
        on_tokens: OnTokens | None = None,
        *,
        report_s: float = STREAM_S,
        prompts: RemotePrefill | None = None,
    ) -> GenerateResult:
        """Generate a result, once `prompts` has brought the KV of the prompt."""
        if not self.has_room():
            raise web.HTTPTooManyRequests(headers={"Retry-After": str(RETRY_S)})
        self._in_flight += 1
        started = time.monotonic()
        try:
            brought_s = 0.0
            if prompts is not None:
                await prompts.bring(request)
                brought_s = time.monotonic() - started
            result = _with_prompt_seconds(
                await self._engine.generate(request, on_tokens, report_s=report_s), brought_s
            )
        finally:
            self._in_flight -= 1
        self.metrics.turn(
            result, prompt_tokens=len(request.tokens), seconds=time.monotonic() - started
        )
        return result


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return every failure as JSON, with its description in `detail` and, as OpenAI's
    clients expect it, in `error`.
    """
    try:
        return await handler(request)
    except EngineLostError as error:
        return _error(str(error), 503)
    except _ParamError as error:
        return _error(str(error), 400, param=error.param)
    except KvError as error:
        return _error(str(error), 409)
    except (EngineError, ValueError) as error:
        return _error(str(error), 400)
    except web.HTTPException as error:
        return _error(error.reason, error.status, headers=dict(error.headers))


def _release_unread(engine: MovesKv, export: asyncio.Future[KvManifest]) -> None:
    """Free an export whose client has left before it learned the id."""
    if not export.cancelled() and export.exception() is None:
        engine.release_kv(export.result().id)


def _met(result: GenerateResult) -> GenerateResult:
    """Return the result. Raises _ParamError if the constraint cannot be met."""
    if result.finish is FinishReason.REFUSED:
        raise _ParamError(result.error, "sampling.constraint")
    return result


def _value_of(body: bytes) -> object:
    """Return the JSON of a body, or None if it is not JSON that can be read."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None


def _refusal(error: msgspec.DecodeError, value: object) -> _ParamError:
    """Return the refusal of a body that is not what it must be."""
    param, message = struct_error(error, value)
    return _ParamError(message, param)


def _error(
    detail: str,
    status: int,
    *,
    param: str | None = None,
    headers: dict[str, str] | None = None,
) -> web.Response:
    body = {"detail": detail, **openai_error(status, detail, param=param)}
    return _json(body, status=status, headers=headers)


def _json(
    value: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    kept = {name: text for name, text in (headers or {}).items() if name.lower() != "content-type"}
    return web.Response(
        body=as_json(value), status=status, content_type="application/json", headers=kept
    )


def _with_prompt_seconds(result: GenerateResult, seconds: float) -> GenerateResult:
    """Return the result with the seconds that its prompt took elsewhere."""
    return msgspec.structs.replace(
        result,
        queue_s=result.queue_s + seconds,
        first_token_s=result.first_token_s + seconds if result.tokens else 0.0,
    )


def _new_id() -> str:
    return secrets.token_hex(16)


def _seed(seed: int | None) -> int:
    """Return the seed, or a random one if none is given."""
    return secrets.randbits(63) if seed is None else seed
