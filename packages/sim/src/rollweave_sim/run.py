"""One simulated run from configuration to figures, with or without a run directory; its
`metrics.jsonl`: the lines of a live run, where meaningful, and the KV usage of the
engines; and the settings that a simulation ignores, because it computes only time.

The workload draws rewards and successes at random and nothing is learned, so no line of
metrics contains them.
"""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollweave.core.policy.modes import origin
from rollweave.io.disk import AppendFile
from rollweave.record.journal import RunJournal
from rollweave.record.rundir import RunDir, new_identity, write_identity
from rollweave.record.summary import CounterSnapshot, Summary, summarize, write_summary
from rollweave.record.trace import Trace
from rollweave.schema import commands as c
from rollweave.schema.config.conflicts import without_effect
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.sections import SIMULATED_MODEL
from rollweave.schema.config.simulation import ServingFile
from rollweave.schema.config.values import Section
from rollweave_sim.lending import Latencies
from rollweave_sim.workers import Judges
from rollweave_sim.workload import Workload
from rollweave_sim.world import Costs, Journal, World, section


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
            (world.rollouts.scored[member], group.restored_to.get(member))
            for command, _ in self._parts
            for group in command.groups
            for member in group.trajectory_ids
        ]
        ages = Counter(step - origin(item.initiated, back) for item, back in scored)
        self.event(
            "step",
            step=step,
            reward={},
            success={},
            trajectories=len(scored),
            batch_tokens=sum(item.tokens for item, _ in scored),
            turns_mean=sum(item.turns for item, _ in scored) / max(1, len(scored)),
            staleness={str(age): ages[age] for age in sorted(ages)},
            trainer={
                "train_s": sum(seconds for _, seconds in self._parts),
                "trained_tokens": float(sum(item.tokens for item, _ in scored)),
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


ALL = ()
"""Stands for all fields of a section."""

IGNORED: dict[str, tuple[str, ...]] = {
    "run": ("sinks",),
    "rollout": ("temperature", "top_p"),
    "trainer": (
        "tensor_parallel",
        "lr",
        "weight_decay",
        "max_grad_norm",
        "micro_tokens",
        "save_memory",
    ),
    "algorithm": (
        "gamma",
        "reward_weight",
        "loss",
        "clip",
        "aggregate",
        "overlong",
        "entropy",
        "routing_replay",
    ),
    "critic": ALL,
    "warmup": ALL,
    "workers": ("count", "pool"),
    "weights": ("transport",),
    "eval": ("temperature", "stop_at"),
    "sandbox": ALL,
}
"""Section → ignored fields. The core, which is the real one, or the cost models honor
all others.
"""

IGNORED_TASK = ("options", "isolation", "time_s", "algorithm", "env_weight")
IGNORED_ENGINE = ("deterministic",)


def ignored(config: RunConfig) -> list[str]:
    """Return the names of changed settings that a simulation of `config` ignores."""
    names = [] if config.model.path == SIMULATED_MODEL else ["model"]
    for name, fields in IGNORED.items():
        section = getattr(config, name)
        names += [
            f"{name}.{field}"
            for field in _changed(section, fields or tuple(type(section).model_fields))
        ]
    names += ["ablation.changes"] if "cuda_graphs" in config.ablation.without else []
    if config.workers.elastic:  # otherwise they start beside the engines
        names = [name for name in names if not name.startswith("workers.")]
    names += ["lora"] if config.lora is not None else []
    names += [name for name in ("rewards", "roles") if getattr(config, name)]
    for index, task in enumerate(config.tasks):
        names += [f"tasks.{index}.{field}" for field in _changed(task, IGNORED_TASK)]
    for index, group in enumerate(config.engines):
        where = f"engines.{index}" if len(config.engines) > 1 else "engines"
        names += [f"{where}.{field}" for field in _changed(group, IGNORED_ENGINE)]
    return list(dict.fromkeys([*names, *without_effect(config)]))


def _changed(section: Section, fields: tuple[str, ...]) -> Iterator[str]:
    for field in fields:
        default: Any = type(section).model_fields[field].get_default(call_default_factory=True)
        if getattr(section, field) != default:
            yield field


SUFFIX = ".sim"
"""Suffix of the run's name: a simulation does not use the directory of the run that it
simulates.
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a simulated run. Seconds are the virtual clock's."""

    summary: Summary
    lines: list[dict[str, Any]]
    events: int
    gpus: int
    engine_gpus: int
    # share of the time in which the engines of each pool compute
    pools_busy: dict[str, float]
    # share of the time in which serverless reward instances worked
    rewards_used: float | None = None
    serving: Latencies | None = None  # of the users of the serving engines

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == "step"]

    @property
    def step_s(self) -> list[float]:
        """Return the seconds between the starts of successive training steps."""
        starts = [float(line["at"]) for line in self.steps]
        return [after - before for before, after in itertools.pairwise(starts)]

    @property
    def tokens_per_s(self) -> float:
        """Return the sampled tokens per second over the entire run."""
        return self.summary.tokens / self.summary.wall_s if self.summary.wall_s else 0.0

    @property
    def trained_tokens_per_s(self) -> float:
        """Return the tokens of trained trajectories per second, prompts and
        observations included, from the second step on.
        """
        tokens = sum(line["batch_tokens"] for line in self.steps[1:])
        return tokens / sum(self.step_s) if self.step_s else 0.0

    @property
    def gpu_hours(self) -> float:
        return self.gpus * self.summary.wall_s / 3600

    def idle(self, component: str) -> dict[str, float]:
        """Return the shares of the time of `engines` or `trainer`, by activity or cause
        of waiting.
        """
        seconds = self.summary.idle[component]
        total = sum(seconds.values())
        return {cause: value / total for cause, value in seconds.items()} if total else {}


def simulate(
    config: RunConfig,
    *,
    run: RunDir | None = None,
    on_metrics: Callable[[dict[str, Any]], None] | None = None,
    costs: Costs | None = None,
    work: dict[str, Workload] | None = None,
    watch: Journal | None = None,
    rewards: Judges | None = None,
    serving: ServingFile | None = None,
) -> Outcome:
    """Simulate `config` and return the outcome.

    The run is recorded in the directory `run` if given, else `watch` receives its
    journal; `on_metrics` is called with every line of metrics; `rewards` and
    `serving` are those of `World`. Raises ConfigError, DiskError, StuckError.
    """
    section(config)  # refuses a run that is not one of [sim]
    metrics = SimMetrics(run.metrics if run is not None else None, on_line=on_metrics)
    # Success is drawn at random, not learned, so it ends nothing.
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"stop_at": None})})
    journal = RunJournal(run.journal) if run is not None else None
    trace = Trace(run.trace) if run is not None else None
    world = World(
        config,
        observer=metrics,
        journal=journal or watch,
        trace=trace,
        costs=costs,
        work=work,
        rewards=rewards,
        serving=serving,
    )
    metrics.watch(world)
    core = world.run()
    summary = summarize(core, evaluation=metrics.final, wall_s=world.clock.now)
    metrics.event("finished", error=summary.error)
    metrics.close()
    for sink in (journal, trace):
        if sink is not None:
            sink.close()
    if run is not None:
        write_summary(run.summary, summary)
    engines, ranks = sum(slot.degree for slot in world.slots), config.trainer.first_ranks
    return Outcome(
        summary=summary,
        lines=metrics.lines,
        events=world.events,
        gpus=max(engines, ranks) if config.trainer.colocated else engines + ranks,
        engine_gpus=engines,
        pools_busy=world.pools_busy() if config.pools else {},
        rewards_used=rewards.utilization() if rewards is not None else None,
        serving=world.lending.latencies() if world.lending is not None else None,
    )


def directory_of(config: RunConfig) -> RunDir:
    """Return a fresh directory for the simulation of `config`, in which earlier results
    are replaced.
    """
    named = config.model_copy(
        update={"run": config.run.model_copy(update={"name": config.run.name + SUFFIX})}
    )
    at = RunDir(Path(config.run.dir) / named.run.name)
    written = [
        file.name for file in (at.config, at.identity, at.journal, at.metrics, at.trace, at.summary)
    ]
    run = RunDir.claim(named, resume=False, replace=[*written, "report.html"])
    run.write_config(config)
    write_identity(run.identity, new_identity("simulation"))
    return run
