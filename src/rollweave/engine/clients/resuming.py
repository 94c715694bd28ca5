"""Resumes a turn at a server that cannot resume: the tokens so far are sent as part of
the prompt.

The turn is started over if that would not yield the same turn: a stop string may lie
across the boundary, where such a server does not see it, and a constraint holds from
the first token that is sampled. The rest gets a different seed, since a server draws
from the beginning of a seed: with the turn's seed, it would repeat the draws of the
resumed tokens.
"""

from collections.abc import Sequence

import msgspec

from rollweave.schema.errors import EngineError
from rollweave.schema.serving import (
    FinishReason,
    GenerateRequest,
    GenerateResult,
    TokenDelta,
    VersionSpan,
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
