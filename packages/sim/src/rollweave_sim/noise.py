"""The noise of an engine's steps, drawn from measured steps: a step takes longer or
shorter than the same work on average, so that what was profiled is not exactly what
executes.

Invariants: the mean of the factors is 1, so that noise changes no total in the mean;
equal seeds draw equal factors.
"""

import bisect
import itertools
import math
import random

MEASURED_STEPS = (
    (0.00, 5.657),
    (0.01, 7.746),
    (0.05, 7.769),
    (0.10, 7.781),
    (0.25, 7.797),
    (0.50, 7.815),
    (0.75, 7.840),
    (0.90, 7.882),
    (0.95, 8.055),
    (0.98, 8.099),
    (0.99, 8.337),
    (1.00, 10.037),
)
"""Milliseconds of a step by the share of steps that are at most as long: 277 steps in a
row, in which vLLM 0.5.4 decodes one sequence of Mistral-7B-Instruct-v0.3 on one H100
(LambdaLabsML/vllm-benchmark, commit de55d46e, 2024-08-19, `itls` of
`results/prompt_10/1xH100-80GB-SXM/Mistral-7B-Instruct-v0.3_tp1_len2000.json`). Larger
batches have the same relative noise here, which was not measured.
"""


def _relative(measured: tuple[tuple[float, float], ...]) -> tuple[list[float], list[float]]:
    """Return the shares of steps, and their seconds over the mean of the distribution
    that is linear between them.
    """
    mean = sum(
        (after - before) * (low + high) / 2
        for (before, low), (after, high) in itertools.pairwise(measured)
    )
    return [share for share, _ in measured], [seconds / mean for _, seconds in measured]


_SHARES, _FACTORS = _relative(MEASURED_STEPS)


class Noise:
    """The noise of one engine's steps; engines of different `seed` are independent."""

    def __init__(self, seed: str) -> None:
        self._draw = random.Random(f"steps/{seed}").random

    def factor(self, steps: int = 1) -> float:
        """Draw the seconds of `steps` steps over their mean.

        For several steps the deviation of one step is divided by the root of their
        number, as that of a mean of independent steps.
        """
        share = self._draw()
        at = bisect.bisect_right(_SHARES, share)
        low, high = _FACTORS[at - 1], _FACTORS[at]
        one = low + (high - low) * (share - _SHARES[at - 1]) / (_SHARES[at] - _SHARES[at - 1])
        return one if steps == 1 else 1 + (one - 1) / math.sqrt(steps)
