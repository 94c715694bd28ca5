"""Bench `workers`: what is measured of a controller."""

from pathlib import Path

import pytest

from benchmarks.workers.bench import WorkersPlan, _measure, config_of, model_of


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_the_load_of_a_controller(tmp_path: Path, workers: int) -> None:
    plan = WorkersPlan(rounds=1, rollouts=16, turns=4, step_s=0.2)
    model = model_of(tmp_path, plan)
    load = _measure(config_of(tmp_path / "run", plan, workers, model=model), plan)
    assert load.at_once == 16
    assert 30 <= load.turns <= 64
    assert load.controller_s > 0
    assert (load.workers_s > 0) == bool(workers)
