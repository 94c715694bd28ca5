"""Bench `placement` on small cases: its figures exist and agree with each other, and
each missing one has a reason.
"""

from itertools import pairwise

import pytest

from benchmarks.contract import Result
from benchmarks.placement.bench import (
    CASES,
    PAPER,
    QUICK,
    measured,
)
from benchmarks.placement.drawn import DEGREES, DOMAINS, draw_workload
from rollweave.cli.bench import bench
from rollweave.schema.errors import ConfigError


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
            "place_mixed_ms",
            "table_ms",
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


def test_shares_of_annealing_s_time(result: Result) -> None:
    for name in ("anneal", "anneal_our_search"):
        share, placements = (
            result.figures[f"{name}_placement_share"],
            result.figures[f"{name}_placements"],
        )
        assert isinstance(share, float)
        assert 0 < share <= 1
        assert placements == 136, "the start, and each iteration's proposal"


def test_an_unaffordable_program_is_missing_with_its_reason() -> None:
    result = measured([(48, 8)], (48, 8), rounds=1, slow_rounds=1, afforded_s=0.0)
    assert result.figures["dp_over_exact_48_8"] is None
    assert result.conditions["dp_over_exact_48_8"].startswith(
        "not measured: 1 runs in O(n² workers)"
    )


@pytest.mark.parametrize("domain", DOMAINS)
def test_lengths_have_a_long_tail_and_larger_engines_are_faster_and_wider(domain: str) -> None:
    drawn = draw_workload(domain, 512)
    ordered = sorted(drawn.lengths)
    assert ordered[0] > 0
    assert ordered[-1] > 4 * ordered[len(ordered) // 2]
    for smaller, larger in pairwise(DEGREES):
        assert drawn.slots[smaller] < drawn.slots[larger]
        assert drawn.profile[smaller][0].seconds > drawn.profile[larger][0].seconds


def test_cases_are_complete() -> None:
    assert {count for count, _ in CASES} == {256, 6_400, 100_000}
    assert min(gpus for _, gpus in CASES) == 16
    assert max(gpus for _, gpus in CASES) == 1_024
    assert PAPER in CASES
    assert set(QUICK) <= set(CASES)


def test_seeds_are_refused() -> None:
    with pytest.raises(ConfigError, match="--seeds must be left out for bench placement"):
        bench("placement", as_json=False, quick=True, seeds=1)
