"""The result of a bench: named figures, and the conditions that give them meaning.

Invariant: a figure that could not be measured is None, and `conditions` has the reason
under the figure's name.
"""

import json
from collections.abc import Sequence
from typing import Any, Self

from rollweave.schema.base import Struct

Figure = float | int | list[float] | None

PROMISES = (
    "violations",
    "mismatches",
    "token_mismatches",
    "version_span_errors",
    "unaccounted",
    "lost_trajectories",
    "lost_with_loans",
    "trained_twice",
    "mixed_versions",
    "leftovers",
    "silently_ignored",
    "refused_as_installed",
    "sequences_split_without_reason",
)
"""Figures that must be 0: otherwise the bench has failed."""


class Result(Struct, frozen=True, kw_only=True):
    """The result of one bench. `conditions` is JSON."""

    bench: str
    figures: dict[str, Figure]
    conditions: dict[str, Any]

    @classmethod
    def not_measured(cls, bench: str, figures: Sequence[str], why: str) -> Self:
        """Return the result of a bench that could measure none of its figures."""
        reasons = dict.fromkeys(figures, f"not measured: {why}")
        return cls(bench=bench, figures=dict.fromkeys(figures), conditions=reasons)

    @property
    def broken(self) -> list[str]:
        """Return the promises that do not hold."""
        return [promise for promise in PROMISES if self.figures.get(promise)]


def json_line(result: Result, machine: dict[str, Any]) -> str:
    """Return the line of JSON that ends a bench's output."""
    return json.dumps(
        {
            "bench": result.bench,
            "machine": machine,
            "figures": result.figures,
            "conditions": result.conditions,
        }
    )
