"""Probes an engine behind HTTP before its results are trusted: two tiny generations
show which distribution its log-probs are of.

A log-prob used in training must be the one with which the token was sampled: at the
request's temperature, before top-k and top-p truncate the distribution
(`schema.serving.Sampling`). Servers differ: SGLang returns those, vLLM by default those
at temperature 1, and with `--logprobs-mode processed_logprobs` those after truncation.
The difference is silent, so it is measured: the most probable tokens are generated once
at temperature 0, and once more at temperature 2, where `top_k = 1` leaves only them.
"""

import enum
from collections.abc import Sequence
from itertools import takewhile

from rollweave.schema.serving import GenerateRequest, GenerateResult, Sampling

HOT = 2.0
"""Temperature of the second generation, at which the most probable tokens are clearly
less probable than at 1.
"""

TOKENS = 8
"""Number of tokens in a probe: enough that not all are certain, few enough to cost
nothing.
"""

NOISE = 0.02
"""Maximum difference of the log-probs of one token between two batches, in half
precision.
"""


class Logprobs(enum.Enum):
    """The distribution that a server's log-probs are of."""

    SAMPLED = "the distribution at the request's temperature"
    RAW = "the distribution at temperature 1"
    CUT = "what top-k and top-p left of the distribution"
    UNKNOWN = "a distribution that a probe could not identify"


def probes(vocab: int) -> tuple[GenerateRequest, GenerateRequest]:
    """Return the first two generations, for a model of `vocab` tokens."""
    tokens = tuple(number % vocab for number in (3, 1, 4, 1, 5))
    greedy = Sampling(temperature=0.0, max_tokens=TOKENS)
    hot = Sampling(temperature=HOT, top_k=1, max_tokens=TOKENS)
    return (
        GenerateRequest(id="probe-greedy", tokens=tokens, sampling=greedy),
        GenerateRequest(id="probe-hot", tokens=tokens, sampling=hot),
    )


def logprobs_kind(greedy: GenerateResult, hot: GenerateResult) -> Logprobs:
    """Classify a server's log-probs by the two results, over the tokens that they
    share.
    """
    shared = sum(
        1
        for _ in takewhile(
            lambda pair: pair[0] == pair[1], zip(greedy.tokens, hot.tokens, strict=False)
        )
    )
    at_1, at_hot, noise = _sum(greedy.logprobs, shared), _sum(hot.logprobs, shared), NOISE * shared
    if at_1 >= -2 * noise:
        return Logprobs.UNKNOWN  # no token is shared, or all are certain at any temperature
    if abs(at_hot - at_1) <= noise:
        return Logprobs.RAW
    if at_hot >= -noise:
        return Logprobs.CUT
    return Logprobs.SAMPLED if at_hot < at_1 else Logprobs.UNKNOWN


def objection(kind: Logprobs, sampling: Sampling) -> str:
    """Return why the log-probs of such a request would not be those with which it is
    sampled; "" if they are.
    """
    untruncated = sampling.top_p == 1 and not sampling.top_k and not sampling.allowed
    unscaled = sampling.temperature in (0.0, 1.0)
    match kind:
        case Logprobs.RAW if not unscaled:
            return (
                f"{_prefix(kind)}, so sampling.temperature must be 0 or 1, "
                f"got {sampling.temperature}"
            )
        case Logprobs.CUT if not untruncated:
            return f"{_prefix(kind)}, so sampling must have no top_p, top_k or allowed"
        case Logprobs.UNKNOWN if not (unscaled and untruncated):
            return (
                f"{_prefix(kind)}, so sampling must be at temperature 0 or 1, without top_p, top_k "
                "or allowed"
            )
        case _:
            return ""


def _prefix(kind: Logprobs) -> str:
    return f"its log-probs are of {kind.value}"


def _sum(logprobs: Sequence[float], count: int) -> float:
    return sum(logprobs[:count])
