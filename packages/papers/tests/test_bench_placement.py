"""Bench `placement` on small cases: its figures exist and agree with each other, and
each missing one has a reason.
"""

import pytest

from benchmarks.contract import Result
from packages.papers.benchmarks.placement.bench import (
    measured,
)
from packages.papers.benchmarks.placement.drawn import DEGREES, DOMAINS


@pytest.fixture(scope="module")
def result() -> Result:
    return measured([(48, 8), (48, 64)], (48, 8), rounds=2, slow_rounds=1, afforded_s=60.0)


def numbers(result: Result, name: str) -> list[float]:
    value = result.figures[name]
    assert isinstance(value, list)
    return value


def test_the_required_figures_are_present(result: Result) -> None:
    names = {
        f"{what}_48_8"
        for what in (
            "exact_ms",
            "anneal_ms",
            "place_ms",
            "dp_over_exact",
        )
    }
    names |= {
        "anneal_over_exact_cost_min",
        "speedup_over_anneal",
        "speedup_over_anneal_our_search",
        "anneal_placement_share",
    }
    for name in names:
        value = result.figures[name]
        assert isinstance(value, float)
        assert value > 0
    assert "place_ms_48_64" not in result.figures, "more workers than trajectories"
    assert result.figures["exact_ms_48_64"]


def test_no_plan_costs_less_than_the_exact_one(result: Result) -> None:
    cheapest = result.figures["anneal_over_exact_cost_min"]
    assert isinstance(cheapest, float)
    assert cheapest >= 1
    exact = numbers(result, "eq2_s_exact")
    assert len(exact) == len(DOMAINS)
    for name in ("eq2_s_anneal", *(f"eq2_s_homogeneous_{degree}" for degree in DEGREES)):
        assert all(one <= other for one, other in zip(exact, numbers(result, name), strict=True))
    for name in result.figures:
        if name.startswith("simulated_s_"):
            assert all(value > 0 for value in numbers(result, name))


def test_an_unaffordable_program_is_missing_with_its_reason() -> None:
    result = measured([(48, 8)], (48, 8), rounds=1, slow_rounds=1, afforded_s=0.0)
    assert result.figures["dp_over_exact_48_8"] is None
    assert result.conditions["dp_over_exact_48_8"].startswith(
        "not measured: 1 runs in O(n² workers)"
    )
