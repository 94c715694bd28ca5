"""Serves an engine over HTTP: in our own words, as OpenAI's completions with token ids, and as ProRL's clients ask.

Invariants: token ids and log-probs leave as the engine gave them; a field that would change the sampling and that the engine
cannot honour is refused (400), never dropped; a client that hangs up, or that a limit cuts off, leaves no generation behind;
what the engine has under way is bounded (429). The server trusts its network: it has no passwords, so bind it to a private one.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from aiohttp import web

from rollweave.backends.base import EngineBackend
from rollweave.schema.errors import EngineError, EngineLostError
from rollweave.schema.serving import Finish, GenerateRequest, GenerateResult, Sampling

MOST_REQUESTS = 1024
"""Requests under way: twenty times what an engine serves at once. More would only wait, and clients may go elsewhere."""

REQUEST_BYTES = 64 << 20
"""Of the longest request: a prompt of ten million tokens."""

READ_S = 30.0
"""Seconds that a client has to send its request once it has begun."""

RETRY_S = 1
"""What a client that was refused for the load is asked to wait."""

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class TextCodec(Protocol):
    """The checkpoint's tokenizer, where it has one."""

    def encode(self, text: str) -> Sequence[int]:
        """Tokens of a prompt."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of an answer."""


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


class _Completion(msgspec.Struct, frozen=True):
    """OpenAI's `/v1/completions` and vLLM's additions to it, as far as they are about sampling."""

    prompt: tuple[int, ...] | str
    model: str | None = None
    max_tokens: int | None = 16
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: int | None = 0
    seed: int | None = None
    stop: tuple[str, ...] | str | None = None
    stop_token_ids: tuple[int, ...] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    return_token_ids: bool | None = False
    # What cannot be done: refused unless neutral.
    n: int | None = 1
    best_of: int | None = 1
    stream: bool | None = False
    echo: bool | None = False
    suffix: str | None = None
    min_p: float | None = 0.0
    min_tokens: int | None = 0
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    repetition_penalty: float | None = 1.0
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = False


NEUTRAL: dict[str, Any] = {
    "n": 1,
    "best_of": 1,
    "stream": False,
    "echo": False,
    "suffix": None,
    "min_p": 0.0,
    "min_tokens": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "ignore_eos": False,
}
"""Fields of a completion that must have these values, or be null."""


