"""Decide whether a server is healthy, from checks of it; and whether the log-probs of
an engine differ from the trainer's by more than rounding, because it computes with
other weights than the trainer believes.
"""

from collections.abc import Mapping

MAX_GAP = {"float32": 1e-3, "bfloat16": 0.1}
"""Maximum mean difference that rounding explains, by the least precise number format
among weights and activations.
"""

GAP = "logprob_gap/"
"""Beginning of the names of the metrics by engine (`train/update.py`)."""


def max_gap(*formats: str) -> float:
    """Return the maximum gap where numbers have these formats."""
    return max(MAX_GAP[name] for name in formats)


def wide_gaps(values: Mapping[str, float], limit: float) -> dict[str, float]:
    """Return each engine's gap that is wider than `limit`."""
    gaps = {name.removeprefix(GAP): gap for name, gap in values.items() if name.startswith(GAP)}
    return {engine: gap for engine, gap in gaps.items() if not gap <= limit}


DOWN_AFTER = 3
"""Number of failed checks in a row that make a server unhealthy: one failure may be a
lost packet, two failures a pause.
"""

UP_AFTER = 2
"""Number of good checks in a row that make it healthy again, so that a server that
flaps stays out.
"""


class Hysteresis:
    """Health by checks, which changes only after several contrary checks in a row."""

    def __init__(self, *, healthy: bool = False) -> None:
        self.healthy = healthy
        self._needed = {True: UP_AFTER, False: DOWN_AFTER}
        self._against = 0

    def observe(self, good: bool) -> bool:
        """Record one check and return whether the server is healthy now."""
        self._against = 0 if good is self.healthy else self._against + 1
        if self._against >= self._needed[good]:
            self.healthy, self._against = good, 0
        return self.healthy
