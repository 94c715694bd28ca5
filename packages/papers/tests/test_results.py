"""Rows: the ratio to a number or a range, the sign against a plain reference, and which
rows have a reason.
"""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave_papers.reasons import NotKnown, NotStated, reason_of
from rollweave_papers.results import (
    AGREES,
    DIFFERS,
    PUBLISHED,
    Experiment,
    Published,
    Row,
    is_within,
    span,
)
from tests.support.properties import examples


def row(published: Published = 2.0, ours: float | None = 3.0, **changes: object) -> Row:
    return Row(row="a over b", published=published, ours=ours, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("published", "ours", "ratio"),
    [
        (2.0, 3.0, 1.5),
        ((1.0, 2.0), 0.5, 0.5),
        ((1.0, 2.0), 1.5, 1.0),
        ((1.0, 2.0), 3.0, 1.5),
        ((1.0, math.inf), 3.0, None),
        (None, 3.0, None),
        (2.0, None, None),
        (0.0, 3.0, None),
    ],
)
def test_ratio_uses_the_nearer_end_of_a_range(
    published: Published, ours: float | None, ratio: float | None
) -> None:
    assert row(published, ours).ratio == ratio


@pytest.mark.parametrize(
    ("published", "ours", "sign"),
    [
        (0.53, 1.32, DIFFERS),
        (0.53, 0.9, AGREES),
        (1.21, 1.0, DIFFERS),
        (1.21, 1.004, DIFFERS),
        ((1.3, 1.68), 0.88, DIFFERS),
        ((1.0, 1.22), 1.36, AGREES),
        ((1.0, 1.22), 1.0, AGREES),
        ((1.0, math.inf), 0.93, DIFFERS),
        ((0.8, 1.2), 2.0, ""),
        (1.0, 2.0, ""),
        (None, 2.0, ""),
        (2.0, None, ""),
    ],
)
def test_the_sign_of_a_ratio(published: Published, ours: float | None, sign: str) -> None:
    assert row(published, ours).sign == sign


def test_only_ratios_and_changes_have_a_sign() -> None:
    assert row(6.0, 26.6, unit="%").sign == ""
    assert row(37.0, -47.1, unit="%").sign == ""
    assert row(37.0, -47.1, unit="%", is_change=True).sign == DIFFERS
    assert row(37.0, 0.4, unit="%", is_change=True).sign == DIFFERS
    assert row(37.0, 98.8, unit="%", is_change=True).sign == AGREES
    assert row(37.0, 98.8, unit="s").sign == ""


def plain_sign(low: int, high: int, ours: int) -> str:
    """The sign by cases, of hundredths of a ratio."""
    if high > 100 and low >= 100:
        return AGREES if ours > 100 or low <= ours <= high else DIFFERS
    if low < 100 and high <= 100:
        return AGREES if ours < 100 or low <= ours <= high else DIFFERS
    return ""


hundredths = st.integers(80, 120)


@settings(max_examples=examples(200))
@given(one=hundredths, other=hundredths, ours=hundredths, is_range=st.booleans())
def test_the_sign_is_that_of_a_plain_reference(
    one: int, other: int, ours: int, is_range: bool
) -> None:
    """The sign of a change is that of the ratio which it states."""
    low, high = sorted((one, other)) if is_range else (one, one)
    published = (low / 100, high / 100) if is_range else low / 100
    expected = plain_sign(low, high, ours)
    assert row(published, ours / 100).sign == expected
    change = (float(low - 100), float(high - 100)) if is_range else float(low - 100)
    assert row(change, float(ours - 100), unit="%", is_change=True).sign == expected


def test_a_deviation_is_that_of_the_ratio_as_tables_show_it() -> None:
    assert not row(1.69, 1.86).misses  # 1.1006
    assert row(1.69, 1.87).misses  # 1.1065
    assert not row(100.0, 89.6).misses  # 0.896
    assert row(100.0, 89.4).misses
    assert not row(None, 89.4).misses
    assert is_within(1.254, 0.25)
    assert not is_within(1.256, 0.25)


def test_a_row_that_agrees_has_no_reason_and_others_have_the_written_one() -> None:
    name, label = "rollart-fig6", "utilization of the judge's GPUs, all steps"
    written = reason_of(name, label)
    assert isinstance(written, NotStated)

    def run(value: float | None, what: str = label, unit: str = "%") -> Row:
        experiment = Experiment(
            name=name,
            title="",
            source="",
            run=lambda quick: [Row(row=what, ours=value, unit=unit)],
        )
        return experiment.rows(False)[0]

    assert run(7.4).reason is None
    assert run(17.0).reason == written
    assert run(None).reason == written, "a row that is missing"
    assert run(17.0, "another row").reason is None, "it has no published value"


def test_a_miss_without_a_written_reason_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PUBLISHED, "paper-fig1", {"a": 2.0, "b": 2.0, "c": (1.0, math.inf)})
    values = {"a": 2.1, "b": 3.0, "c": 0.9}
    experiment = Experiment(
        name="paper-fig1",
        title="",
        source="",
        run=lambda quick: [Row(row=name, ours=value) for name, value in values.items()],
    )
    assert [row.reason for row in experiment.rows(False)] == [None, NotKnown(), NotKnown()]


def test_the_range_over_seeds() -> None:
    assert span([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert span([3.0]) is None
