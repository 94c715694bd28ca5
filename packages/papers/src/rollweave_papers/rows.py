"""The form of a result: one row of an experiment with the published value and ours.

Invariant: `published` quotes the text of a paper (a number, or the two ends of a
range), as `published.toml` has it for the row; it is None where our copy does not state
it. Nothing in the simulator is fitted to these numbers; a miss stays in the table with
its reason in `note`.
"""

import tomllib
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import force_setattr

from rollweave.schema.base import Struct

Published = float | tuple[float, float] | None

PUBLISHED: dict[str, dict[str, Published]] = msgspec.convert(
    tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8")),
    dict[str, dict[str, Published]],
)
"""The published values by experiment and row."""


class Row(Struct, frozen=True, kw_only=True):
    """One row. `ours` is None where the row is missing: `note` then names the missing
    feature. `own` marks our own variants.
    """

    experiment: str
    row: str
    ours: float | None
    published: Published = None
    unit: str = "×"
    note: str = ""
    own: bool = False

    def __post_init__(self) -> None:
        if self.published is None:
            known = PUBLISHED.get(self.experiment, {})
            force_setattr(self, "published", known.get(self.row))

    @property
    def ratio(self) -> float | None:
        """Return ours over the published number; over the nearer end of a range, 1
        inside it.
        """
        if self.ours is None or self.published is None:
            return None
        if isinstance(self.published, tuple):
            low, high = self.published
            nearest = min(max(self.ours, low), high)
            return self.ours / nearest if nearest else None
        return self.ours / self.published if self.published else None


class Experiment(Struct, frozen=True, kw_only=True):
    """`run(quick)` returns the rows; quick ones are smaller or fewer, as their notes
    state.
    """

    name: str
    title: str
    source: str
    run: Callable[[bool], list[Row]]
