"""`metrics.jsonl` of a simulated run: the lines of a live run, where meaningful, and
the engines' KV usage.

The workload draws rewards and successes at random and nothing is learned, so no line
contains them.
"""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollweave.io.disk import AppendFile
from rollweave.record.summary import CounterSnapshot
from rollweave.schema import commands as c
from rollweave.sim.world import World


class SimMetrics:
    """Collects lines in `lines`, and appends them to `path` where one is given.

    Call `watch` with the world before it runs.
    """

    def __init__(
        self, path: Path | None = None, *, on_line: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        """`on_line` is called with every line. Raises DiskError, as do all methods that
        write.
        """
        self._on_line = on_line
        self._file = AppendFile(path, keep=0) if path is not None else None
        self._world: World | None = None
        self._before: CounterSnapshot | None = None
        self._parts: list[tuple[c.TrainStep, float]] = []
        self.lines: list[dict[str, Any]] = []
        self.final: dict[str, Any] | None = None

    def watch(self, world: World) -> None:
        self._world = world
        world.trainer.trained = self.trained
        self._before = CounterSnapshot.of(world.core.state, 0.0)
        self.event("started", engines=len(world.slots), simulated=True)

    def trained(self, command: c.TrainStep, seconds: float) -> None:
        """Record a trained (mini-)batch; the last of a step writes the step's line."""
        if self._parts and self._parts[-1][0].step != command.step:
            self._parts.clear()
        self._parts.append((command, seconds))
        if command.part == command.parts - 1:
            self._step(command.step)
            self._parts.clear()

    def evaluated(self, command: c.RecordEvaluation) -> None:
        line = {"step": command.version, "final": command.final, "success": {}, "reward": {}}
        self.final = line | {"episodes": command.episodes, "failed": command.failed}
        self.event("evaluation", **self.final)

    def warned(self, command: c.Warn) -> None:
        self.event("warning", component=command.component, message=command.message)

    def best(self, command: c.MarkBest) -> None:
        self.event("best", step=command.step)

    def event(self, kind: str, **fields: Any) -> None:
        line = {"kind": kind, "at": round(self._here().clock.now, 3), **fields}
        self.lines.append(line)
        if self._file is not None:
            self._file.append(json.dumps(line).encode() + b"\n")
        if self._on_line is not None:
            self._on_line(line)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _step(self, step: int) -> None:
        world = self._here()
        assert self._before is not None, "watched"
        counted = CounterSnapshot.of(world.core.state, world.clock.now)
        scored = [
            world.rollouts.scored[member]
            for command, _ in self._parts
            for group in command.groups
            for member in group.trajectory_ids
        ]
        ages = Counter(step - item.initiated for item in scored)
        self.event(
            "step",
            step=step,
            reward={},
            success={},
            trajectories=len(scored),
            batch_tokens=sum(item.tokens for item in scored),
            turns_mean=sum(item.turns for item in scored) / max(1, len(scored)),
            staleness={str(age): ages[age] for age in sorted(ages)},
            trainer={
                "train_s": sum(seconds for _, seconds in self._parts),
                "trained_tokens": float(sum(item.tokens for item in scored)),
            },
            **counted.since(self._before),
            engines={},
            kv_used=kv_used(world),
        )
        self._before = counted

    def _here(self) -> World:
        assert self._world is not None, "watch a world first"
        return self._world


def kv_used(world: World) -> float:
    """Return the share of all engines' KV that live turns use now, without idle
    prefixes.
    """
    engines = [node.engine for node in world.fleet.nodes.values() if node.engine is not None]
    total = sum(engine.kv_tokens for engine in engines)
    return sum(engine.kv_used for engine in engines) / total if total else 0.0