class EngineServer:
    """The handlers of one engine. `model` is the name that it goes by; the limits are as `READ_S` and `MOST_REQUESTS`."""

    def __init__(
        self,
        engine: EngineBackend,
        *,
        model: str,
        text: TextCodec | None = None,
        read_s: float = READ_S,
        most_requests: int = MOST_REQUESTS,
    ) -> None:
        self._engine, self._model, self._text = engine, model, text
        self._read_s, self._most_requests = read_s, most_requests
        self._under_way = 0

    def application(self) -> web.Application:
        """Serve it with `handler_cancellation`: without it, a client that hangs up would be served on."""
        app = web.Application(client_max_size=REQUEST_BYTES, middlewares=[_reported])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/rollweave/v1/ready", self._ready),
                web.get("/rollweave/v1/stats", self._stats),
                web.post("/rollweave/v1/generate", self._own),
                web.post("/rollweave/v1/abort", self._abort),
                web.post("/v1/completions", self._completion),
                web.post("/generate", self._prorl),
            ]
        )
        return app

    async def _health(self, _: web.Request) -> web.Response:
        if self._engine.lost.done():
            raise EngineLostError(self._engine.lost.result())
        return _json({"status": "ok"})

    async def _models(self, _: web.Request) -> web.Response:
        return _json({"object": "list", "data": [{"id": self._model, "object": "model", "owned_by": "rollweave"}]})

    async def _ready(self, _: web.Request) -> web.Response:
        return _json(await self._engine.ready())

    async def _stats(self, _: web.Request) -> web.Response:
        return _json(await self._engine.stats())

    async def _own(self, request: web.Request) -> web.Response:
        return _json(await self._generated(await self._read(request, GenerateRequest)))

    async def _abort(self, request: web.Request) -> web.Response:
        self._engine.abort((await self._read(request, _Abort)).id)
        return _json({})

    async def _prorl(self, request: web.Request) -> web.Response:
        asked = await self._read(request, _Prorl)
        sampling = Sampling(
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=max(0, asked.top_k or 0),
            max_tokens=asked.max_tokens,
            seed=_seed(asked.seed),
        )
        result = await self._generated(GenerateRequest(id=_new_id(), tokens=asked.prompt_ids, sampling=sampling))
        return _json({"response_ids": result.tokens, "logprobs": result.logprobs})

    async def _completion(self, request: web.Request) -> web.Response:
        asked = await self._read(request, _Completion)
        for field, neutral in NEUTRAL.items():
            value = getattr(asked, field)
            if value is not None and value != neutral:
                raise EngineError(f"{field} must be {neutral} or null here, got {value!r:.100}")
        prompt = asked.prompt
        if isinstance(prompt, str):
            if self._text is None:
                raise EngineError("prompt must be token ids: the checkpoint has no tokenizer")
            prompt = tuple(self._text.encode(prompt))
        stop = asked.stop or ()
        sampling = Sampling(
            temperature=1.0 if asked.temperature is None else asked.temperature,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            top_k=max(0, asked.top_k or 0),
            max_tokens=16 if asked.max_tokens is None else asked.max_tokens,
            stop_token_ids=asked.stop_token_ids or (),
            stop=(stop,) if isinstance(stop, str) else stop,
            allowed=asked.allowed_token_ids or (),
            seed=_seed(asked.seed),
        )
        result = await self._generated(GenerateRequest(id=_new_id(), tokens=prompt, sampling=sampling))
        return _json(self._as_completion(asked, result, prompt_tokens=len(prompt)))

    def _as_completion(self, asked: _Completion, result: GenerateResult, *, prompt_tokens: int) -> dict[str, Any]:
        count = len(result.tokens)
        choice: dict[str, Any] = {
            "index": 0,
            "text": self._text.decode(result.tokens) if self._text is not None else "",
            "logprobs": None,
            "finish_reason": "abort" if result.finish is Finish.ABORTED else result.finish.value,
            "weight_versions": [
                {"version": str(span.version), "start": span.start, "end": span.end} for span in result.versions
            ],
        }
        if asked.logprobs is not None:
            names = [f"token_id:{token}" for token in result.tokens]
            choice["logprobs"] = {"tokens": names, "token_logprobs": result.logprobs, "top_logprobs": None, "text_offset": []}
        if asked.return_token_ids:
            choice["token_ids"] = result.tokens
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": count,
            "total_tokens": prompt_tokens + count,
            "prompt_tokens_details": {"cached_tokens": result.cached_tokens},
        }
        return {
            "id": f"cmpl-{result.id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._model,
            "choices": [choice],
            "usage": usage,
        }

    async def _read(self, request: web.Request, kind: type[T]) -> T:
        try:
            async with asyncio.timeout(self._read_s):
                body = await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout from None
        return msgspec.json.decode(body, type=kind)

    async def _generated(self, request: GenerateRequest) -> GenerateResult:
        """Cancelled with its handler, which cancels it at the engine."""
        if self._under_way >= self._most_requests:
            raise web.HTTPTooManyRequests(headers={"Retry-After": str(RETRY_S)})
        self._under_way += 1
        try:
            return await self._engine.generate(request)
        finally:
            self._under_way -= 1


@web.middleware
async def _reported(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure as JSON: `detail` says what is wrong."""
    try:
        return await handler(request)
    except EngineLostError as error:
        return _json({"detail": str(error)}, status=503)
    except (EngineError, msgspec.DecodeError, ValueError) as error:
        return _json({"detail": str(error)}, status=400)
    except web.HTTPException as error:
        return _json({"detail": error.reason}, status=error.status, headers=dict(error.headers))


def _json(value: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    kept = {name: text for name, text in (headers or {}).items() if name.lower() != "content-type"}
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json", headers=kept)


def _new_id() -> str:
    return secrets.token_hex(16)


def _seed(seed: int | None) -> int:
    """Who names no seed wants another answer each time."""
    return secrets.randbits(63) if seed is None else seed
