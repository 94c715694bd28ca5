"""What an engine behind HTTP is asked before it is trusted: two tiny generations that
tell what its log-probs mean.

A log-prob that is trained on must be the one with which the token was sampled: at the
request's temperature, before top-k and top-p cut the distribution
(`schema.serving.Sampling`). Servers differ: SGLang gives those, vLLM by default those
at temperature 1, with `--logprobs-mode processed_logprobs` those after the cuts. The
difference is silent, so it is measured: the most probable tokens once at temperature 0,
and once more as the only ones left by `top_k = 1` at temperature 2.

Where the checkpoint is at hand, a third generation is compared with what its weights
give in float32: vLLM by default computes a float32 checkpoint in bfloat16, in which
about half of all log-probs are off by more than `EXACT`.
"""

import enum
from collections.abc import Sequence
from itertools import takewhile

from rollweave.schema.serving import GenerateRequest, GenerateResult, Sampling

HOT = 2.0
"""Temperature of the second generation: at it, the most probable tokens are clearly
less probable than at 1.
"""

TOKENS = 8
"""Tokens of a probe: enough that not all are certain, few enough to cost nothing."""

NOISE = 0.02
"""How far the log-probs of one token may lie apart between two batches, in half
precision.
"""


EXACT_TOKENS = 32
"""Number of tokens in the third generation: if half of all tokens are off, 32 are right
by chance once in 4 billion times.
"""

EXACT = 1e-4
"""Maximum difference of log-probs between two float32 implementations: vLLM's and ours
differ by at most 2e-5.
"""

OTHER_WEIGHTS = 0.5
"""Mean difference of log-probs that rounding cannot explain."""


class Logprobs(enum.Enum):
    """What a server's log-probs are of."""

    SAMPLED = "the distribution at the request's temperature"
    RAW = "the distribution at temperature 1"
    CUT = "what top-k and top-p left of the distribution"
    UNKNOWN = "a distribution that a probe could not tell"
    NONE = "nothing: the server gives text only"


def probes(vocab: int) -> tuple[GenerateRequest, GenerateRequest]:
    """The two generations, of a model of `vocab` tokens."""
    tokens = tuple(number % vocab for number in (3, 1, 4, 1, 5))
    cold = Sampling(temperature=0.0, max_tokens=TOKENS)
    hot = Sampling(temperature=HOT, top_k=1, max_tokens=TOKENS)
    return (
        GenerateRequest(id="probe-cold", tokens=tokens, sampling=cold),
        GenerateRequest(id="probe-hot", tokens=tokens, sampling=hot),
    )


def exact_probe(vocab: int) -> GenerateRequest:
    """Return the third generation: at temperature 1, where tokens are far from certain,
    so that rounding shows.
    """
    first, _ = probes(vocab)
    return GenerateRequest(
        id="probe-exact",
        tokens=first.tokens,
        sampling=Sampling(temperature=1.0, max_tokens=EXACT_TOKENS, seed=1),
    )


def inexactness(theirs: Sequence[float], ours: Sequence[float]) -> str:
    """Describe how the engine's log-probs differ from the checkpoint's in float32, and
    what to do; "" if they agree.

    Raises ValueError if the two are not of the same tokens.
    """
    apart = [abs(one - other) for one, other in zip(theirs, ours, strict=True)]
    off = sum(distance > EXACT for distance in apart)
    if not off:
        return ""
    mean = sum(apart) / len(apart)
    found = (
        f"{off} of {len(apart)} probed log-probs are off by more than {EXACT:g} (the largest by "
        f"{max(apart):.2g})"
    )
    if mean > OTHER_WEIGHTS:
        return f"{found}: it has other weights than the checkpoint"
    return (
        f"{found}: it computes in less than float32, or its weights have changed since; vLLM "
        "computes a float32 checkpoint "
        "in bfloat16 unless it is started with --dtype float32"
    )


def kind_of(cold: GenerateResult, hot: GenerateResult) -> Logprobs:
    """What the two answers tell, over the tokens that they share."""
    if cold.text_only:
        return Logprobs.NONE
    shared = sum(
        1
        for _ in takewhile(
            lambda pair: pair[0] == pair[1], zip(cold.tokens, hot.tokens, strict=False)
        )
    )
    at_1, at_hot, noise = _sum(cold.logprobs, shared), _sum(hot.logprobs, shared), NOISE * shared
    if at_1 >= -2 * noise:
        return Logprobs.UNKNOWN  # no token is shared, or all are certain at any temperature
    if abs(at_hot - at_1) <= noise:
        return Logprobs.RAW
    if at_hot >= -noise:
        return Logprobs.CUT
    return Logprobs.SAMPLED if at_hot < at_1 else Logprobs.UNKNOWN


def objection(kind: Logprobs, sampling: Sampling) -> str:
    """Why the log-probs of such a request would not be those that it is sampled with,
    or "".
    """
    whole = sampling.top_p == 1 and not sampling.top_k and not sampling.allowed
    plain = sampling.temperature in (0.0, 1.0)
    match kind:
        case Logprobs.RAW if not plain:
            return (
                f"{_says(kind)}, so sampling.temperature must be 0 or 1, got {sampling.temperature}"
            )
        case Logprobs.CUT if not whole:
            return f"{_says(kind)}, so sampling must have no top_p, top_k or allowed"
        case Logprobs.UNKNOWN if not (plain and whole):
            return (
                f"{_says(kind)}, so sampling must be at temperature 0 or 1, without top_p, top_k "
                "or allowed"
            )
        case _:
            return ""


def _says(kind: Logprobs) -> str:
    return f"its log-probs are of {kind.value}"


def _sum(logprobs: Sequence[float], count: int) -> float:
    return sum(logprobs[:count])
