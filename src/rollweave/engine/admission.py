"""Validates requests before the engine accepts them: it refuses those that it cannot
compute or that would harm others.
"""

import math

from rollweave.schema.serving import GenerateRequest, Sampling


def validate(request: GenerateRequest, *, vocab: int, max_context: int) -> None:
    """Raise ValueError, naming the invalid field, if the engine cannot serve
    `request`.
    """
    sampling = request.sampling
    if not request.tokens:
        raise ValueError("tokens must have at least one token, got none")
    _in_vocabulary("tokens", request.tokens, vocab)
    if len(request.tokens) >= max_context:
        raise ValueError(
            f"tokens must leave room in the context of {max_context} tokens, got a prompt of "
            f"{len(request.tokens)}"
        )
    if not math.isfinite(request.rank):
        raise ValueError(f"rank must be finite, got {request.rank}")
    if not request.budget_s >= 0:
        raise ValueError(f"budget_s must be 0 (none) or more, got {request.budget_s}")
    if any(not 0 <= token < vocab for token in sampling.allowed):
        raise ValueError(f"sampling.allowed must be in [0, {vocab}), got {sampling.allowed}")
    if any(not 0 <= token < vocab for token in request.logprob_ids):
        raise ValueError(f"logprob_ids must be in [0, {vocab}), got {request.logprob_ids}")
    _check_adjustments(sampling, vocab)
    if request.resumed is not None:
        _in_vocabulary("resumed.tokens", request.resumed.tokens, vocab)
        if not all(map(math.isfinite, request.resumed.logprobs)):
            raise ValueError("resumed.logprobs must be finite")


def _check_adjustments(sampling: Sampling, vocab: int) -> None:
    adjustments = sampling.adjustments
    if adjustments is None:
        return
    if adjustments.bias:
        _in_vocabulary("logit_bias", tuple(token for token, _ in adjustments.bias), vocab)
    for word in adjustments.banned:
        _in_vocabulary("bad_words", word, vocab)


def _in_vocabulary(field: str, tokens: tuple[int, ...], vocab: int) -> None:
    if not 0 <= min(tokens) <= max(tokens) < vocab:
        got = f"{min(tokens)} to {max(tokens)}: out of vocabulary"
        raise ValueError(f"{field} must be in [0, {vocab}), got {got}")
