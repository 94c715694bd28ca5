"""Engines that a simulated run moves between prefill and decoding, by what it has
measured.
"""

import random

from rollweave.schema.config.root import RunConfig
from rollweave_sim.run import SimMetrics
from rollweave_sim.workload import Plan, TurnPlan
from rollweave_sim.world import World


class Reading:
    """Agents that read long texts and answer with a few words."""

    def plan(self, *, index: int, member: int, attempt: int, seed: int) -> Plan:
        draw = random.Random(f"{seed}/{index}/{member}/{attempt}")
        turns = tuple(
            TurnPlan(
                output_tokens=draw.randint(15, 45),
                observation_tokens=draw.randint(2000, 6000),
                env_s=0.2,
            )
            for _ in range(2)
        )
        return Plan(
            prompt_tokens=4000, init_s=0.1, turns=turns, reward_s=0.1, reward=0.0, success=True
        )


def run(*engines: dict[str, object], steps: int = 8) -> tuple[World, list[str]]:
    """Return a world that has ended, and its warnings."""
    config = RunConfig.model_validate(
        {
            "run": {"name": "reading", "steps": steps, "checkpoint_every": 0},
            "sim": {"model": "qwen3-8b", "gpu": "h20"},
            "tasks": [{"env": "swe", "max_turns": 9, "max_tokens": 32768, "time_s": 1e6}],
            "rollout": {
                "mode": "bounded",
                "groups_per_step": 4,
                "group_size": 8,
                "max_running": 32,
            },
            "engines": [{"kv_tokens": 1 << 30, **group} for group in engines],
            "trainer": {"ranks": 8},
            "eval": {"final_episodes": 0},
        }
    )
    metrics = SimMetrics()
    world = World(config, observer=metrics, work={config.tasks[0].name: Reading()})
    metrics.watch(world)
    world.run()
    warned = [line["message"] for line in metrics.lines if line["kind"] == "warning"]
    return world, warned


def test_a_run_leaves_a_ratio_that_does_not_pay() -> None:
    moving, warned = run({"phase": "either", "count": 4})
    (message,) = [text for text in warned if text.startswith("moves from")]
    assert message.startswith("moves from prefill to decode: ")
    assert "expected with 0 prefill engines" in message
    state = moving.core.state
    assert [engine.seat.phase for engine in state.engines.values()] == ["decode"] * 4
    assert state.counters.scheduling.moved_engines == 1
    assert [engine.phase for engine in moving.core.status(moving.clock.now).engines] == [
        "decode"
    ] * 4
    worst, _ = run({"phase": "prefill", "count": 3}, {"phase": "decode", "count": 1})
    assert moving.clock.now < worst.clock.now


def test_a_run_that_ends_soon_moves_nothing() -> None:
    world, _ = run({"phase": "either", "count": 4}, steps=3)
    assert world.core.state.counters.scheduling.moved_engines == 0
