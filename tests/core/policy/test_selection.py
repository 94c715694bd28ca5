"""The best evaluation against the obvious reference: sort all of them, take the last of
the greatest.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.core.policy.selection import is_better, measure, reaches

SHARES = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])
EVALUATION = st.fixed_dictionaries({"a": SHARES, "b": SHARES})


@given(
    evaluations=st.lists(st.tuples(EVALUATION, EVALUATION), min_size=1, max_size=9),
    defining=st.sets(st.sampled_from("ab")),
)
def test_the_best_is_the_newest_of_the_greatest(
    evaluations: list[tuple[dict[str, float], dict[str, float]]], defining: set[str]
) -> None:
    best: float | None = None
    chosen = -1
    for number, (success, reward) in enumerate(evaluations):
        measured = measure(success, reward, defining)
        if is_better(measured, best):
            best, chosen = measured, number
    figures = [
        sum((success if name in defining else reward)[name] for name in "ab")
        for success, reward in evaluations
    ]
    assert chosen == max(range(len(figures)), key=lambda number: (figures[number], number))


def test_a_domain_that_never_reports_success_has_not_succeeded() -> None:
    assert measure({}, {"a": 5.0}, {"a"}) == 0.0
    assert measure({}, {"a": -5.0}, ()) == -5.0
    with pytest.raises(ValueError, match="at least one task domain"):
        measure({}, {}, ())


def test_a_target_needs_the_success_of_every_domain() -> None:
    assert reaches({"a": 0.5, "b": 0.6}, ["a", "b"], 0.5)
    assert not reaches({"a": 0.4, "b": 1.0}, ["a", "b"], 0.5)
    assert not reaches({"a": 1.0}, ["a", "b"], 0.0)
