"""What a bench gives: named figures, and the conditions without which they mean
nothing.

Invariant: a figure that could not be measured is None, and `conditions` says why under
the figure's name.
"""

import json
from typing import Any

from rollweave.schema.base import Struct

Figure = float | int | list[float] | None

PROMISES = (
    "violations",
    "escapes",
    "mismatches",
    "unaccounted",
    "trained_twice",
    "mixed_versions",
    "leftovers",
)
"""Figures that have to be 0: else the bench has failed."""


class Result(Struct, frozen=True, kw_only=True):
    """Of one bench. `conditions` is JSON."""

    bench: str
    figures: dict[str, Figure]
    conditions: dict[str, Any]

    @property
    def broken(self) -> list[str]:
        """Promises that do not hold."""
        return [promise for promise in PROMISES if self.figures.get(promise)]


def json_line(result: Result, machine: dict[str, Any]) -> str:
    """The one line of JSON that ends a bench's output."""
    return json.dumps(
        {
            "bench": result.bench,
            "machine": machine,
            "figures": result.figures,
            "conditions": result.conditions,
        }
    )
