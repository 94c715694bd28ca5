"""Steps whose seconds differ from their costs, by a distribution that was measured."""

import statistics
from pathlib import Path

import pytest

from packages.sim.tests.simulated_lender import COST, Rig
from rollweave.core.policy.admission import StepKind
from rollweave_sim.engine import SimEngine
from rollweave_sim.kv import Request
from rollweave_sim.noise import MEASURED_STEPS, Noise
from rollweave_sim.run import simulate
from tests.support.simulation import config


def engine(noise: Noise | None) -> SimEngine:
    return SimEngine(
        cost=COST, slots=4, chunk_tokens=16, block_tokens=4, prefix_cache=True, noise=noise
    )


def end_of(made: SimEngine, *, looks: tuple[float, ...] = ()) -> float:
    made.add(0.0, Request(key="t", context_tokens=40, output_tokens=60))
    for now in looks:
        made.advance(now)
    while (due := made.next_at()) is not None:
        for done in made.advance(due):
            return done.at
    raise AssertionError("it ends")


def test_the_mean_of_noise_is_one_and_its_range_that_measured() -> None:
    noise = Noise("0")
    drawn = [noise.factor() for _ in range(40_000)]
    assert statistics.fmean(drawn) == pytest.approx(1.0, abs=0.001)
    mean_ms = MEASURED_STEPS[-1][1] / max(drawn)
    assert 7.7 < mean_ms < 8.0
    assert min(drawn) > 0.99 * MEASURED_STEPS[0][1] / 8.0
    ordered = sorted(drawn)
    assert ordered[len(drawn) // 2] == pytest.approx(7.815 / mean_ms, rel=0.01)
    assert ordered[int(0.98 * len(drawn))] == pytest.approx(8.099 / mean_ms, rel=0.01)


def test_many_steps_deviate_less_than_one() -> None:
    spread = [
        statistics.pstdev(noise.factor(steps) for _ in range(4000))
        for steps, noise in ((1, Noise("a")), (100, Noise("a")))
    ]
    assert spread[1] == pytest.approx(spread[0] / 10, rel=1e-6)


def test_equal_seeds_draw_equal_noise_and_others_do_not() -> None:
    ends = [end_of(engine(noise)) for noise in (None, Noise("0"), Noise("0"), Noise("1"))]
    assert ends[1] == ends[2]
    assert len(set(ends)) == 3
    assert ends[1] == pytest.approx(ends[0], rel=0.3)


def test_to_look_at_an_engine_changes_nothing() -> None:
    quiet = end_of(engine(Noise("0")))
    assert end_of(engine(Noise("0")), looks=(0.05, 0.2, 0.21)) == pytest.approx(quiet)


def test_a_run_repeats_itself_and_another_seed_takes_another_time(tmp_path: Path) -> None:
    def ends(seed: int) -> list[float]:
        return [line["at"] for line in simulate(config(tmp_path, mode="sync", seed=seed)).steps]

    assert ends(3) == ends(3)
    assert ends(3) != ends(4)


def test_what_a_step_takes_is_not_what_was_expected_of_it() -> None:
    """Admission knows the profile and its corrections, and learns what steps took."""
    rig = Rig(noise=Noise("lender"))
    ratios = list[float]()
    learn = rig.lender._corrections.measured

    def measured(kind: StepKind, *, profiled_s: float, seconds: float) -> None:
        ratios.append(seconds / profiled_s)
        learn(kind, profiled_s=profiled_s, seconds=seconds)

    rig.lender._corrections.measured = measured  # type: ignore[method-assign]
    for number in range(12):
        rig.rollout(0.0, f"t{number}", output=150)
    for number in range(20):
        rig.user(0.2 + 0.3 * number, 10 + number, 12)
    rig.until(1e6)
    assert len(ratios) > 50
    assert len({round(one, 4) for one in ratios}) > len(ratios) / 2
