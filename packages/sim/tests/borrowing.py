"""A simulated run that borrows engines, the engines that lend, and all that it does."""

from collections.abc import Sequence
from typing import Any

from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.simulation import ServingFile


def lenders(**changes: Any) -> ServingFile:
    """Four engines with users."""
    engines = {"model": "qwen2.5-7b", "engines": 4, "prefill": 1, "rate": 0.5}
    return ServingFile.model_validate({**engines, **changes})


def config(*, most: int = 4, **ablation: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "borrows", "steps": 2},
            "sim": {"model": "qwen3-8b"},
            "trainer": {"ranks": 8},
            "tasks": [
                {
                    "env": "frozenlake",
                    "max_turns": 12,
                    "max_tokens": 8192,
                    "max_turn_tokens": 1024,
                    "step_s": 600.0,
                }
            ],
            "rollout": {
                "mode": "sync",
                "groups_per_step": 4,
                "group_size": 4,
                "max_running": 16,
            },
            "engines": {"max_slots": 4, "kv_tokens": 1 << 20},
            "loans": {"engines": most} if most else None,
            "ablation": ablation,
            "eval": {"final_episodes": 0},
            "watchdog": {"turn_s": 3600.0},
        }
    )


class Watch:
    """Everything that a run does, and a world that may be disturbed meanwhile."""

    def __init__(self) -> None:
        self.log: list[tuple[float, e.Event, Sequence[c.Command]]] = []

    def append(self, now: float, event: e.Event, commands: Sequence[c.Command]) -> None:
        self.log.append((now, event, commands))

    def commands(self, kind: type[Any]) -> list[Any]:
        return [one for _, _, every in self.log for one in every if isinstance(one, kind)]
