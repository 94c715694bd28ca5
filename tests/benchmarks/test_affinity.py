"""Bench `affinity`: its figures, from runs of known step times."""

import pytest

from benchmarks.affinity import bench as module
from benchmarks.affinity import live
from benchmarks.affinity.bench import CELLS, Cell, Plans, bench_affinity, steps_until
from benchmarks.affinity.live import LiveCell, LivePlan

STEPS = {"none": 2.0, "declared": 1.0, "wrong": 4.0, "learned": 1.2}


def test_steps_count_until_the_first_that_is_near_the_best() -> None:
    assert steps_until([3.0, 1.05, 3.0], [1.0] * 3) == 1
    assert steps_until([3.0, 3.0, 1.0], [1.0] * 3, since=1) == 1
    assert steps_until([3.0, 3.0, 3.0], [1.0] * 3) == 3


def test_figures_are_ratios_of_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def times(cell: Cell, plan: Plans, *, mode: str, seed: int) -> list[float]:
        name = next(name for name, one in CELLS.items() if one == cell)
        return [STEPS.get(name, 1.0) * (seed + 1 + step) for step in range(plan.steps)]

    monkeypatch.setattr(module, "step_times", times)
    monkeypatch.setattr(live, "live_figures", lambda plan, progress: ({}, {}))
    figures = bench_affinity(quick=True, progress=lambda text: None).figures
    assert figures["learned_over_declared"] == pytest.approx(1.2)
    assert figures["learned_over_none_sync"] == pytest.approx(0.6)
    assert figures["declared_over_none"] == pytest.approx(0.5)
    assert figures["wrong_over_declared"] == pytest.approx(4)
    assert figures["kept_over_declared"] == figures["uniform_learned_over_none"] == 1
    assert figures["steps_to_learn"] == module.QUICK.steps
    assert figures["steps_to_correct"] == 0
    assert figures["regret"] == pytest.approx(0.2 * module.QUICK.steps)


def test_live_ratios_leave_out_the_steps_in_which_pools_are_learned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def times(cell: LiveCell, *, steps: int, seed: int) -> list[float]:
        slow = 9.0 if cell.learns else 2.0  # in the first step
        name = next(name for name, one in live.CELLS.items() if one == cell)
        return [slow] + [STEPS.get(name, 1.0) * (seed + 1 + step) for step in range(steps - 1)]

    monkeypatch.setattr(live, "live_step_times", times)
    plan = LivePlan(steps=3, left_out=1, seeds=2, cells=tuple(live.CELLS))
    figures, conditions = live.live_figures(plan, lambda text: None)
    assert figures["live_learned_over_declared"] == pytest.approx(1.2)
    assert figures["live_declared_over_none"] == pytest.approx(0.5)
    assert figures["live_corrected_over_declared"] == 1
    assert figures["live_uniform"] == pytest.approx((12 / 5 + 14 / 7) / 2)
    assert not {*figures} & {*conditions}

    figures, conditions = live.live_figures(live.QUICK, lambda text: None)
    assert figures["live_declared_over_none"] == pytest.approx(0.5)
    assert {name for name in figures if figures[name] is None} == {*live.RATIOS} & {*conditions}
    assert figures["live_uniform"] is None


@pytest.mark.slow
def test_two_domains_run_on_the_paced_engines_of_their_pools() -> None:
    """Real processes: two hosts' agents with an engine each."""
    declared = live.live_step_times(live.CELLS["declared"], steps=2, seed=0)
    assert len(declared) == 2
    assert all(seconds > 1 for seconds in declared), "engines take the time of GPUs"
