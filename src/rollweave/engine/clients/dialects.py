"""The requests and responses of engines behind HTTP: one class per dialect, bytes in,
bytes out, no I/O.

Invariants: every sampling parameter is sent, never left to a server's default (vLLM's
completions take their defaults from the checkpoint's generation_config.json, which may
hold a repetition penalty); parameters that a dialect cannot express are refused with
`EngineError` and never dropped; token ids are the server's, never derived from text. A
response that violates the dialect raises `ResponseError`. Ranks are sent to Rollweave
servers only: elsewhere they need a scheduling policy, without which servers refuse or
ignore them.
"""

from collections.abc import Sequence
from typing import Any, Final, Protocol, TypeVar

import msgspec

from rollweave.engine.clients.responses import (
    CompletionResponse,
    ProrlResponse,
    ResponseError,
    SglangMeta,
    SglangResponse,
    Span,
    VllmChoice,
    VllmResponse,
    parse,
    required,
)
from rollweave.schema.base import as_json
from rollweave.schema.errors import EngineError
from rollweave.schema.serving import (
    DialectName,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Sampling,
    VersionSpan,
    spans_cover,
)
from rollweave.schema.text import whole
from rollweave.schema.work import Routes

GENERATE_PATH: Final = "/rollweave/v1/generate"
ABORT_PATH: Final = "/rollweave/v1/abort"
READY_PATH: Final = "/rollweave/v1/ready"
STATS_PATH: Final = "/rollweave/v1/stats"
"""The paths of Rollweave's own engine server (`engine/clients/server`). All bodies and
answers are JSON.
"""

SEED_BITS = (1 << 63) - 1
"""Mask of the bits of a seed that are sent: vLLM takes a signed 64-bit integer, and
ours may have any size.
"""

NOT_A_LOGPROB = -9999.0
"""The value that vLLM returns for a log-prob that is -inf, NaN or unknown: never that
of a sampled token.
"""

ABOVE_ZERO = 1e-3
"""Maximum by which rounding may lift a log-prob above 0."""

T = TypeVar("T")


class Dialect(Protocol):
    """One HTTP API.

    Paths begin with a slash; an empty path means that the server has no such endpoint.
    """

    generate_path: str
    ready_path: str = ""
    stats_path: str = ""
    keeps_time: bool = False
    """True if the server ends a request itself when its `budget_s` is used up, and
    reports how long it took.
    """
    resumes: bool = False
    """True if the server resumes a turn; the resumed tokens are then part of its
    answer.
    """
    checks_grammars: bool = False
    """True if a constraint must be compiled here before the server gets it, since the
    server does not bound the time that this takes.
    """

    def encode(self, request: GenerateRequest) -> bytes:
        """Return the body of the POST. Raises `EngineError` for parameters that the
        dialect lacks.
        """

    def decode(self, request: GenerateRequest, body: bytes) -> GenerateResult:
        """Return the result of `request`. Raises `ResponseError`."""

    def abort(self, request_id: str) -> tuple[str, bytes] | None:
        """Return path and body of the POST that makes the server answer `request_id`
        now; None if only disconnecting stops it.
        """
        return None


class Rollweave(Dialect):
    """The dialect of Rollweave's server (`engine/clients/server.py`): the structs
    themselves, as JSON.
    """

    generate_path, ready_path, stats_path = GENERATE_PATH, READY_PATH, STATS_PATH
    keeps_time = resumes = True

    def encode(self, request: GenerateRequest) -> bytes:
        return as_json(request)

    def decode(self, request: GenerateRequest, body: bytes) -> GenerateResult:
        """Decode a result. The version of an engine that serves only its checkpoint
        (-1) becomes 0, as for all servers that report none.
        """
        result = parse(body, GenerateResult)
        spans = tuple(
            VersionSpan(start=span.start, end=span.end, version=max(0, span.version))
            for span in result.versions
        )
        return msgspec.structs.replace(result, versions=spans)

    def abort(self, request_id: str) -> tuple[str, bytes] | None:
        return ABORT_PATH, as_json({"id": request_id})


