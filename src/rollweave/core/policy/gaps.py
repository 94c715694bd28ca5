"""Tell rounding from larger differences between the log-probs of the trainer and of an
engine, which may compute with other weights than the trainer believes.
"""

from collections.abc import Mapping

MAX_GAP = {"float32": 1e-3, "bfloat16": 0.1}
"""Maximum mean difference that rounding explains, by the least precise number format
among weights and activations.
"""

GAP = "logprob_gap/"
"""Beginning of the names of the metrics by engine (`train/metrics.py`)."""


def max_gap(*formats: str) -> float:
    """Return the maximum gap where numbers have these formats."""
    return max(MAX_GAP[name] for name in formats)


def wide_gaps(values: Mapping[str, float], limit: float) -> dict[str, float]:
    """Return each engine's gap that is wider than `limit`."""
    gaps = {name.removeprefix(GAP): gap for name, gap in values.items() if name.startswith(GAP)}
    return {engine: gap for engine, gap in gaps.items() if not gap <= limit}
