"""Configurations, costs and workloads of simulated runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollweave.schema.config.root import RunConfig
from rollweave_sim.cost import EngineCosts
from tests.support.core import config as core_config


def config(
    directory: Path,
    *,
    mode: str = "bounded",
    seed: int = 0,
    sim: dict[str, Any] | None = None,
    ablation: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    env: str = "webshop",
    **rollout: Any,
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "small", "dir": str(directory), "steps": 4, "seed": seed},
            "sim": {"model": "qwen3-8b", **(sim or {})},
            "tasks": [
                {
                    "env": env,
                    "tag": "webshop",
                    "max_turns": 20,
                    "max_tokens": 16384,
                    "max_turn_tokens": 4096,
                    "step_s": 600.0,
                }
            ],
            "rollout": {
                "mode": mode,
                "groups_per_step": 8,
                "group_size": 4,
                "max_running": 64,
                **rollout,
            },
            "ablation": ablation or {},
            "trainer": {"ranks": 8, **(trainer or {})},
            "engines": {"count": 3, "max_slots": 16},
            "eval": {"every": 2, "episodes": 4, "final_episodes": 8},
            "watchdog": {"turn_s": 3600.0},
        }
    )


@dataclass(frozen=True)
class Linear:
    """A cost that grows with every amount.

    With `kinked` it has no closed form, so that evenly spaced steps cannot be assumed.
    """

    kv_tokens: int
    kinked: bool = False

    def step_s(
        self, *, prefill_tokens: int, prefill_context: int, decode: int, decode_context: int
    ) -> float:
        memory = 0.01 + 1e-5 * (decode_context + prefill_context / 8)
        compute = 1e-4 * (prefill_tokens + decode) + 1e-6 * (prefill_context + decode_context)
        return max(memory, 3 * compute) if self.kinked else memory + compute

    def decode_s(self, *, decode: int, decode_context: int, steps: int) -> float:
        if self.kinked:
            return sum(
                self.step_s(
                    prefill_tokens=0,
                    prefill_context=0,
                    decode=decode,
                    decode_context=decode_context + step * decode,
                )
                for step in range(steps)
            )
        total = steps * decode_context + decode * steps * (steps - 1) // 2
        return steps * (0.01 + 1e-4 * decode) + 1.1e-5 * total


def decode_step(costs: EngineCosts, decode: int, context: int) -> float:
    return costs.step_s(prefill_tokens=0, prefill_context=0, decode=decode, decode_context=context)


def looped(costs: EngineCosts, decode: int, context: int, steps: int) -> float:
    return sum(decode_step(costs, decode, context + i * decode) for i in range(steps))


def one_domain(mode: str = "bounded") -> RunConfig:
    return core_config(
        mode,
        steps=6,
        tasks=[{"env": "a"}],
        rollout={"spare_members": 1, "retries": 3},
    )
