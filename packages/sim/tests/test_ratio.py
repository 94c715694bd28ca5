"""Engines that a simulated run moves between prefill and decoding, by what it has
measured.
"""

import random

from rollweave.schema.config.root import RunConfig
from rollweave_sim.run import SimMetrics
from rollweave_sim.workload import Plan, TurnPlan
from rollweave_sim.world import World


class Reading:
    """Agents that read long texts, and write about them."""

    def plan(self, *, index: int, member: int, attempt: int, seed: int) -> Plan:
        draw = random.Random(f"{seed}/{index}/{member}")
        turns = tuple(
            TurnPlan(
                output_tokens=round(300 * draw.uniform(0.5, 1.5)),
                observation_tokens=round(3000 * draw.uniform(0.5, 1.5)),
                env_s=0.2,
            )
            for _ in range(3)
        )
        return Plan(
            prompt_tokens=3000, init_s=0.1, turns=turns, reward_s=0.1, reward=0.0, success=True
        )


def run(*engines: dict[str, object], steps: int = 9) -> tuple[World, list[str]]:
    """Return a world that has ended, and what it has said about engines that moved."""
    config = RunConfig.model_validate(
        {
            "run": {"name": "reading", "steps": steps, "checkpoint_every": 0},
            "sim": {"model": "qwen3-32b", "gpu": "h20"},
            "tasks": [{"env": "swe", "max_tokens": 32768, "max_turn_tokens": 32768, "time_s": 1e6}],
            "rollout": {"groups_per_step": 4, "group_size": 8, "max_running": 16},
            "engines": [
                {"kv_tokens": 1 << 30, "prefill_chunk_tokens": 2048, **group} for group in engines
            ],
            "trainer": {"ranks": 8},
            "eval": {"final_episodes": 0},
            "watchdog": {"turn_s": 1e6},
        }
    )
    metrics = SimMetrics()
    world = World(config, observer=metrics, work={config.tasks[0].name: Reading()})
    metrics.watch(world)
    world.run()
    warned = [line["message"] for line in metrics.lines if line["kind"] == "warning"]
    return world, [text for text in warned if text.startswith("moves from")]


def test_a_run_moves_engines_to_prefill_where_that_pays() -> None:
    moving, said = run({"phase": "either", "count": 6})
    assert len(said) == moving.core.state.counters.scheduling.moved_engines >= 1
    for text in said:
        assert text.startswith("moves from decode to prefill: ")
        assert "more turns per second expected with " in text
    phases = [engine.phase for engine in moving.core.status(moving.clock.now).engines]
    assert phases.count("prefill") == 1 + len(said)
    fixed, _ = run({"phase": "prefill", "count": 1}, {"phase": "decode", "count": 5})
    assert moving.clock.now < fixed.clock.now
    assert (round(moving.clock.now, 3), round(fixed.clock.now, 3)) == (893.36, 897.124)


def test_a_run_that_ends_soon_moves_nothing() -> None:
    _, said = run({"phase": "either", "count": 6}, steps=3)
    assert said == []
