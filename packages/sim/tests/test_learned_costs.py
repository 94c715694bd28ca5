"""Engines with an inference server measure nothing, in a simulation as in a live run:
what is learned from their turns is close to what they cost.
"""

from pathlib import Path
from typing import Any

import pytest

from rollweave.core.mechanisms.lengths.work import rate
from rollweave.schema.base import EngineId
from rollweave.schema.config.root import RunConfig
from rollweave_sim.faults import NullObserver
from rollweave_sim.fleet import _profile
from rollweave_sim.world import World
from tests.support.simulation import config


def servers(directory: Path, *, degrees: dict[int, int], **changes: Any) -> RunConfig:
    """A run of vLLM engines: degree → number of engines."""
    groups = [
        {
            "kind": "vllm",
            "python": "/opt/vllm/bin/python",
            "count": count,
            "degree": degree,
            "max_slots": 16 * degree,
        }
        for degree, count in degrees.items()
    ]
    small = config(directory, mode="sync", scheduling="trajectory").model_dump()
    return RunConfig.model_validate({**small, "engines": groups, **changes})


def simulated(run_config: RunConfig) -> World:
    world = World(run_config, observer=NullObserver())
    world.run()
    return world


@pytest.mark.extended
def test_learned_costs_are_close_to_measured_ones(tmp_path: Path) -> None:
    world = simulated(servers(tmp_path, degrees={2: 1, 1: 2}))
    state, fleet = world.core.state, world.fleet
    assert sorted(state.mechanisms["costs"].measured) == ["/vllm"]
    for degree, engine_id in ((2, EngineId("e0")), (1, EngineId("e1"))):
        engine, learned = (
            state.engines[engine_id],
            state.mechanisms["costs"].measured["/vllm"][degree],
        )
        assert learned.prompt_s is not None
        cost = fleet._cost(fleet.nodes[engine_id])
        true = rate(
            _profile(cost, engine.abilities.max_slots, engine.abilities.kv_tokens),
            slots=engine.abilities.max_slots,
            kv_tokens=engine.abilities.kv_tokens,
        )
        for sequences in (1, 8, 16):
            group = {"longest": 500, "tokens": 500 * sequences, "occupied": 2e6 * sequences}
            assert learned.rate.seconds(**group) == pytest.approx(true.seconds(**group), rel=0.3)


@pytest.mark.slow
def test_a_fleet_of_servers_is_planned_with_learned_costs(tmp_path: Path) -> None:
    changes = {"allocation": {"budget": 3}}
    planned = list[list[int]]()
    for kind in ("embedded", "vllm"):
        run = {"name": kind, "dir": str(tmp_path), "steps": 4}
        small = config(tmp_path, mode="sync", scheduling="trajectory").model_dump()
        del small["engines"]["count"], small["engines"]["degree"]
        engines = {**small["engines"], "kind": kind}
        world = simulated(
            RunConfig.model_validate({**small, **changes, "run": run, "engines": engines})
        )
        planned.append(sorted(engine.seat.degree for engine in world.core.state.engines.values()))
        assert "degree_unmeasured" not in world.core.state.counters.watchdog
    assert planned[0] == planned[1]


def test_engines_of_servers_preempt_nothing_and_move_no_kv(tmp_path: Path) -> None:
    """They get a turn when they have a slot for it, whatever its rank."""
    world = simulated(
        servers(tmp_path, degrees={1: 1}, run={"name": "one", "dir": str(tmp_path), "steps": 2})
    )
    counted = world.core.state.counters.scheduling
    assert counted.preemptions == 0
    assert counted.moved_tokens == 0
