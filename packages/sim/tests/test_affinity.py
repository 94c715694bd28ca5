"""Simulated pools of different GPUs: task domains find the one that suits them."""

import pytest

from packages.sim.benchmarks.affinity import FULL, NEITHER, READS, THINKS, UNIFORM, WRONG, config
from rollweave.core.state import State
from rollweave.schema.config.root import RunConfig
from rollweave_sim.run import SimMetrics, simulate
from rollweave_sim.workload import Drawn
from rollweave_sim.world import World

WORK = {"reading": Drawn(READS), "thinking": Drawn(THINKS)}


def small(declared: tuple[str | None, str | None], *, gpus: tuple[str, str]) -> RunConfig:
    made = config(declared, FULL, learns=True, gpus=gpus, mode="sync", steps=3, seed=0)
    rollout = made.rollout.model_copy(update={"groups_per_step": 32, "max_running": 256})
    return made.model_copy(update={"rollout": rollout})


def learned(run_config: RunConfig) -> tuple[State, SimMetrics]:
    metrics = SimMetrics()
    world = World(run_config, observer=metrics, work=WORK)
    metrics.watch(world)
    return world.run().state, metrics


@pytest.mark.extended
@pytest.mark.variants
@pytest.mark.parametrize("declared", [NEITHER, WRONG])
def test_domains_move_to_the_gpus_that_suit_them(declared: tuple[str | None, str | None]) -> None:
    state, metrics = learned(small(declared, gpus=("h800", "h20")))
    shares = state.mechanisms["pools"].shares
    assert shares["reading"].get("compute", 0) > 0.9
    assert shares["thinking"].get("bandwidth", 0) > 0.5
    costs = state.mechanisms["pools"].token_costs
    prompt_s = {pool: costs["reading"][pool].prompt.seconds for pool in ("compute", "bandwidth")}
    # FLOP/s of H800 over those of H20, as far as matmuls reach them
    assert prompt_s["bandwidth"] / prompt_s["compute"] == pytest.approx(5.8, rel=0.6)
    (last,) = [line for line in metrics.lines if line["kind"] == "step"][-1:]
    assert last["affinity"]["reading"]["seconds"]["compute"]["prompt"][0] > 0
    assert last["affinity"].keys() == {"reading", "thinking"}


@pytest.mark.slow
def test_uniform_gpus_change_no_step() -> None:
    run_config = small(NEITHER, gpus=UNIFORM)
    unlearned = run_config.rollout.model_copy(update={"affinity": "declared"})
    declared = run_config.model_copy(update={"rollout": unlearned})
    assert simulate(run_config, work=WORK).step_s == simulate(declared, work=WORK).step_s
