"""Solves by linear programs over statistics of trajectories which constraints on a
family hold together, and what they leave to its free numbers.

Invariants: `STRUCTURE` holds for every distribution of lengths and seconds, so what is
found contradictory is so whatever the distribution. An interval may be wider than the
values that distributions reach, never narrower. All statistics are at least 0.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from rollweave.schema.base import Struct
from rollweave_papers.constraints import QUANTITIES, Constraint, Form, Quantity

SMALL = 3
"""Contradictions of at most so many constraints are found in the order of their size;
larger ones by leaving out one constraint after the other.
"""

AT_MOST: tuple[tuple[str, str], ...] = (
    ("turns.least", "turns.mean"),
    ("turns.mean", "turns.most"),
    ("prompt.mean", "prompt.cap"),
    ("response.p50", "response.p75"),
    ("response.p75", "response.p99"),
    ("response.p99", "response.cap"),
    ("response.cap", "context.cap"),
    ("prompt.cap", "context.cap"),
    ("env_s.p50", "env_s.cap"),
    ("env_s.mean", "env_s.cap"),
    ("reward_s.mean", "reward_s.cap"),
    ("judge_s.mean", "reward_s.mean"),
    ("init_s.mean", "init_s.cap"),
    ("init.hangs", "init.fails"),
    ("init.hangs", "init.late"),
)
"""Statistics of which the first is at most the second. A reset that hangs takes more
than a minute.
"""

AT_LEAST_ONE = ("turns.least",)
SHARES = ("init.fails", "init.late", "groups.varied")

STRUCTURE: tuple[Form, ...] = (
    *({small: 1.0, large: -1.0} for small, large in AT_MOST),
    *({"1": 1.0, name: -1.0} for name in AT_LEAST_ONE),
    *({name: 1.0, "1": -1.0} for name in SHARES),
    {"response.mean": 1.0, "sampled.mean": -1.0, "observed.mean": -1.0},
    {"response.mean": -1.0, "sampled.mean": 1.0, "observed.mean": 1.0},
    {"turns.mean": 1.0, "sampled.mean": -1.0},  # a turn samples a token or more
    {"prompt.mean": 1.0, "response.mean": 1.0, "context.cap": -1.0},
    # what lies between the median, the third quartile and the last percent
    {"response.p50": 0.25, "response.p75": 0.24, "response.p99": 0.01, "response.mean": -1.0},
    {
        "response.mean": 1.0,
        "response.p50": -0.5,
        "response.p75": -0.25,
        "response.p99": -0.24,
        "response.cap": -0.01,
    },
    {"env_s.p50": 0.5, "env_s.mean": -1.0},
    {"env_s.mean": 1.0, "env_s.p50": -0.5, "env_s.cap": -0.5},
)
"""Linear forms that are at most 0 for every family."""

MEMBERS = 16
"""Trajectories of a batch that may have the same length, as members of a group."""


def _of_batch(of: int) -> Iterator[Form]:
    """Yield forms that are at most 0 for the longest of `of` trajectories."""
    longest, sampled, turns = (f"{name}.longest@{of}" for name in ("response", "sampled", "turns"))
    slowest = f"init_s.slowest@{of}"
    for mean, most, cap in (
        ("response.mean", longest, "response.cap"),
        ("sampled.mean", sampled, "response.cap"),
        ("turns.mean", turns, "turns.most"),
        ("init_s.mean", slowest, "init_s.cap"),
    ):
        yield {mean: 1.0, most: -1.0}
        yield {most: 1.0, cap: -1.0}
        yield {most: 1.0, mean: -float(of)}
    yield {sampled: 1.0, longest: -1.0}
    for name, share in (("response.p75", 0.25), ("response.p99", 0.01)):
        yield {name: 1 - (1 - share) ** max(1, of // MEMBERS), longest: -1.0}


class Bound(Struct, frozen=True, kw_only=True):
    """A linear form of statistics that is at most 0."""

    form: Form


class Interval(Struct, frozen=True, kw_only=True):
    """The values that constraints leave to a quantity; `high` may be infinite."""

    low: float
    high: float


class Verdict(Struct, frozen=True, kw_only=True):
    """The contradictions among the constraints of a family, each of which cannot hold,
    while every part of it can. `dropped` are the constraints left out so that the
    others hold: of each contradiction the last.
    """

    contradictions: tuple[tuple[Constraint, ...], ...]
    dropped: tuple[Constraint, ...]


def bounds_of(constraint: Constraint, unit: float = 1.0) -> list[Bound]:
    """Return a constraint as linear forms, where the family of `than` has `unit`."""
    bounds = []
    for sign, value in ((-1.0, constraint.at_least), (1.0, constraint.at_most)):
        if value is not None:
            form = {name: sign * one for name, one in constraint.above.items()}
            for name, one in constraint.per.items():
                form[name] = form.get(name, 0.0) - sign * value * unit * one
            bounds.append(Bound(form=form))
    return bounds


class Program:
    """The linear program of some bounds, with all that holds for every family."""

    def __init__(self, bounds: Sequence[Bound], batches: Sequence[int]) -> None:
        forms = [*STRUCTURE, *(one.form for one in bounds)]
        for of in batches:
            forms += _of_batch(of)
        for small, large in itertools.pairwise(sorted(batches)):
            forms += [
                {f"{name}@{small}": 1.0, f"{name}@{large}": -1.0}
                for name in ("response.longest", "sampled.longest", "turns.longest")
            ]
        names = {name for form in forms for name in form} - {"1"}
        self._at = {name: place for place, name in enumerate(sorted(names))}
        self._matrix = np.array([self._row(form) for form in forms])
        self._limits = np.array([-form.get("1", 0.0) for form in forms])

    def _row(self, form: Form) -> npt.NDArray[np.float64]:
        row = np.zeros(len(self._at))
        for name, value in form.items():
            if name != "1":
                row[self._at[name]] = value
        return row

    def feasible(self) -> bool:
        """Return whether some values meet all bounds."""
        return self._least(np.zeros(len(self._at)), self._matrix, self._limits) is not None

    def interval(self, quantity: Quantity) -> Interval:
        """Return the least and the greatest value of a quotient (Charnes and Cooper
        1962): with all values divided by the divisor, it is linear.
        """
        if not {*quantity.above, *quantity.per} <= {*self._at, "1"}:
            return Interval(low=0.0, high=math.inf)  # nothing speaks of it
        above, per = self._row(quantity.above), self._row(quantity.per)
        matrix = np.column_stack((self._matrix, -self._limits))
        equal = np.append(per, quantity.per.get("1", 0.0))
        ends = []
        for sign in (1.0, -1.0):
            goal = sign * np.append(above, quantity.above.get("1", 0.0))
            least = self._least(goal, matrix, np.zeros(len(matrix)), equal)
            ends.append(-math.inf if least is None else least)
        return Interval(low=max(0.0, ends[0]), high=-ends[1])

    def _least(
        self,
        goal: npt.NDArray[np.float64],
        matrix: npt.NDArray[np.float64],
        limits: npt.NDArray[np.float64],
        equal: npt.NDArray[np.float64] | None = None,
    ) -> float | None:
        """Return the least value of a form, or None if no values meet the bounds or it
        has no least value.
        """
        found = linprog(
            goal,
            A_ub=matrix,
            b_ub=limits,
            A_eq=None if equal is None else equal[None, :],
            b_eq=None if equal is None else [1.0],
            method="highs",
        )
        return float(found.fun) if found.status == 0 else None


class System:
    """The constraints on one family; `units` are values of the families of `than`, by
    the name of the constraint.
    """

    def __init__(self, constraints: Sequence[Constraint], units: dict[str, float]) -> None:
        self._constraints = list(constraints)
        self._bounds = {
            one.name: bounds_of(one, units.get(one.name, 1.0)) for one in self._constraints
        }
        self._batches = sorted({one.of for one in self._constraints if one.of})

    def program(self, chosen: Sequence[Constraint]) -> Program:
        """Return the linear program of some of the constraints."""
        bounds = [bound for one in chosen for bound in self._bounds[one.name]]
        return Program(bounds, self._batches)

    def verdict(self) -> Verdict:
        """Return the contradictions, the smallest first, and what remains."""
        left, contradictions, dropped = list(self._constraints), [], []
        while not self.program(left).feasible():
            found = self._smallest(left)
            contradictions.append(found)
            dropped.append(found[-1])
            left.remove(found[-1])
        return Verdict(contradictions=tuple(contradictions), dropped=tuple(dropped))

    def _smallest(self, constraints: Sequence[Constraint]) -> tuple[Constraint, ...]:
        """Return a contradiction among constraints that do not hold together."""
        for size in range(1, SMALL + 1):
            for chosen in itertools.combinations(constraints, size):
                if not self.program(chosen).feasible():
                    return chosen
        needed = list(constraints)
        for one in constraints:
            without = [other for other in needed if other is not one]
            if not self.program(without).feasible():
                needed = without
        return tuple(needed)

    def left_to(self, name: str, verdict: Verdict) -> Interval:
        """Return what the constraints that hold together leave to a quantity."""
        left = [one for one in self._constraints if one not in verdict.dropped]
        return self.program(left).interval(QUANTITIES[name])
