"""`rollweave reproduce --constraints`: what papers state about workloads beside what
our families have, what cannot hold together, and what is left open, as text, Markdown
and values.
"""

import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollweave.cli.console import check_writable, out
from rollweave.io.disk import replace_file
from rollweave.schema.base import Struct
from rollweave.schema.errors import ConfigError
from rollweave_papers.constraint_solver import System, Verdict
from rollweave_papers.constraint_values import quotient, rates, value, value_of
from rollweave_papers.constraints import (
    QUANTITIES,
    STATED,
    USERS,
    Constraint,
    bounds_text,
    number,
    of_family,
    read,
)
from rollweave_papers.tables import PAGE_WIDTH, between
from rollweave_sim.families import FAMILIES

MARKS = "<!-- constraints -->\n", "<!-- /constraints -->\n"
"""Marks in a Markdown file between which the tables are generated."""

SLACK = 0.005
"""Share by which a drawn value may lie outside what is stated, and still hold."""


class Line(Struct, frozen=True, kw_only=True):
    """A constraint on a family, and our value; None if the family has nothing of the
    kind. `unit` is the value of the family in whose units the constraint is.
    """

    constraint: Constraint
    ours: float | None
    unit: float = 1.0

    @property
    def off(self) -> float:
        """Return our value over the nearest end of what is stated, 1 inside it."""
        one, ours = self.constraint, self.ours or 0.0
        if one.at_least is not None and ours < one.at_least * self.unit * (1 - SLACK):
            return ours / (one.at_least * self.unit)
        if one.at_most is not None and ours > one.at_most * self.unit * (1 + SLACK):
            return ours / (one.at_most * self.unit) if one.at_most else float("inf")
        return 1.0

    @property
    def holds(self) -> str:
        """Return whether our value is as stated; if not, what it is times the limit."""
        if self.ours is None:
            return "nothing of the kind"
        return "yes" if self.off == 1.0 else f"no, {number(self.off)} times the limit"


class Free(Struct, frozen=True, kw_only=True):
    """A quantity that no paper fixes: our value, and what the constraints leave."""

    quantity: str
    ours: float | None
    low: float
    high: float

    @property
    def inside(self) -> str:
        """Return whether our value is one that the constraints leave."""
        if self.ours is None:
            return ""
        low, high = self.low * (1 - SLACK), self.high * (1 + SLACK)
        return "yes" if low <= self.ours <= high else "no"

    @property
    def left(self) -> str:
        """Return what the constraints leave as text."""
        if self.low == 0 and self.high == float("inf"):
            return "any"
        if self.high == float("inf"):
            return f"at least {number(self.low)}"
        return f"{number(self.low)} to {number(self.high)}"


class Checked(Struct, frozen=True, kw_only=True):
    """All that is stated of a family."""

    family: str
    lines: tuple[Line, ...]
    verdict: Verdict
    free: tuple[Free, ...]


def check(
    constraints: Sequence[Constraint], family: str, free: Sequence[str], *, search: bool = True
) -> Checked:
    """Compare a family with the constraints on it. Without `search`, no rates of users
    are tried.
    """
    own = of_family(constraints, family)
    units = {one.name: quotient(one.than, one.above, one.per) or 0.0 for one in own if one.than}
    lines = tuple(
        Line(constraint=one, ours=value(family, one), unit=units.get(one.name, 1.0)) for one in own
    )
    system = System(own, units)
    verdict = system.verdict()
    if family in USERS:
        left = _rates(family, own) if search else ()
    else:
        left = tuple(
            Free(quantity=name, ours=value_of(family, name), low=found.low, high=found.high)
            for name in free
            for found in [system.left_to(name, verdict)]
        )
    return Checked(family=family, lines=lines, verdict=verdict, free=left)


def _rates(family: str, constraints: Sequence[Constraint]) -> tuple[Free, ...]:
    """Return the rates of requests that all constraints on users leave."""
    ends = [rates(family, one) for one in constraints]
    low, high = max(end for end, _ in ends), min(end for _, end in ends)
    rate = value_of(family, "requests.rate")
    return (Free(quantity="requests.rate", ours=rate, low=low, high=high),)


def constraints(names: Sequence[str], *, quick: bool, as_json: bool, write: Path | None) -> None:
    """Compare our workloads with what the papers state, or with the file that is named,
    and print the tables. Raises ConfigError, also where a file contradicts itself.
    """
    if len(names) > 1:
        raise ConfigError(f"--constraints takes one FILE, got {', '.join(names)}")
    path = Path(names[0]) if names else STATED
    stated, usual = read(path), read(STATED)
    if write is not None:
        check_writable("--write", write)
    families = [name for name in (*FAMILIES, *USERS) if of_family(stated.constraints, name)]
    checked = []
    for family in families:
        free = stated.free.get(family, usual.free.get(family, ()))
        one = check(stated.constraints, family, free, search=not quick)
        checked.append(one)
        out.print(as_text(one) + "\n", markup=False, soft_wrap=True)
    out.print(sentence(checked), markup=False, soft_wrap=True)
    if write is not None:
        replace_file(write, between(page(checked), write, MARKS).encode())
        out.print(f"written to {write}", markup=False, soft_wrap=True)
    if as_json:
        sys.stdout.write(json.dumps(values(checked)) + "\n")
    wrong = [(one.family, found) for one in checked for found in one.verdict.contradictions]
    if wrong and names:
        family, found = wrong[0]
        raise ConfigError(
            f"{path}: constraints must hold together, got for {family} {contradiction(found)}"
        )


