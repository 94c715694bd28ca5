"""Responses of servers in several dialects, as far as they are read here: other fields
are skipped.

A malformed response raises `ResponseError` with the place, as does NaN, which JSON does
not have.
"""

from typing import TypeVar

import msgspec

from rollweave.schema.errors import EngineError

T = TypeVar("T")


class ResponseError(EngineError):
    """A server's response violates its dialect."""


class Span(msgspec.Struct, frozen=True):
    version: str | int | None
    start: int
    end: int


class Cached(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    prompt_tokens_details: Cached | None = None

    @property
    def cached(self) -> int:
        details = self.prompt_tokens_details
        return (details.cached_tokens or 0) if details is not None else 0


class VllmTokenLogprob(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float


class VllmLogprobs(msgspec.Struct, frozen=True):
    content: tuple[VllmTokenLogprob, ...] | None = None


class VllmChoice(msgspec.Struct, frozen=True):
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | None = None
    logprobs: VllmLogprobs | None = None
    weight_versions: tuple[Span, ...] | None = None
    routed_experts: str | None = None


class VllmResponse(msgspec.Struct, frozen=True):
    choices: tuple[VllmChoice, ...]
    usage: Usage | None = None


class StreamError(msgspec.Struct, frozen=True):
    message: str = ""


class VllmEvent(msgspec.Struct, frozen=True):
    """One event of a streamed answer, or of its failure."""

    choices: tuple[VllmChoice, ...] = ()
    usage: Usage | None = None
    error: StreamError | None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    token_logprobs: tuple[float, ...] | None = None


class CompletionChoice(msgspec.Struct, frozen=True):
    text: str = ""
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | None = None
    logprobs: CompletionLogprobs | None = None
    weight_versions: tuple[Span, ...] | None = None


class CompletionResponse(msgspec.Struct, frozen=True):
    choices: tuple[CompletionChoice, ...]
    usage: Usage | None = None


class SglangReason(msgspec.Struct, frozen=True):
    type: str
    message: str | None = None
    status_code: int | None = None


class SglangMeta(msgspec.Struct, frozen=True):
    finish_reason: SglangReason | None = None
    weight_version: str | int | None = None
    weight_versions: tuple[Span, ...] | None = None
    cached_tokens: int = 0
    completion_tokens: int | None = None
    output_token_logprobs: tuple[tuple[float, int, str | None], ...] | None = None


class SglangResponse(msgspec.Struct, frozen=True):
    meta_info: SglangMeta
    output_ids: tuple[int, ...] | None = None


class SglangEvent(msgspec.Struct, frozen=True):
    """One event of a streamed answer, or of its failure."""

    meta_info: SglangMeta | None = None
    output_ids: tuple[int, ...] | None = None
    error: StreamError | None = None


class ProrlResponse(msgspec.Struct, frozen=True):
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def parse(body: bytes, kind: type[T]) -> T:
    """Decode a body of this kind.

    Raises `ResponseError`, also for NaN, which JSON does not have.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ResponseError(f"its answer cannot be read: {error}") from error


def required(value: T | None, where: str) -> T:
    """Return a value that the server must provide. Raises `ResponseError` if it is
    missing.
    """
    if value is None:
        raise ResponseError(
            f"its answer has no {where}: an engine must return token ids and log-probs; a "
            "server without them can be a judge or a teacher"
        )
    return value
