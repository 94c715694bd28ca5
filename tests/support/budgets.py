"""The size of the project beside what it should be: `make budgets` prints the table,
and `tests/test_budgets.py` holds the ceilings.

A ceiling may only fall. Where the aim is reached, it is the aim; a feature that needs
more room names what leaves. (Three rose once, when the mechanisms of the core got rooms
of their own: lines and modules of `src`, and lines of tests, with the journals that
guard the core.)
"""

from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import rollweave
from rollweave.core.run import Mechanism
from rollweave.core.state import Engine, Trajectory
from rollweave.schema.config.conflicts import CONFLICTS
from rollweave.schema.config.loading import settings_of
from rollweave.schema.config.root import RunConfig

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/rollweave"


class Budget(NamedTuple):
    """A measure of the project."""

    name: str
    measure: Callable[[], int]
    ceiling: int
    aim: int


def _lines(paths: Iterable[Path]) -> list[int]:
    return [len(path.read_bytes().splitlines()) for path in paths]


def _benchmarks() -> Iterable[Path]:
    """Yield the modules of all benchmarks, also of the distributions' benchmarks."""
    for folder in (ROOT / "benchmarks", *ROOT.glob("packages/*/benchmarks")):
        yield from folder.rglob("*.py")


def _broken_rules() -> int:
    """Count the rules between values, each of which yields an error of its own."""
    sections = (SOURCE / "schema/config").glob("*.py")
    return sum(path.read_text().count("yield FieldError(") for path in sections)


def _conditions() -> int:
    """Count the conditions under which settings must be left out."""
    return len(CONFLICTS)


BUDGETS = (
    Budget("lines of src/rollweave", lambda: sum(_lines(SOURCE.rglob("*.py"))), 98_000, 98_000),
    Budget("modules of src/rollweave", lambda: len([*SOURCE.rglob("*.py")]), 400, 400),
    Budget("lines of core/*.py", lambda: sum(_lines((SOURCE / "core").glob("*.py"))), 6_000, 6_000),
    Budget("fields of an engine", lambda: len(Engine.__struct_fields__), 20, 20),
    Budget("fields of a trajectory", lambda: len(Trajectory.__struct_fields__), 25, 25),
    Budget("fields of a mechanism", lambda: len(fields(Mechanism)), 12, 12),
    Budget("settings", lambda: len(settings_of(RunConfig)), 130, 130),
    Budget("conditions of settings that exclude each other", _conditions, 30, 30),
    Budget("rules between values of settings", _broken_rules, 30, 30),
    Budget("public names", lambda: len(rollweave.__all__), 35, 35),
    Budget(
        "lines of benchmarks",
        lambda: sum(_lines((ROOT / "benchmarks").rglob("*.py"))),
        10_000,
        10_000,
    ),
    Budget(
        "lines of the largest file of benchmarks",
        lambda: max(_lines(_benchmarks())),
        300,
        300,
    ),
    Budget("lines of tests", lambda: sum(_lines((ROOT / "tests").rglob("*.py"))), 90_000, 90_000),
)


def main() -> None:
    print(f"{'':48}{'now':>9}{'ceiling':>9}{'aim':>9}")
    for name, measure, ceiling, aim in BUDGETS:
        print(f"{name:48}{measure():>9,}{ceiling:>9,}{aim:>9,}")


if __name__ == "__main__":
    main()
