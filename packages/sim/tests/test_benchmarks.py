"""Bench `sim`: it measures the required figures, and reports a failure."""

import subprocess
import sys

import pytest

from packages.sim.benchmarks import bench as sim
from rollweave_sim.world import costs_of


@pytest.mark.parametrize(
    ("layout", "gpus"),
    [(layout, gpus) for layout, (_, _, splits) in sim.LAYOUTS.items() for gpus in splits],
)
def test_every_size_is_a_possible_placement(layout: str, gpus: int) -> None:
    made = sim.config(gpus, layout)
    costs_of(made)
    assert made.sim is not None
    assert made.engines[0].count * made.engines[0].degree + made.trainer.ranks == gpus
    assert made.rollout.groups_per_step * made.rollout.group_size == 8192


@pytest.mark.extended
def test_memory_is_that_of_one_process_alone() -> None:
    """A child's peak does not include its parent's memory."""
    ballast = bytearray(300 * 1024 * 1024)
    code = "from packages.sim.benchmarks.bench import peak_mb; print(peak_mb())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 5 < float(done.stdout) < 280 < len(ballast) / 1024**2


@pytest.mark.extended
def test_a_simulation_that_fails_is_reported() -> None:
    with pytest.raises(RuntimeError, match=r"benchmarks\.bench 9 machines 512 failed"):
        sim.simulated(9, "machines")