class Vllm(Dialect):
    """vLLM's tokens in, tokens out (`--enable-scale-out`)."""

    generate_path = "/inference/v1/generate"

    def __init__(self, model: str = "") -> None:
        self._model = model or None

    def encode(self, request: GenerateRequest) -> bytes:
        return as_json(self.fields(request))

    def fields(self, request: GenerateRequest) -> dict[str, Any]:
        """Return the fields of the request."""
        return {
            "request_id": request.id,
            "model": self._model,
            "token_ids": request.tokens,
            "sampling_params": {**_vllm_sampling(request.sampling), "logprobs": 0},
            "stream": False,
        }

    def decode(self, request: GenerateRequest, body: bytes) -> GenerateResult:
        return self.result(request, parse(body, VllmResponse))

    def result(self, request: GenerateRequest, answer: VllmResponse) -> GenerateResult:
        """Return the result of a complete answer. Raises `ResponseError`."""
        choice = single(answer.choices)
        content = choice.logprobs.content if choice.logprobs is not None else None
        tokens = required(choice.token_ids, "choices[0].token_ids")
        entries = required(content, "choices[0].logprobs.content")
        if [entry.token_id for entry in entries] != list(tokens):
            raise ResponseError(
                f"its log-probs are of other tokens than its {len(tokens)} token_ids"
            )
        return _result(
            request,
            tokens,
            [entry.logprob for entry in entries],
            finish=_finish(choice.finish_reason),
            spans=choice.weight_versions,
            cached=answer.usage.cached if answer.usage is not None else 0,
            prompt=answer.usage.prompt_tokens if answer.usage is not None else 0,
            routes=self.routes(request, choice, len(tokens)),
        )

    def routes(self, request: GenerateRequest, choice: VllmChoice, tokens: int) -> Routes | None:
        """Return the routes of an answer of so many tokens, if the server records
        them.
        """
        return None

    def abort(self, request_id: str) -> tuple[str, bytes] | None:
        """vLLM's ids have a prefix; it silently ignores an id without it."""
        return "/inference/v1/abort_requests", as_json(
            {"request_ids": [f"generate-tokens-{request_id}"]}
        )