def contradiction(found: Sequence[Constraint]) -> str:
    """Return constraints that cannot hold together, with their numbers."""
    parts = [f"{one.name} ({one.quantity} {bounds_text(one)})" for one in found]
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def sentence(checked: Sequence[Checked]) -> str:
    """Return how many constraints hold, in words."""
    lines = [line for one in checked for line in one.lines]
    missing = sum(line.ours is None for line in lines)
    hold = sum(line.holds == "yes" for line in lines)
    free = [row for one in checked for row in one.free if row.inside]
    wrong = sum(len(one.verdict.contradictions) for one in checked)
    return (
        f"{len(lines)} constraints on {len(checked)} families: {hold} hold, "
        f"{len(lines) - hold - missing} do not, and {missing} speak of something that the family "
        f"does not have. {wrong} sets contradict themselves. Of {len(free)} free quantities, "
        f"{sum(row.inside == 'yes' for row in free)} lie in what the constraints leave."
    )


def _cells(line: Line) -> tuple[str, str, str, str, str]:
    one = line.constraint
    ours = "–" if line.ours is None else number(line.ours)
    return one.name, _quantity(one), bounds_text(one), ours, line.holds


def _quantity(one: Constraint) -> str:
    return f"{one.quantity} of {one.of:,}" if one.of else one.quantity


def as_text(checked: Checked) -> str:
    """Return the table of a family as text."""
    rows = [("constraint", "quantity", "stated", "ours", "holds"), *map(_cells, checked.lines)]
    lines = [checked.family]
    for name, quantity, bounds, ours, holds in rows:
        lines.append(f"  {name:31} {quantity:34} {bounds:24} {ours:>9}  {holds}".rstrip())
    lines += [f"  contradiction: {contradiction(one)}" for one in checked.verdict.contradictions]
    for row in checked.free:
        ours = "–" if row.ours is None else number(row.ours)
        text = f"{row.left} {QUANTITIES[row.quantity].unit}".strip()
        inside = {"no": "outside", "yes": "inside"}.get(row.inside, "")
        lines.append(f"  left open: {row.quantity:20} {text:54} {ours:>9}  {inside}".rstrip())
    return "\n".join(lines)


def page(checked: Sequence[Checked]) -> str:
    """Return the tables in Markdown, below their summary."""
    intro = (
        f"Written by `rollweave reproduce --constraints`: {sentence(checked)} *Ours* are means "
        "and percentiles of trajectories drawn from the family. *Left open* is what all "
        "constraints together allow, without the last one of each contradiction, whatever the "
        "distribution of lengths."
    )
    parts = ["## Stated and ours", textwrap.fill(intro, PAGE_WIDTH)]
    for one in checked:
        parts.append(f"### {one.family}")
        rows = ["| constraint | quantity | stated | ours | holds | the paper says |"]
        rows.append("|---|---|---|---:|---|---|")
        for line in one.lines:
            stated = line.constraint
            reading = f" *Read as*: {stated.reading}." if stated.reading else ""
            cells = " | ".join(_cells(line))
            rows.append(f"| {cells} | {stated.says} ({stated.paper}){reading} |")
        parts.append("\n".join(rows))
        if one.verdict.contradictions:
            wrong = "\n".join(f"- {contradiction(found)}" for found in one.verdict.contradictions)
            parts.append(f"Cannot hold together:\n\n{wrong}")
        if one.free:
            rows = [
                "| left open | what the constraints leave | ours | inside |",
                "|---|---|---:|---|",
            ]
            for row in one.free:
                ours = "–" if row.ours is None else number(row.ours)
                text = f"{row.left} {QUANTITIES[row.quantity].unit}".strip()
                rows.append(f"| {row.quantity} | {text} | {ours} | {row.inside} |")
            parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def values(checked: Sequence[Checked]) -> list[dict[str, Any]]:
    """Return the tables as values; an open end is null."""
    return [
        {
            "family": one.family,
            "constraints": [
                {
                    "name": line.constraint.name,
                    "quantity": line.constraint.quantity,
                    "at_least": line.constraint.at_least,
                    "at_most": line.constraint.at_most,
                    "ours": line.ours,
                    "holds": None if line.ours is None else line.off == 1.0,
                }
                for line in one.lines
            ],
            "contradictions": [
                [found.name for found in wrong] for wrong in one.verdict.contradictions
            ],
            "free": [
                {
                    "quantity": row.quantity,
                    "ours": row.ours,
                    "low": row.low,
                    "high": None if row.high == float("inf") else row.high,
                }
                for row in one.free
            ],
        }
        for one in checked
    ]
