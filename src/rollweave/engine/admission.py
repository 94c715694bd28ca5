"""Validates requests before the engine accepts them: it refuses those that it cannot
compute or that would harm others.
"""

import math
from typing import Final

from rollweave.schema.serving import GenerateRequest, Sampling

MOST_STOPS: Final = 64
"""Maximum number of stop strings of a request, each of which is sought after every
token.
"""

MOST_STOP_CHARS: Final = 4096
"""Maximum characters of a stop string."""

MOST_STOP_IDS: Final = 4096
"""Maximum number of stop tokens, and of banned words, of a request."""


def validate(request: GenerateRequest, *, vocab: int, max_context: int) -> None:
    """Raise ValueError, naming the invalid field, if the engine cannot serve
    `request`.
    """
    sampling = request.sampling
    if not request.tokens:
        raise ValueError("tokens must have at least one token, got none")
    if len(request.tokens) >= max_context:
        raise ValueError(
            f"tokens must leave room in the context of {max_context} tokens, got a prompt of "
            f"{len(request.tokens)}"
        )
    _in_vocabulary("tokens", request.tokens, vocab)
    if not math.isfinite(request.rank):
        raise ValueError(f"rank must be finite, got {request.rank}")
    if not request.budget_s >= 0:
        raise ValueError(f"budget_s must be 0 (none) or more, got {request.budget_s}")
    _check_lists(sampling, vocab)
    if any(not 0 <= token < vocab for token in request.logprob_ids):
        raise ValueError(f"logprob_ids must be in [0, {vocab}), got {request.logprob_ids}")
    _check_adjustments(sampling, vocab)
    if request.resumed is not None:
        _in_vocabulary("resumed.tokens", request.resumed.tokens, vocab)
        if not all(map(math.isfinite, request.resumed.logprobs)):
            raise ValueError("resumed.logprobs must be finite")


def _check_lists(sampling: Sampling, vocab: int) -> None:
    """Raise ValueError for lists whose length costs the engine time at each step."""
    for field, values, most in (
        ("stop", sampling.stop, MOST_STOPS),
        ("stop_token_ids", sampling.stop_token_ids, MOST_STOP_IDS),
        ("allowed", sampling.allowed, vocab),
    ):
        if len(values) > most:
            raise ValueError(f"sampling.{field} must have at most {most}, got {len(values)}")
    longest = max(map(len, sampling.stop), default=0)
    if longest > MOST_STOP_CHARS:
        raise ValueError(
            f"sampling.stop must have strings of at most {MOST_STOP_CHARS} characters, got one "
            f"of {longest}"
        )
    if sampling.allowed and not 0 <= min(sampling.allowed) <= max(sampling.allowed) < vocab:
        wrong = next(token for token in sampling.allowed if not 0 <= token < vocab)
        raise ValueError(f"sampling.allowed must be in [0, {vocab}), got {wrong}")


def _check_adjustments(sampling: Sampling, vocab: int) -> None:
    adjustments = sampling.adjustments
    if adjustments is None:
        return
    for field, count, most in (
        ("logit_bias", len(adjustments.bias), vocab),
        ("bad_words", len(adjustments.banned), MOST_STOP_IDS),
    ):
        if count > most:
            raise ValueError(f"{field} must have at most {most}, got {count}")
    if adjustments.bias:
        _in_vocabulary("logit_bias", tuple(token for token, _ in adjustments.bias), vocab)
    for word in adjustments.banned:
        _in_vocabulary("bad_words", word, vocab)


def _in_vocabulary(field: str, tokens: tuple[int, ...], vocab: int) -> None:
    if not 0 <= min(tokens) <= max(tokens) < vocab:
        got = f"{min(tokens)} to {max(tokens)}: out of vocabulary"
        raise ValueError(f"{field} must be in [0, {vocab}), got {got}")