class Completions(Dialect):
    """OpenAI's completions with vLLM's `return_token_ids`."""

    generate_path = "/v1/completions"

    def __init__(self, model: str = "") -> None:
        self._model = model

    def encode(self, request: GenerateRequest) -> bytes:
        body_fields: dict[str, Any] = {
            "prompt": request.tokens,
            **_vllm_sampling(request.sampling),
            "n": 1,
            "stream": False,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        if self._model:
            body_fields["model"] = self._model
        return as_json(body_fields)

    def decode(self, request: GenerateRequest, body: bytes) -> GenerateResult:
        answer = parse(body, CompletionResponse)
        choice = single(answer.choices)
        finish = _finish(choice.finish_reason)
        tokens = required(choice.token_ids, "choices[0].token_ids")
        logprobs = required(
            choice.logprobs.token_logprobs if choice.logprobs is not None else None,
            "choices[0].logprobs",
        )
        return _result(
            request,
            tokens,
            logprobs,
            finish=finish,
            spans=choice.weight_versions,
            cached=answer.usage.cached if answer.usage is not None else 0,
        )


class Sglang(Dialect):
    """SGLang's native `/generate`.

    It honors seeds only if it runs with `--enable-deterministic-inference`.
    """

    generate_path = "/generate"

    def encode(self, request: GenerateRequest) -> bytes:
        return as_json(self.fields(request))

    def fields(self, request: GenerateRequest) -> dict[str, Any]:
        """Return the fields of the request."""
        sampling = request.sampling
        _refuse_fields(sampling, "sglang", "allowed", "constraint", "adjustments")
        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "max_new_tokens": sampling.max_tokens,
            "stop_token_ids": sampling.stop_token_ids,
            "stop": sampling.stop,
            "sampling_seed": sampling.seed & SEED_BITS,
        }
        return {
            "rid": request.id,
            "input_ids": request.tokens,
            "sampling_params": params,
            "return_logprob": True,
            "stream": False,
        }

    def decode(self, request: GenerateRequest, body: bytes) -> GenerateResult:
        return self.result(request, parse(body, SglangResponse))

    def result(self, request: GenerateRequest, answer: SglangResponse) -> GenerateResult:
        """Return the result of a complete answer. Raises `ResponseError`."""
        meta = answer.meta_info
        if meta.output_token_logprobs is None and not answer.output_ids:  # aborted before it began
            pairs: tuple[tuple[float, int, str | None], ...] = ()
        else:
            pairs = required(meta.output_token_logprobs, "meta_info.output_token_logprobs")
        tokens = [token for _, token, _ in pairs]
        if answer.output_ids is not None and list(answer.output_ids) != tokens:
            raise ResponseError(
                f"its log-probs are of other tokens than its {len(answer.output_ids)} output_ids"
            )
        reason = meta.finish_reason.type if meta.finish_reason is not None else None
        logprobs = [logprob for logprob, _, _ in pairs]
        return _result(
            request,
            tokens,
            logprobs,
            finish=_finish(reason),
            spans=self.spans(meta, len(tokens)),
            cached=meta.cached_tokens,
        )

    def spans(self, meta: SglangMeta, count: int) -> Sequence[Span]:
        """Return the versions of the `count` tokens of an answer."""
        if meta.weight_versions is not None:
            return meta.weight_versions
        return (Span(version=meta.weight_version, start=0, end=count),)

    def abort(self, request_id: str) -> tuple[str, bytes] | None:
        """SGLang aborts every request whose id has this prefix, so ids must have equal
        lengths.
        """
        return "/abort_request", as_json({"rid": request_id})


class Prorl(Dialect):
    """The API of ProRL's servers.

    It has no stop tokens, so the answer is cut after the first one.
    """

    generate_path = "/generate"

    def encode(self, request: GenerateRequest) -> bytes:
        sampling = request.sampling
        _refuse_fields(sampling, "prorl", "allowed", "constraint", "adjustments", "stop")
        body_fields: dict[str, Any] = {
            "prompt_ids": request.tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed & SEED_BITS,
            "max_tokens": sampling.max_tokens,
        }
        if sampling.top_k:
            body_fields["top_k"] = sampling.top_k
        return as_json(body_fields)

    def decode(self, request: GenerateRequest, body: bytes) -> GenerateResult:
        """Decode a result. The response has no finish reason: fewer tokens than
        requested mean a stop.
        """
        answer = parse(body, ProrlResponse)
        if len(answer.logprobs) != len(answer.response_ids):
            raise ResponseError(
                f"it gave {len(answer.logprobs)} log-probs for {len(answer.response_ids)} tokens"
            )
        stops = request.sampling.stop_token_ids
        end = next(
            (at + 1 for at, token in enumerate(answer.response_ids) if token in stops),
            len(answer.response_ids),
        )
        tokens = answer.response_ids[:end]
        stopped = len(tokens) < request.sampling.max_tokens or (
            bool(tokens) and tokens[-1] in stops
        )
        return _result(
            request,
            tokens,
            answer.logprobs[:end],
            finish=FinishReason.STOP if stopped else FinishReason.LENGTH,
        )


def dialect(name: DialectName, *, model: str = "") -> Dialect:
    """Return the dialect of this name. `model` is the name of the served model, if the
    dialect sends one.
    """
    match name:
        case "rollweave":
            return Rollweave()
        case "vllm":
            return Vllm(model)
        case "completions":
            return Completions(model)
        case "sglang":
            return Sglang()
        case "prorl":
            return Prorl()


