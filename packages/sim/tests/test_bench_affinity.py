"""Bench `affinity`: its figures, from runs of known step times."""

import pytest

from packages.sim.benchmarks import affinity as module
from packages.sim.benchmarks.affinity import CELLS, Cell, Plans, bench_affinity, steps_until

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
    figures = bench_affinity(quick=True, progress=lambda text: None).figures
    assert figures["learned_over_declared"] == pytest.approx(1.2)
    assert figures["learned_over_none_sync"] == pytest.approx(0.6)
    assert figures["declared_over_none"] == pytest.approx(0.5)
    assert figures["wrong_over_declared"] == pytest.approx(4)
    assert figures["kept_over_declared"] == figures["uniform_learned_over_none"] == 1
    assert figures["steps_to_learn"] == module.QUICK.steps
    assert figures["steps_to_correct"] == 0
    assert figures["regret"] == pytest.approx(0.2 * module.QUICK.steps)
