"""The form of a result: one row of an experiment with the published value and ours.

Invariant: `published` quotes the text of a paper (a number, or the two ends of a
range); it is None where our copy does not state it. Nothing in the simulator is fitted
to these numbers; a miss stays in the table with its reason in `note`.
"""

from collections.abc import Callable

from rollweave.schema.base import Struct

Published = float | tuple[float, float] | None


class Row(Struct, frozen=True, kw_only=True):
    """One row. `ours` is None where the row is missing: `note` then names the missing
    feature. `own` marks our own variants.
    """

    experiment: str
    row: str
    published: Published
    ours: float | None
    unit: str = "×"
    note: str = ""
    own: bool = False

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
