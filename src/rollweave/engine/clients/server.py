"""Serves an engine over HTTP: in Rollweave's own dialect, as OpenAI's completions with
token ids, and in ProRL's dialect.

Invariants: token ids and log-probs are returned exactly as the engine gave them; a
field that would change the sampling and that the engine cannot honor is refused (400),
never dropped; a client that disconnects, or that a limit cuts off, leaves no generation
behind; the number of requests in flight is bounded (429). The guard in front of the
server decides which requests are admitted.
"""

import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from aiohttp import web

from rollweave.engine.clients.base import EngineBackend
from rollweave.io.http.bodies import BODY_S, body_of
from rollweave.io.http.fields import refused_field
from rollweave.schema.errors import EngineError, EngineLostError
from rollweave.schema.packing import as_json
from rollweave.schema.serving import FinishReason, GenerateRequest, GenerateResult, Sampling

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


class TextCodec(Protocol):
    """The checkpoint's tokenizer, if it has one."""

    def encode(self, text: str) -> Sequence[int]:
        """Return the tokens of a prompt."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer."""


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
    """The supported fields of OpenAI's `/v1/completions`, and of vLLM's additions to
    it.
    """

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
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = True  # always true


class EngineServer:
    """The handlers of one engine.

    `model` is its name in answers; `BODY_S` and `MAX_REQUESTS` are the default limits.
    """

    def __init__(
        self,
        engine: EngineBackend,
        *,
        model: str,
        text: TextCodec | None = None,
        read_s: float = BODY_S,
        max_requests: int = MAX_REQUESTS,
    ) -> None:
        self._engine, self._model, self._text = engine, model, text
        self._read_s, self._max_requests = read_s, max_requests
        self._in_flight = 0

    def application(self) -> web.Application:
        """Return the application. Serve it with `handler_cancellation`, without which
        generation continues after a client disconnects.
        """
        app = web.Application(middlewares=[_errors_as_json])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/rollweave/v1/ready", self._ready),
                web.get("/rollweave/v1/stats", self._stats),
                web.post("/rollweave/v1/generate", self._rollweave),
                web.post("/rollweave/v1/abort", self._abort),
                web.post("/v1/completions", self._completion),
                web.post("/generate", self._prorl_generate),
            ]
        )
        return app

    async def _health(self, _: web.Request) -> web.Response:
        if self._engine.lost.done():
            raise EngineLostError(self._engine.lost.result())
        return _json({"status": "ok"})

    async def _models(self, _: web.Request) -> web.Response:
        return _json(
            {
                "object": "list",
                "data": [{"id": self._model, "object": "model", "owned_by": "rollweave"}],
            }
        )

    async def _ready(self, _: web.Request) -> web.Response:
        return _json(await self._engine.ready())

    async def _stats(self, _: web.Request) -> web.Response:
        return _json(await self._engine.stats())

    async def _rollweave(self, request: web.Request) -> web.Response:
        return _json(await self._generate(await self._read(request, GenerateRequest)))

    async def _abort(self, request: web.Request) -> web.Response:
        self._engine.abort((await self._read(request, _Abort)).id)
        return _json({})

    async def _prorl_generate(self, request: web.Request) -> web.Response:
        body = await self._read_honored(request, _Prorl)
        sampling = Sampling(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=max(0, body.top_k or 0),
            max_tokens=body.max_tokens,
            seed=_seed(body.seed),
        )
        result = await self._generate(
            GenerateRequest(id=_new_id(), tokens=body.prompt_ids, sampling=sampling)
        )
        return _json({"response_ids": result.tokens, "logprobs": result.logprobs})

    async def _completion(self, request: web.Request) -> web.Response:
        body = await self._read_honored(request, _Completion)
        if (
            body.logprobs is not None
            and body.logprobs != 0
            and (body.logprobs, body.temperature) != (1, 0)
        ):
            text = "must be 0 or null, or 1 at temperature 0: only the sampled token's is known"
            raise EngineError(f"logprobs {text}, got {body.logprobs}")
        if body.logprobs is not None and body.return_tokens_as_token_ids is False:
            raise EngineError(
                "return_tokens_as_token_ids must be true or null: tokens are named "
                "by their ids, got False"
            )
        if body.prompt_logprobs not in (None, 0):
            raise EngineError(
                "prompt_logprobs must be 0 or null: only those of the prompt's tokens are known, "
                f"got {body.prompt_logprobs}"
            )
        prompt = body.prompt
        if isinstance(prompt, str):
            if self._text is None:
                raise EngineError("prompt must be token ids: the checkpoint has no tokenizer")
            prompt = tuple(self._text.encode(prompt))
        sampling = Sampling(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=max(0, body.top_k or 0),
            max_tokens=16 if body.max_tokens is None else body.max_tokens,
            stop_token_ids=body.stop_token_ids or (),
            stop=_texts(body.stop),
            allowed=body.allowed_token_ids or (),
            seed=_seed(body.seed),
        )
        result = await self._generate(
            GenerateRequest(
                id=_new_id(),
                tokens=prompt,
                sampling=sampling,
                prompt_logprobs=body.prompt_logprobs is not None,
            )
        )
        return _json(self._as_completion(body, result, prompt=prompt))

    def _as_completion(
        self, body: _Completion, result: GenerateResult, *, prompt: Sequence[int]
    ) -> dict[str, Any]:
        count, prompt_tokens = len(result.tokens), len(prompt)
        choice: dict[str, Any] = {
            "index": 0,
            "text": self._visible_text(body, result.tokens) if self._text is not None else "",
            "logprobs": None,
            "finish_reason": "abort"
            if result.finish is FinishReason.ABORTED
            else result.finish.value,
            "weight_versions": [
                {"version": str(span.version), "start": span.start, "end": span.end}
                for span in result.versions
            ],
        }
        if body.logprobs is not None:
            names = [f"token_id:{token}" for token in result.tokens]
            choice["logprobs"] = {
                "tokens": names,
                "token_logprobs": result.logprobs,
                "top_logprobs": None,
                "text_offset": [],
            }
        if body.return_token_ids:
            choice["token_ids"] = result.tokens
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs(prompt, result)
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

    def _prompt_logprobs(
        self, prompt: Sequence[int], result: GenerateResult
    ) -> list[dict[str, Any] | None]:
        """Return each token of the prompt with its log-prob and text, as vLLM does: the
        first has none.
        """
        entries: list[dict[str, Any] | None] = [None]
        for token, logprob in zip(prompt[1:], result.prompt_logprobs, strict=True):
            text = self._text.decode([token]) if self._text is not None else None
            entries.append({str(token): {"logprob": logprob, "decoded_token": text}})
        return entries

    def _visible_text(self, body: _Completion, tokens: Sequence[int]) -> str:
        """Return the text before the stop text or the stop token, as OpenAI's clients
        expect it.
        """
        assert self._text is not None, "a server without a tokenizer shows no text"
        has_stop_token = bool(tokens) and tokens[-1] in (body.stop_token_ids or ())
        text = self._text.decode(tokens[:-1] if has_stop_token else tokens)
        return text[
            : min(
                (at for each in _texts(body.stop) if (at := text.find(each)) >= 0),
                default=len(text),
            )
        ]

    async def _read_honored(self, request: web.Request, kind: type[Fields]) -> Fields:
        """Return the fields that `kind` has.

        Raises EngineError for any other field with a non-neutral value.
        """
        fields = await self._read(request, dict[str, Any])
        honored = set(kind.__struct_fields__)
        others = {name: value for name, value in fields.items() if name not in honored}
        refused = refused_field(others)
        if refused is not None:
            name, rule = refused
            raise EngineError(f"{name} {rule}, got {others[name]!r:.100}")
        return msgspec.convert(
            {name: value for name, value in fields.items() if name in honored}, kind
        )

    async def _read(self, request: web.Request, kind: type[T]) -> T:
        return msgspec.json.decode(
            await body_of(request, most=REQUEST_BYTES, seconds=self._read_s), type=kind
        )

    async def _generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate a result. Cancelling the handler cancels the request at the
        engine.
        """
        if self._in_flight >= self._max_requests:
            raise web.HTTPTooManyRequests(headers={"Retry-After": str(RETRY_S)})
        self._in_flight += 1
        try:
            return await self._engine.generate(request)
        finally:
            self._in_flight -= 1


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return every failure as JSON, with its description in `detail`."""
    try:
        return await handler(request)
    except EngineLostError as error:
        return _json({"detail": str(error)}, status=503)
    except (EngineError, msgspec.DecodeError, ValueError) as error:
        return _json({"detail": str(error)}, status=400)
    except web.HTTPException as error:
        return _json({"detail": error.reason}, status=error.status, headers=dict(error.headers))


def _json(
    value: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    kept = {name: text for name, text in (headers or {}).items() if name.lower() != "content-type"}
    return web.Response(
        body=as_json(value), status=status, content_type="application/json", headers=kept
    )


def _texts(stop: tuple[str, ...] | str | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else stop or ()


def _new_id() -> str:
    return secrets.token_hex(16)


def _seed(seed: int | None) -> int:
    """Return the seed, or a random one if none is given."""
    return secrets.randbits(63) if seed is None else seed
