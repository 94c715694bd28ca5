"""Bench `workers`: what is measured of a controller."""

from pathlib import Path

import pytest

from benchmarks.workers.bench import LIMIT_S, WorkersPlan, config_of, model_of, run_controller
from benchmarks.workers.controller import Load


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_the_load_of_a_controller(tmp_path: Path, workers: int) -> None:
    plan = WorkersPlan(rounds=1, rollouts=16, turns=4, step_s=0.2)
    model = model_of(tmp_path, plan)
    config = config_of(tmp_path / "run", plan, workers, model=model)
    load = run_controller(config, "controller", plan.rollouts, kind=Load, limit_s=LIMIT_S)
    assert load.at_once == 16
    assert 30 <= load.turns <= 64
    assert load.controller_s > 0
    assert (load.workers_s > 0) == bool(workers)
