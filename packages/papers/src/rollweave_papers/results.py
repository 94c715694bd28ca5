"""The form of a result: one row of an experiment, with the published value and ours.

Invariants: `published` quotes the text of a paper (a number, or the two ends of a
range, of which one is infinite where the text states a direction alone), as
`published.toml` has it for the row; it is None where our copy does not state it.
Nothing in the simulator is fitted to these numbers; a miss stays in the table with its
`reason`, and so does a missing row. `note` has only conditions and what was measured.
"""

import math
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from rollweave.schema.base import Struct
from rollweave_papers.reasons import NotKnown, Reason, reason_of

Published = float | tuple[float, float] | None

PUBLISHED: dict[str, dict[str, Published]] = msgspec.convert(
    tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8")),
    dict[str, dict[str, Published]],
)
"""The published values by experiment and row."""

CLOSE, NEAR = 0.1, 0.25
"""Deviations from the published value: above `CLOSE`, a row misses and has a reason."""

NO_DIFFERENCE = 0.005
"""A ratio within this distance of 1 shows no difference, as tables have two decimals;
so does a change within this share.
"""

AGREES, DIFFERS = "agrees", "differs"
"""Signs of a row: whether ours and the published value are on the same side of no
difference.
"""


class Row(Struct, frozen=True, kw_only=True):
    """One row. `ours` is None where the row is missing: `note` then names the missing
    feature. `own` marks our own variants. `seeds` are the least and the greatest value
    over the seeds of which `ours` is the mean, and `open_range` those over numbers that
    the papers leave open, of which `ours` has one. `is_change` marks a percentage of
    which 0 is no difference. An `Experiment` adds its name, what was published, and the
    reason.
    """

    row: str
    ours: float | None
    experiment: str = ""
    published: Published = None
    unit: str = "×"
    note: str = ""
    own: bool = False
    seeds: tuple[float, float] | None = None
    open_range: tuple[float, float] | None = None
    is_change: bool = False
    reason: Reason | None = None

    @property
    def ratio(self) -> float | None:
        """Return ours over the published number; over the nearer end of a range, 1
        inside it; None where one is missing, or a direction alone is published. Of a
        range of ours, the nearest value counts.
        """
        if self.ours is None or self.published is None:
            return None
        low, high = _ends(self.published)
        if math.isinf(high):
            return None
        least, most = self.open_range or (self.ours, self.ours)
        ours = min(max(low, least), most)
        nearest = min(max(ours, low), high)
        return ours / nearest if nearest else None

    @property
    def sign(self) -> str:
        """Return whether ours and the published value are on the same side of no
        difference, `AGREES` or `DIFFERS`; "" where one is missing, where the row is
        neither a ratio nor a change, and where what is published, or a range of ours,
        has no side.
        """
        if self.ours is None or self.published is None:
            return ""
        neutral = 0.0 if self.is_change else 1.0 if self.unit == "×" else None
        if neutral is None:
            return ""
        scale = 100.0 if self.is_change else 1.0
        low, high = _ends(self.published)
        sides = {_side((end - neutral) / scale) for end in (low, high)} - {0}
        if len(sides) != 1:
            return ""
        ours = {_side((end - neutral) / scale) for end in self.open_range or (self.ours,)}
        if len(ours) > 1:
            return ""
        inside = low <= self.ours <= high
        return AGREES if inside or ours <= sides else DIFFERS

    @property
    def misses(self) -> bool:
        """Return whether ours deviates by more than a tenth from what was published, by
        the ratio that tables show.
        """
        return self.ratio is not None and not is_within(self.ratio, CLOSE)


def _ends(published: float | tuple[float, float]) -> tuple[float, float]:
    return published if isinstance(published, tuple) else (published, published)


def _side(difference: float) -> int:
    """Return on which side of no difference a value is: -1, 0 or 1."""
    return 0 if abs(difference) < NO_DIFFERENCE else 1 if difference > 0 else -1


def is_within(ratio: float, deviation: float) -> bool:
    """Return whether a ratio, with the two decimals that tables show, deviates from 1
    by at most that much.
    """
    return abs(round(ratio, 2) - 1) <= deviation + 1e-9


def span(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the least and the greatest of values by seed; None if there is only
    one.
    """
    return (min(values), max(values)) if len(values) > 1 else None


class Experiment(Struct, frozen=True):
    """`run(quick)` returns what was simulated; quick rows are smaller or fewer, as
    their notes state.
    """

    name: str
    title: str
    source: str
    run: Callable[[bool], list[Row]]

    def rows(self, quick: bool) -> list[Row]:
        """Return the rows of the experiment, beside what was published, each with its
        reason where it needs one.
        """
        known = PUBLISHED.get(self.name, {})
        return [
            with_reason(replace(row, experiment=self.name, published=known.get(row.row)))
            for row in self.run(quick)
        ]


def with_reason(row: Row) -> Row:
    """Return the row with its reason of `reasons.toml`.

    A row that agrees with what was published, in size and sign, has none. A row that
    does not, and for which none is written, has a cause that is not known.
    """
    wrong = row.misses or row.sign == DIFFERS
    if not wrong and (row.ratio is not None or row.sign):
        return row
    reason = reason_of(row.experiment, row.row)
    return replace(row, reason=NotKnown() if reason is None and wrong else reason)
