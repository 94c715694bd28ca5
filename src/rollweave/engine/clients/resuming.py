"""Goes on with a turn at a server that knows of none that was unextended_result: the beginning is
sent as if it belonged to the prompt.

Where that would not be the same turn it is unextended_result again: a stop string may lie across
the border, where no such server sees it, and a server of text has no tokens to go on
from. The rest gets a seed of its own, since a server draws from a seed's beginning:
with the turn's own, it would repeat the draws of what is resumed.
"""

import msgspec

from rollweave.schema.errors import EngineError
from rollweave.schema.serving import FinishReason, GenerateRequest, GenerateResult, VersionSpan

MIN_BUDGET_S = 1e-3
"""Of a budget that is used up: 0 would be none."""


def remaining_request(
    request: GenerateRequest, *, text_only: bool
) -> GenerateRequest | FinishReason:
    """What to ask the server for, without `resumed`; or how the turn has ended with
    that.

    Raises EngineError for what cannot be the beginning of this turn.
    """
    resumed, sampling = request.resumed, request.sampling
    if resumed is None:
        return request
    if text_only or any(sampling.stop):
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
    """The whole turn: what `request` resumes, if anything, and the rest."""
    resumed = request.resumed
    if resumed is None:
        return rest
    count, versions = len(resumed.tokens), list(resumed.versions)
    for span in rest.versions:
        moved = VersionSpan(start=span.start + count, end=span.end + count, version=span.version)
        if versions[-1].version == moved.version:
            moved = msgspec.structs.replace(moved, start=versions.pop().start)
        versions.append(moved)
    return msgspec.structs.replace(
        rest,
        tokens=resumed.tokens + rest.tokens,
        logprobs=resumed.logprobs + rest.logprobs,
        versions=tuple(versions),
        cached_tokens=min(rest.cached_tokens, len(request.tokens)),
        generate_s=resumed.generate_s + rest.generate_s,
        resumed_tokens=count,
    )


def unextended_result(request: GenerateRequest, finish: FinishReason) -> GenerateResult:
    """The turn as it was unextended_result: nothing came to it."""
    return merged_result(
        request, GenerateResult(id=request.id, tokens=(), logprobs=(), versions=(), finish=finish)
    )