def check(request: GenerateRequest, result: GenerateResult, *, vocab: int) -> None:
    """Raise `ResponseError` if a result cannot be the continuation of `request` by a
    model of `vocab` tokens.
    """
    tokens, logprobs = result.tokens, result.logprobs
    if len(tokens) != len(logprobs):
        raise ResponseError(f"it gave {len(logprobs)} log-probs for {len(tokens)} tokens")
    if len(tokens) > request.sampling.max_tokens:
        raise ResponseError(
            f"it gave {len(tokens)} tokens, max_tokens is {request.sampling.max_tokens}"
        )
    if result.resumed_tokens:
        given = request.resumed.tokens if request.resumed is not None else ()
        if result.resumed_tokens != len(given) or tokens[: len(given)] != given:
            raise ResponseError(f"it resumed other tokens than the {len(given)} that it was given")
    if not tokens and result.finish in (FinishReason.STOP, FinishReason.LENGTH):
        raise ResponseError("it gave no token")
    check_values(tokens, logprobs, vocab=vocab)
    if not spans_cover(result.versions, len(tokens)):
        raise ResponseError(
            f"its version spans must cover its {len(tokens)} tokens in order, got {result.versions}"
        )


def check_values(
    tokens: Sequence[int], logprobs: Sequence[float], *, vocab: int, start: int = 0
) -> None:
    """Raise `ResponseError` if the tokens from position `start` on are not of a model
    of `vocab` tokens, or their log-probs are not those of sampled tokens.
    """
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab:
        raise ResponseError(
            f"its tokens must be in [0, {vocab}), got {min(tokens)} to {max(tokens)}"
        )
    for at, logprob in enumerate(logprobs, start):
        if not NOT_A_LOGPROB < logprob <= ABOVE_ZERO:
            raise ResponseError(f"the log-prob of its token {at} is {logprob}")


def single(choices: Sequence[T]) -> T:
    """Return the only choice of an answer. Raises `ResponseError`."""
    if len(choices) != 1:
        raise ResponseError(f"its answer must have 1 choice, got {len(choices)}")
    return choices[0]


def _vllm_sampling(sampling: Sampling) -> dict[str, Any]:
    """Return the fields of vLLM's APIs. All are sent, since the defaults are the
    checkpoint's.
    """
    _refuse_fields(sampling, "vllm", "constraint", "adjustments")
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "max_tokens": sampling.max_tokens,
        "seed": sampling.seed & SEED_BITS,
        "stop": sampling.stop,
        "stop_token_ids": sampling.stop_token_ids,
        "allowed_token_ids": sampling.allowed or None,
    }


def _refuse_fields(sampling: Sampling, name: str, *fields: str) -> None:
    for field in fields:
        if getattr(sampling, field):
            raise EngineError(
                f"sampling.{field} cannot be expressed in the dialect {name}, got "
                f"{getattr(sampling, field)!r:.100}"
            )


def _finish(reason: str | None) -> FinishReason:
    match reason:
        case "stop":
            return FinishReason.STOP
        case "length":
            return FinishReason.LENGTH
        case "abort":
            return FinishReason.ABORTED
        case _:
            raise ResponseError(
                f"its finish reason must be stop, length or abort, got {reason!r:.100}"
            )


def _version(label: str | int | None) -> int:
    """Convert a server's label of its weights to a version: 0 if it is not a number."""
    return whole(str(label)) or 0


def version_spans(spans: Sequence[Span]) -> tuple[VersionSpan, ...]:
    """Convert a server's spans, without empty ones."""
    return tuple(
        VersionSpan(start=span.start, end=span.end, version=_version(span.version))
        for span in spans
        if span.end > span.start
    )


def _result(
    request: GenerateRequest,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    *,
    finish: FinishReason,
    spans: Sequence[Span] | None = None,
    cached: int = 0,
    prompt: int = 0,
    routes: Routes | None = None,
) -> GenerateResult:
    if spans is None:
        spans = (Span(version=None, start=0, end=len(tokens)),)
    return GenerateResult(
        id=request.id,
        tokens=tuple(tokens),
        logprobs=tuple(logprobs),
        versions=version_spans(spans),
        finish=finish,
        cached_tokens=cached,
        prompt_tokens=prompt,
        routes=routes,
    )
