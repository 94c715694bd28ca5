"""Our own claims and rows over ranges: pairs differ in one policy, intervals are those
of Student's t, and ranges are shown as ranges.
"""

import math

import msgspec
import pytest

from rollweave_papers import ours, ranges
from rollweave_papers.ours import CLAIMS, Claim, interval, step_s, summary
from rollweave_papers.results import AGREES, Row
from rollweave_papers.running import ALL, EXPERIMENTS, select
from rollweave_papers.tables import as_json, as_text, page, sections_of
from rollweave_sim.families import FAMILIES
from rollweave_sim.workload import workload


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_a_claim_has_at_least_twelve_workloads_and_pairs_that_differ(claim: Claim) -> None:
    assert len(claim.workloads) >= 12
    names = [one.name for one in claim.workloads]
    assert len(set(names)) == len(names)
    allowed = {"policies", "without", "rollout", "prefers"}
    for one in claim.workloads:
        own, other = claim.pair(one.setup)
        fields = {
            name for name in own.__struct_fields__ if getattr(own, name) != getattr(other, name)
        }
        assert len(fields) == 1 or claim.name == "ours-affinity"
        assert fields <= allowed
        for setup in (own, other):
            setup.config(steps=2)


def test_an_interval_is_that_of_students_t() -> None:
    """By hand: logs 0 and 0.2 have mean 0.1, deviation 0.1414, and t is 12.706."""
    found = interval([1.0, math.exp(0.2)])
    assert found.low == pytest.approx(math.exp(0.1 - 12.706 * 0.1), rel=1e-4)
    assert found.high == pytest.approx(math.exp(0.1 + 12.706 * 0.1), rel=1e-4)
    with pytest.raises(ValueError, match="at least two ratios, got 1"):
        interval([1.0])


def test_a_summary_names_where_ours_loses() -> None:
    text = summary({"a": 1.2, "b": 0.9, "c": 1.0, "d": 0.8})
    assert text.startswith("95% interval ")
    assert "wins 1, losses 2, within 0.5%: 1; ours loses with d 0.80; b 0.90" in text


def test_equal_runs_have_ratio_one_and_are_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = msgspec.structs.replace(CLAIMS[0], pair=lambda setup: (setup, setup))
    calls: list[int] = []

    def once(setup: object, seed: int) -> float:
        calls.append(seed)
        return 2.0

    monkeypatch.setattr(ours, "_step_s", once)
    monkeypatch.setattr(ours, "_known", {})
    first, *others = claim.rows(quick=True)
    assert (first.ours, len(others)) == (1.0, ours.QUICK_WORKLOADS)
    assert calls == [0] * ours.QUICK_WORKLOADS
    assert all(row.own for row in (first, *others))


def test_the_seed_fixes_a_step_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_known", {})
    setup = ours.WORKLOADS[2].setup
    found = step_s(setup, 0)
    monkeypatch.setattr(ours, "_known", {})
    assert found == step_s(setup, 0) > 0


def test_own_experiments_run_only_if_they_are_named() -> None:
    assert [one.name for one in select([])] == list(EXPERIMENTS)
    assert {one.name for one in select(["ours"])} == {claim.name for claim in CLAIMS}
    assert {one.name for one in select(["ranges"])} == {one.name for one in ranges.EXPERIMENTS}
    assert set(ALL) > set(EXPERIMENTS)


def test_a_spread_keeps_the_mean_and_a_mean_keeps_the_spread() -> None:
    law = FAMILIES["webshop"].output
    mean = math.exp(law.mu + law.sigma**2 / 2)
    wide = ranges.spread(law, 1.5)
    assert (wide.sigma, math.exp(wide.mu + 1.5**2 / 2)) == pytest.approx((1.5, mean))
    long = ranges.meaning(law, 2 * mean)
    assert (long.sigma, math.exp(long.mu + long.sigma**2 / 2)) == pytest.approx(
        (law.sigma, 2 * mean)
    )


def test_a_varied_workload_draws_from_the_varied_family() -> None:
    vary = ranges._lengths(4 * 64.0)
    plans = [
        one.plan(index=3, member=0, attempt=0, seed=0)
        for one in (workload("frozenlake"), vary(workload("frozenlake")))
    ]
    first, second = (plan.turns[0].output_tokens for plan in plans)
    assert second == pytest.approx(4 * first, rel=0.05)


def test_a_range_is_shown_and_compared_as_one() -> None:
    row = ranges.over("r", {"a": 1.1, "b": 1.6}, ours="a", note="n")
    assert (row.open_range, row.ours) == ((1.1, 1.6), 1.1)
    inside = msgspec.structs.replace(row, published=1.3)
    assert (inside.ratio, inside.sign) == (1.0, AGREES)
    assert msgspec.structs.replace(row, published=(2.0, 3.0)).ratio == pytest.approx(0.8)
    assert msgspec.structs.replace(row, published=0.5).ratio == pytest.approx(2.2)
    both = msgspec.structs.replace(row, open_range=(0.9, 1.2), published=1.3)
    assert both.sign == ""
    experiment = ranges.EXPERIMENTS[0]
    assert "1.10-1.60×" in as_text(experiment, [row])
    (values,) = as_json([(experiment, [row])])["rows"]
    assert values["open_range"] == (1.1, 1.6)


def test_a_page_of_own_experiments_is_read_again() -> None:
    text = page(["### A\n\n`ours-a`, b\n\ntable"], quick=False, own=True)
    assert "## Tables" in text
    assert sections_of(text, quick=False) == {"ours-a": "### A\n\n`ours-a`, b\n\ntable"}
    assert sections_of(text, quick=True) is None


def test_a_row_without_a_range_is_compared_as_before() -> None:
    row = Row(row="r", ours=2.0, published=1.0)
    assert (row.ratio, row.sign) == (2.0, "")
