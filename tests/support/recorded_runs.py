"""The directory of a simulated run whose costs are known."""

import json
from dataclasses import dataclass
from pathlib import Path

from rollweave.record.journal import RunJournal
from rollweave.record.rundir import RunDir
from rollweave.schema.config.loading import dumps
from rollweave.schema.config.root import RunConfig
from rollweave_sim.run import SimMetrics
from rollweave_sim.world import Costs, World
from tests.support.core import config as core_config
from tests.support.simulation import Linear


@dataclass(frozen=True, kw_only=True)
class Steps:
    """A trainer with these seconds. By default its steps take as long as some of the
    engines'.
    """

    fixed: float = 1.0
    publish: float = 0.1
    load: float = 0.1
    swap: float = 0.05
    copy: float = 0.1
    write: float = 0.1

    def step_s(self, *, tokens: int, context: int) -> float:
        return self.fixed + 1e-3 * tokens

    def forward_s(self, *, tokens: int, context: int) -> float:
        return self.step_s(tokens=tokens, context=context) / 3

    def publish_s(self) -> float:
        return self.publish

    def load_s(self, *, engines: int, tp: int) -> float:
        return self.load

    beside_s = load_s

    def hop_s(self, *, share: float) -> float:
        return self.load

    def delta_s(self) -> float:
        return 0.0

    def lag_s(self) -> float:
        return 0.0

    def swap_s(self, *, engines: int, tp: int) -> float:
        return self.swap

    def copy_s(self) -> float:
        return self.copy

    def checkpoint_s(self) -> float:
        return self.write

    def saved_s(self, *, engines: int) -> float:
        return self.write


COSTS: Costs = ({("", 1): Linear(1 << 20)}, Steps())


def recorded_settings() -> RunConfig:
    return core_config(
        "bounded",
        steps=14,
        tasks=[
            {
                "env": "frozenlake",
                "max_turns": 20,
                "max_tokens": 4096,
                "max_turn_tokens": 512,
                "step_s": 600.0,
            }
        ],
        watchdog={"turn_s": 3600.0},
        rollout={"groups_per_step": 2, "group_size": 4, "max_running": 16},
        engines={"count": 1, "max_slots": 16, "kv_tokens": 1 << 20},
        eval={"final_episodes": 0},
        run={"checkpoint_every": 0},
        sim={"model": "qwen3-8b"},
    )


def recorded_run(path: Path) -> Path:
    """Write a simulated run with these costs into a directory, and return it."""
    made, run = recorded_settings(), RunDir(path)
    path.mkdir(exist_ok=True)
    run.config.write_text(dumps(made))
    lines: list[str] = []
    metrics = SimMetrics(on_line=lambda line: lines.append(json.dumps(line)))
    with RunJournal(run.journal) as journal:
        world = World(made, observer=metrics, journal=journal, costs=COSTS)
        metrics.watch(world)
        assert world.run().state.error == ""
    run.metrics.write_text("\n".join(lines) + "\n")
    return path
