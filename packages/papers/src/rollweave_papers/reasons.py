"""Why a row of ours differs from the published value: reasons of three kinds, written
once in `reasons.toml` by experiment and row.

Invariants: a cause counts as shown only if one thing was varied and a row shows what
that changes, which the reason names. What the papers leave open is not a cause: the
reason then says what their texts do not state. Everything else is not known. A reason
may add what was varied without success, and what was not varied, which is no claim that
it matters.
"""

import fnmatch
import re
import tomllib
from pathlib import Path

import msgspec

from rollweave.schema.base import Struct

CAUSE_SHOWN, NOT_STATED, NOT_KNOWN = KINDS = (
    "cause shown",
    "not stated in the paper",
    "not known",
)
"""The kinds of reasons, as tables name them."""


class CauseShown(Struct, frozen=True, kw_only=True, tag_field="kind", tag=CAUSE_SHOWN):
    """One thing was varied. `shown_by` is the row that shows what it changes, as
    `EXPERIMENT: ROW`.
    """

    cause: str
    shown_by: str


class NotStated(Struct, frozen=True, kw_only=True, tag_field="kind", tag=NOT_STATED):
    """The text of the paper does not state `missing`, which the row depends on."""

    missing: str


class NotKnown(Struct, frozen=True, kw_only=True, tag_field="kind", tag=NOT_KNOWN):
    """No cause is known. `excluded` names what was varied and is not the cause, and
    `not_varied` differences from the paper whose effect was not measured.
    """

    excluded: str = ""
    not_varied: str = ""


Reason = CauseShown | NotStated | NotKnown


class Entry(Struct, frozen=True, kw_only=True):
    """A reason, and the rows that it is for: patterns in which `*` stands for any
    text.
    """

    experiment: str
    rows: tuple[str, ...]
    reason: Reason

    def fits(self, experiment: str, row: str) -> bool:
        """Return whether the reason is for this row."""
        return fnmatch.fnmatchcase(experiment, self.experiment) and any(
            fnmatch.fnmatchcase(row, pattern) for pattern in self.rows
        )


class _File(Struct, frozen=True, kw_only=True):
    reasons: tuple[Entry, ...]


REASONS: tuple[Entry, ...] = msgspec.convert(
    tomllib.loads(Path(__file__).with_name("reasons.toml").read_text(encoding="utf-8")), _File
).reasons
"""All reasons, in the order of the papers."""


def reason_of(experiment: str, row: str) -> Reason | None:
    """Return the reason that is written for this row; None if there is none."""
    return next((entry.reason for entry in REASONS if entry.fits(experiment, row)), None)


def kind_of(reason: Reason) -> str:
    """Return the kind of a reason, one of `KINDS`."""
    match reason:
        case CauseShown():
            return CAUSE_SHOWN
        case NotStated():
            return NOT_STATED
        case NotKnown():
            return NOT_KNOWN


def text_of(reason: Reason) -> str:
    """Return a reason as text, which begins with its kind."""
    match reason:
        case CauseShown():
            return f"{CAUSE_SHOWN}: {reason.cause} ({reason.shown_by})"
        case NotStated():
            return f"{NOT_STATED}: {reason.missing}"
        case NotKnown():
            excluded = f"; excluded: {reason.excluded}" if reason.excluded else ""
            others = f"; not varied: {reason.not_varied}" if reason.not_varied else ""
            return f"{NOT_KNOWN}{excluded}{others}"


def kind_in(text: str) -> str:
    """Return the kind with which a reason's text begins; "" if it begins with none."""
    match = re.match("|".join(map(re.escape, KINDS)), text)
    return match[0] if match else ""
