"""Engines with an inference server measure nothing, in a simulation as in a live run: what
is learned from their turns is close to what they cost.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollweave.core.policy import turn_times
from rollweave.core.policy.work import rate
from rollweave.schema import events as e
from rollweave.schema.base import EngineId
from rollweave.schema.config.root import RunConfig
from rollweave.sim.fleet import _profile
from rollweave.sim.metrics import SimMetrics
from rollweave.sim.world import World
from tests.support.simulation import config

MEASURED, LEARNED, UNKNOWN = "measured", "learned", "unknown"


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


def simulated(run_config: RunConfig, knowledge: str = LEARNED) -> World:
    """Simulate a run whose engines differ in nothing but what is known of their costs."""
    metrics = SimMetrics()
    world = World(run_config, observer=metrics)
    metrics.watch(world)
    if knowledge == MEASURED:
        fleet, post = world.fleet, world.fleet._post

        def with_profile(event: e.Event) -> None:
            if isinstance(event, e.EngineJoined):
                node = fleet.nodes[event.engine_id]
                profile = _profile(fleet._cost(node), event.max_slots, event.kv_total_tokens)
                event = msgspec.structs.replace(event, profile=profile)
            post(event)

        fleet._post = with_profile
    with pytest.MonkeyPatch.context() as patch:
        if knowledge == UNKNOWN:
            patch.setattr(turn_times, "FIRST_TURNS", 1 << 40)
        world.run()
    return world


def test_learned_costs_are_close_to_measured_ones(tmp_path: Path) -> None:
    world = simulated(servers(tmp_path, degrees={2: 1, 1: 2}))
    state, fleet = world.core.state, world.fleet
    assert sorted(state.measured) == ["/vllm"]
    for degree, engine_id in ((2, EngineId("e0")), (1, EngineId("e1"))):
        engine, learned = state.engines[engine_id], state.measured["/vllm"][degree]
        assert learned.prompt_s is not None
        cost = fleet._cost(fleet.nodes[engine_id])
        true = rate(
            _profile(cost, engine.max_slots, engine.kv_tokens),
            slots=engine.max_slots,
            kv_tokens=engine.kv_tokens,
        )
        for sequences in (1, 8, 16):
            group = {"longest": 500, "tokens": 500 * sequences, "occupied": 2e6 * sequences}
            assert learned.rate.seconds(**group) == pytest.approx(true.seconds(**group), rel=0.3)


def test_engines_of_servers_preempt_nothing_and_move_no_kv(tmp_path: Path) -> None:
    """They get a turn when they have a slot for it, whatever its rank."""
    world = simulated(
        servers(tmp_path, degrees={1: 1}, run={"name": "one", "dir": str(tmp_path), "steps": 2})
    )
    counted = world.core.state.counters.scheduling
    assert counted.preemptions == 0
    assert counted.moved_tokens == 0


@pytest.mark.slow
def test_learned_costs_are_as_good_as_measured_ones(tmp_path: Path) -> None:
    """One engine of degree 4 and four of degree 1 share 512 trajectories of coding."""
    seconds = {}
    for knowledge in (MEASURED, LEARNED, UNKNOWN):
        seconds[knowledge] = 0.0
        for seed in (0, 1):
            run_config = servers(
                tmp_path,
                degrees={4: 1, 1: 4},
                run={"name": "coding", "dir": str(tmp_path), "steps": 5, "seed": seed},
                sim={"model": "qwen3-14b", "gpu": "h100"},
                tasks=[
                    {
                        "env": "coding",
                        "max_turns": 1000,
                        "max_tokens": 32768,
                        "max_turn_tokens": 32768,
                        "time_s": 1e6,
                        "step_s": 1e5,
                    }
                ],
                rollout={
                    "mode": "sync",
                    "scheduling": "trajectory",
                    "groups_per_step": 32,
                    "group_size": 16,
                    "max_running": 512,
                },
                eval={"final_episodes": 0},
                watchdog={"turn_s": 1e6, "train_s": 1e6},
            )
            seconds[knowledge] += simulated(run_config, knowledge).clock.now
    print({name: value / seconds[MEASURED] for name, value in seconds.items()})
    assert seconds[LEARNED] < 1.03 * seconds[MEASURED] < seconds[UNKNOWN]
