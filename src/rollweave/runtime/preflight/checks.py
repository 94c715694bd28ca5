"""Checks and their display, as used by `doctor` and `--dry-run`."""

import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import ParamSpec

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rollweave.schema.base import Struct
from rollweave.schema.errors import ConfigError, FieldError, FieldErrors

P = ParamSpec("P")

FORCED = "--force"
"""Name of the checks whose failure `--force` has overridden."""


class Status(enum.StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Check(Struct, frozen=True, kw_only=True):
    """The result of one check.

    `detail` describes what was found; for a failure, it names the field, the rule and
    the value. A failure that is `estimated` may be wrong, and `--force` overrides it.
    """

    name: str
    status: Status
    detail: str
    estimated: bool = False


MARKS = {Status.OK: "[green]✓[/]", Status.WARN: "[yellow]![/]", Status.FAIL: "[red]✗[/]"}


def ok(name: str, detail: str) -> Check:
    return Check(name=name, status=Status.OK, detail=detail)


def warn(name: str, detail: str) -> Check:
    return Check(name=name, status=Status.WARN, detail=detail)


def fail(name: str, detail: str) -> Check:
    return Check(name=name, status=Status.FAIL, detail=detail)


def refused(error: FieldError, within: str = "") -> Check:
    """Return the failure that an error is, of a field in the section `within`."""
    return fail(f"{within}.{error.field}".removeprefix("."), error.problem)


def passing(
    name: str, check: Callable[[], str], *errors: type[Exception], within: str = ""
) -> Check:
    """Return what a check has found, or the failure that it raises, which is one of
    `errors`. The field of a `FieldError` is in the section `within`, if that is given.
    """
    try:
        return ok(name, check())
    except errors as error:
        if within and isinstance(error, FieldError):
            return refused(error, within)
        return fail(name, str(error))


def refusing(check: Callable[P, Iterator[Check]]) -> Callable[P, Iterator[Check]]:
    """Let a check end with a failure for each `FieldError` that it raises."""

    @functools.wraps(check)
    def checked(*args: P.args, **kwargs: P.kwargs) -> Iterator[Check]:
        try:
            yield from check(*args, **kwargs)
        except FieldErrors as error:
            yield from map(refused, error.errors)
        except FieldError as error:
            yield refused(error)

    return checked


def failures(checks: Sequence[Check]) -> list[Check]:
    return [check for check in checks if check.status is Status.FAIL]


def forced(checks: Sequence[Check]) -> list[Check]:
    """Return the checks with a warning in place of each failure that is estimated."""
    return [
        warn(FORCED, f"{check.name}: {check.detail}")
        if check.estimated and check.status is Status.FAIL
        else check
        for check in checks
    ]


def must_pass(checks: Sequence[Check]) -> None:
    """Raise ConfigError with one line for each check that failed."""
    lines = [
        f"{check.name}: {check.detail}"
        + (" (an estimate, which --force overrides)" if check.estimated else "")
        for check in failures(checks)
    ]
    if lines:
        raise ConfigError("\n".join(lines))


def show(checks: Sequence[Check], console: Console) -> None:
    """Print a table of marks, names and details."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(width=1)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        table.add_row(MARKS[check.status], escape(check.name), escape(check.detail))
    console.print(table)
