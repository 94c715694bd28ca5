"""Turns of which a server returns parts: the parts of a streamed answer, in the order
in which they arrive, and the rest of a turn that begins with tokens of another engine.

Invariants: a token is reported only with the version of the weights that sampled it;
where that is not certain yet, the token waits for a later part; the complete answer is
decoded and checked as one that arrives in one piece, and begins with what was reported.

A server that cannot resume a turn gets the tokens so far as part of the prompt. The
turn is started over if that would not yield the same turn: a stop string may lie across
the boundary, where such a server does not see it, and a constraint holds from the first
token that is sampled. The rest gets a different seed, since a server draws from the
beginning of a seed: with the turn's seed, it would repeat the draws of the resumed
tokens.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from rollweave.engine.clients.dialects import Dialect, check_values
from rollweave.engine.clients.responses import ResponseError
from rollweave.schema.base import Struct
from rollweave.schema.errors import EngineError
from rollweave.schema.serving import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    TokenDelta,
    VersionSpan,
    spans_between,
    spans_cover,
)

REPORT_TOKENS = 32
"""Tokens in a part of an answer that no client reads, which is the maximum that is lost
with a server beside what it samples while a report waits. Each part costs vLLM about
0.1 ms of CPU time.
"""


class Part(Struct, frozen=True, kw_only=True):
    """One part of an answer: tokens from position `start` on, which may be known, and
    the versions of all tokens up to its end, None if they are not certain.

    `ends` is true if no tokens follow.
    """

    start: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    versions: tuple[VersionSpan, ...] | None
    ends: bool = False


class Parts(Protocol):
    """Reads the parts of the answer to one request."""

    def read(self, event: bytes, known: int) -> Part | None:
        """Return a part of an answer of which `known` tokens have arrived; None if it
        has no tokens. Raises `ResponseError`, also if the server reports a failure.
        """

    def result(self, tokens: Sequence[int], logprobs: Sequence[float]) -> GenerateResult:
        """Return the complete answer. Raises `ResponseError`."""


class StreamingDialect(Dialect, Protocol):
    """The dialect of a server that can stream its answers."""

    def encode_streamed(self, request: GenerateRequest, *, every: int) -> bytes:
        """Return the body of the POST for a streamed answer in parts of `every` tokens,
        or fewer. Raises as `encode`.
        """

    def parts(self, request: GenerateRequest) -> Parts:
        """Return the reader of the answer to a request that was sent."""


class StreamedAnswer:
    """The answer to one request by a model of `vocab` tokens."""

    def __init__(self, parts: Parts, request: GenerateRequest, *, vocab: int) -> None:
        self._parts, self._request, self._vocab = parts, request, vocab
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._reported: tuple[VersionSpan, ...] = ()
        self._ended = False

    def so_far(self, finish: FinishReason, *, id: str) -> GenerateResult:
        """Return the tokens that were reported as the result of request `id`."""
        count = self._count
        return GenerateResult(
            id=id,
            tokens=tuple(self._tokens[:count]),
            logprobs=tuple(self._logprobs[:count]),
            versions=self._reported,
            finish=finish,
        )

    def read(self, event: bytes) -> TokenDelta | None:
        """Return the tokens whose versions are certain now; None if there are no others
        than before. Raises `ResponseError`.
        """
        part = self._parts.read(event, len(self._tokens))
        if part is None:
            return None
        self._append(part)
        self._ended = part.ends
        start, end = self._count, len(self._tokens)
        if part.versions is None or start == end:
            return None
        if not spans_cover(part.versions, end):  # else a part was lost, or came twice
            raise ResponseError(
                f"version spans must cover its {end} tokens in order, got {part.versions}"
            )
        self._confirm(part.versions, end)
        self._reported = spans_between(part.versions, 0, end)
        return TokenDelta(
            id=self._request.id,
            start=start,
            tokens=tuple(self._tokens[start:]),
            logprobs=tuple(self._logprobs[start:]),
            versions=spans_between(part.versions, start, end),
        )

    def result(self) -> GenerateResult:
        """Return the complete answer. Raises `ResponseError` if its last part is
        missing.
        """
        if not self._ended:
            raise ResponseError(
                f"its answer ended after {len(self._tokens)} tokens, without a finish reason"
            )
        result = self._parts.result(self._tokens, self._logprobs)
        self._confirm(result.versions, len(result.tokens))
        return result

    @property
    def _count(self) -> int:
        """The number of tokens that were reported."""
        return self._reported[-1].end if self._reported else 0

    def _append(self, part: Part) -> None:
        known = len(self._tokens)
        if self._ended:
            raise ResponseError("its answer continues after its finish reason")
        if not 0 <= part.start <= known:
            raise ResponseError(f"its answer continues at token {part.start}, not {known}")
        overlap = min(known - part.start, len(part.tokens))
        if list(part.tokens[:overlap]) != self._tokens[part.start : part.start + overlap]:
            raise ResponseError("it changed tokens that it had sent")
        tokens, logprobs = part.tokens[overlap:], part.logprobs[overlap:]
        check_values(tokens, logprobs, vocab=self._vocab, start=known)
        self._tokens += tokens
        self._logprobs += logprobs
        most = self._request.sampling.max_tokens
        if len(self._tokens) > most:
            raise ResponseError(f"it gave {len(self._tokens)} tokens, max_tokens is {most}")

    def _confirm(self, versions: tuple[VersionSpan, ...], end: int) -> None:
        """Check that the versions of `end` tokens are those that were reported of the
        first ones.
        """
        first = self._count
        if end < first or spans_between(versions, 0, first) != self._reported:
            raise ResponseError(
                f"the versions of its first {first} tokens were {self._reported}, and are "
                f"{versions}"
            )


MIN_BUDGET_S = 1e-3
"""Budget in seconds that is sent if the budget is used up: 0 would mean no budget."""


def remaining_request(request: GenerateRequest) -> GenerateRequest | FinishReason:
    """Return the request for the server, without `resumed`; or the finish reason if the
    resumed tokens already end the turn.

    Raises EngineError if they cannot be the beginning of this turn.
    """
    resumed, sampling = request.resumed, request.sampling
    if resumed is None:
        return request
    if any(sampling.stop) or sampling.constraint is not None:
        return msgspec.structs.replace(request, resumed=None)
    count = len(resumed.tokens)
    if count > sampling.max_tokens or any(
        token in sampling.stop_token_ids for token in resumed.tokens[:-1]
    ):
        raise EngineError(
            f"resumed.tokens must end where the turn stops, at {sampling.max_tokens} tokens or "
            f"before, got {count}"
        )
    if resumed.tokens[-1] in sampling.stop_token_ids:
        return FinishReason.STOP
    if count == sampling.max_tokens:
        return FinishReason.LENGTH
    return msgspec.structs.replace(
        request,
        tokens=request.tokens + resumed.tokens,
        sampling=msgspec.structs.replace(
            sampling, max_tokens=sampling.max_tokens - count, seed=sampling.seed + count
        ),
        budget_s=max(MIN_BUDGET_S, request.budget_s - resumed.generate_s)
        if request.budget_s
        else 0.0,
        resumed=None,
    )


def merged_result(request: GenerateRequest, rest: GenerateResult) -> GenerateResult:
    """Return the result of the whole turn: the tokens that `request` resumes, if any,
    and the rest.
    """
    resumed = request.resumed
    if resumed is None:
        return rest
    count, versions = len(resumed.tokens), list(resumed.versions)
    for moved in _moved(rest.versions, count):
        if versions[-1].version == moved.version:
            moved = msgspec.structs.replace(moved, start=versions.pop().start)
        versions.append(moved)
    return msgspec.structs.replace(
        rest,
        tokens=resumed.tokens + rest.tokens,
        logprobs=resumed.logprobs + rest.logprobs,
        versions=tuple(versions),
        cached_tokens=min(rest.cached_tokens, len(request.tokens)),
        prompt_tokens=max(0, rest.prompt_tokens - count),
        generate_s=resumed.generate_s + rest.generate_s,
        resumed_tokens=count,
    )


def moved_delta(request: GenerateRequest, delta: TokenDelta, generate_s: float) -> TokenDelta:
    """Return a delta of the rest of a turn, sampled in so many seconds, as one of the
    whole turn.
    """
    resumed = request.resumed
    count = len(resumed.tokens) if resumed is not None else 0
    return msgspec.structs.replace(
        delta,
        id=request.id,
        start=delta.start + count,
        versions=_moved(delta.versions, count),
        generate_s=generate_s + (resumed.generate_s if resumed is not None else 0.0),
    )


def _moved(versions: Sequence[VersionSpan], count: int) -> tuple[VersionSpan, ...]:
    return tuple(
        VersionSpan(start=span.start + count, end=span.end + count, version=span.version)
        for span in versions
    )


def unextended_result(request: GenerateRequest, finish: FinishReason) -> GenerateResult:
    """Return a result with only the tokens that `request` resumes."""
    return merged_result(request, GenerateResult.empty(request.id, finish))
