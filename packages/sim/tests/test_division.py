"""Places that a simulated run moves between engines and ranks of the trainer, by what
it has measured.
"""

import random

import pytest

from rollweave.schema.config.root import RunConfig
from rollweave_sim.run import SimMetrics
from rollweave_sim.workload import Plan, TurnPlan
from rollweave_sim.world import World


class Writing:
    """Agents that write texts, from some task on four times as long."""

    def __init__(self, longer_from: int) -> None:
        self.longer_from = longer_from

    def plan(self, *, index: int, member: int, attempt: int, seed: int) -> Plan:
        draw = random.Random(f"{seed}/{index}/{member}")
        tokens = 4000 if index >= self.longer_from else 1000
        turns = tuple(
            TurnPlan(
                output_tokens=round(tokens * draw.uniform(0.5, 1.5)),
                observation_tokens=1000,
                env_s=0.2,
            )
            for _ in range(2)
        )
        return Plan(
            prompt_tokens=1000, init_s=0.1, turns=turns, reward_s=0.1, reward=0.0, success=True
        )


def run(
    ranks: int | dict[str, int], engines: int, *, steps: int = 16, longer_from: int = 1 << 30
) -> tuple[World, list[str]]:
    """Return a world that has ended, and what it has said about its trainer."""
    config = RunConfig.model_validate(
        {
            "run": {"name": "writing", "steps": steps, "checkpoint_every": 0},
            "sim": {"model": "qwen3-8b", "gpu": "h800"},
            "tasks": [{"env": "swe", "max_tokens": 32768, "max_turn_tokens": 32768, "time_s": 1e6}],
            "rollout": {"groups_per_step": 32, "group_size": 8, "max_running": 256},
            "engines": {"count": engines, "kv_tokens": 1 << 30},
            "trainer": {"ranks": ranks},
            "eval": {"final_episodes": 0},
            "watchdog": {"turn_s": 1e6},
        }
    )
    metrics = SimMetrics()
    world = World(config, observer=metrics, work={config.tasks[0].name: Writing(longer_from)})
    metrics.watch(world)
    world.run()
    warned = [line for line in metrics.lines if line["kind"] == "warning"]
    return world, [line["message"] for line in warned if line["component"] == "trainer"]


ELASTIC = {"minimum": 2, "maximum": 5}


@pytest.mark.timeout(300)
def test_a_run_gives_places_to_its_trainer_where_that_pays() -> None:
    moving, said = run(ELASTIC, 4, steps=24)
    assert said[0].startswith("moves from 2 ranks and 4 engines to ")
    assert len(said) == 2, "and then stays"
    status = moving.core.status(moving.clock.now)
    assert status.trainer is not None
    assert 2 < status.trainer.ranks == 6 - len(status.engines)
    fixed, nothing = run(2, 4, steps=24)
    assert nothing == []
    assert moving.clock.now < fixed.clock.now
    assert (round(moving.clock.now, 3), round(fixed.clock.now, 3)) == (1591.831, 1681.323)


@pytest.mark.timeout(300)
def test_a_run_that_ends_soon_moves_nothing() -> None:
    world, said = run(ELASTIC, 4, steps=4)
    assert said == []
    assert world.core.state.counters.scheduling.moved_ranks == 0
