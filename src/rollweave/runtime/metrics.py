"""The metrics of a run, line by line: always `metrics.jsonl`, and optional mirrors:
TensorBoard, Trackio, and Weights & Biases, which are extras and imported only if
`run.sinks` names them.

Invariants: there is one line of kind `step` per training step, of kind `evaluation` per
evaluation and of kind `warning` per warning, in the order in which they happened, each
with the run's time. Lines are written atomically; a torn line that a power loss has
left is cut off. Sinks only mirror lines.
"""

import contextlib
import importlib
import importlib.util
import json
import math
import os
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from rollweave.core.policy.health import GAP, wide_gaps
from rollweave.core.policy.modes import origin
from rollweave.core.state import State
from rollweave.io.disk import AppendFile, writing
from rollweave.io.extras import how_to_install
from rollweave.io.reading import CHUNK, lines, opened
from rollweave.record.summary import CounterSnapshot
from rollweave.schema.base import EngineId
from rollweave.schema.commands import MarkBest, RecordEvaluation, TrainStep, Warn
from rollweave.schema.errors import ConfigError
from rollweave.schema.serving import EngineStats
from rollweave.schema.training import PredictorStats, TrainMetrics
from rollweave.schema.work import Batch


class Sink(Protocol):
    """A mirror of numeric metrics."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of one training step or evaluation."""

    def close(self) -> None:
        """Flush and release the mirror."""


class Progress(Protocol):
    """Shows the run to the user: the display of the command line."""

    def line(self, line: Mapping[str, Any]) -> None:
        """Show a line of metrics.jsonl."""

    def phase(self, text: str) -> None:
        """Show the phase of the run: starting, training, the final evaluation."""


class Silent:
    """A `Progress` that shows nothing."""

    def line(self, line: Mapping[str, Any]) -> None:
        return

    def phase(self, text: str) -> None:
        return


class Metrics:
    """Writes lines of metrics.

    `state` returns the core's state, which has counters and idle times. An engine whose
    log-probs differ from the trainer's by more than `max_gap` on average is warned of,
    once until they agree again.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float],
        state: Callable[[], State],
        progress: Progress,
        sinks: Sequence[Sink] = (),
        max_gap: float = math.inf,
    ) -> None:
        """Append to `path`. Raises DiskError, as do all methods that write a line."""
        self._file = AppendFile(path, keep=_whole_lines(path))
        self._clock, self._state, self._progress, self._sinks = clock, state, progress, sinks
        self._max_gap = max_gap
        self._warned_of: set[str] = set()
        self._parts: list[tuple[TrainStep, Batch, TrainMetrics]] = []
        self._before = CounterSnapshot.of(state(), clock())
        self._engines: Mapping[EngineId, EngineStats] = {}
        self._predictor: PredictorStats | None = None
        self.last_evaluation: dict[str, Any] | None = None
        self.final_evaluation: dict[str, Any] | None = None

    def sampled(
        self, engines: Mapping[EngineId, EngineStats], predictor: PredictorStats | None = None
    ) -> None:
        """Take statistics of engines and predictor for the next step's line."""
        self._engines, self._predictor = engines, predictor

    def trained(self, command: TrainStep, batch: Batch, metrics: TrainMetrics) -> None:
        """Take the metrics of a mini-batch; the step's last one writes the line."""
        if command.part == 0:
            self._parts.clear()  # parts of a step that was lost with its trainer
        self._parts.append((command, batch, metrics))
        if command.part + 1 < command.parts:
            return
        parts, self._parts = self._parts, []
        now, state = self._clock(), self._state()
        counted = CounterSnapshot.of(state, now)
        line = {
            "kind": "step",
            "step": command.step,
            "at": round(now, 3),
            **_outcome(parts, state.evaluations.defines_success),
            "staleness": _staleness(parts),
            "trainer": _mean_values(parts),
            **counted.since(self._before),
            "engines": msgspec.to_builtins(self._engines),
        }
        if self._predictor is not None:
            line["predictor"] = msgspec.structs.asdict(self._predictor)
        self._before = counted
        self._write(line)
        self._mirror(command.step, line)
        self._compare_engines(command.step, line["trainer"])

    def _compare_engines(self, step: int, values: Mapping[str, float]) -> None:
        wide = wide_gaps(values, self._max_gap)
        for engine in wide.keys() - self._warned_of:
            text = (
                f"its log-probs differ from the trainer's by {wide[engine]:.2g} on average at "
                f"step {step}, and rounding explains {self._max_gap:g}: it may compute with other "
                "weights than it was given"
            )
            self.warned(Warn(component=engine, message=text))
        measured = {name.removeprefix(GAP) for name in values if name.startswith(GAP)}
        self._warned_of = (self._warned_of - measured) | wide.keys()

    def evaluated(self, command: RecordEvaluation) -> None:
        """Write an evaluation's line."""
        line = {
            "kind": "evaluation",
            "step": command.version,
            "at": round(self._clock(), 3),
            "final": command.final,
            "success": command.success,
            "reward": command.reward,
            "episodes": command.episodes,
            "distinct": command.distinct,
            "failed": command.failed,
            **({"last_failure": command.last_failure} if command.last_failure else {}),
            "target_reached": command.target_reached,
        }
        self.last_evaluation = line
        if command.final:
            self.final_evaluation = line
        self._write(line)
        self._mirror(command.version, line, prefix="evaluation/")

    def warned(self, command: Warn) -> None:
        """Write a warning's line."""
        self._write(
            {
                "kind": "warning",
                "at": round(self._clock(), 3),
                "component": command.component,
                "message": command.message,
            }
        )

    def best(self, command: MarkBest) -> None:
        """Write the line of a new best checkpoint."""
        self._write({"kind": "best", "at": round(self._clock(), 3), "step": command.step})

    def event(self, kind: str, **fields: Any) -> None:
        """Write a line of another kind, such as the start or end of the run."""
        self._write({"kind": kind, "at": round(self._clock(), 3), **fields})

    def close(self) -> None:
        self._file.close()
        with writing(self._file.path.parent):
            for sink in self._sinks:
                sink.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.append(json.dumps(line).encode() + b"\n")
        self._progress.line(line)

    def _mirror(self, step: int, line: Mapping[str, Any], prefix: str = "") -> None:
        if self._sinks:
            values = {
                f"{prefix}{name}": value
                for name, value in _flat(line)
                if name not in ("step", "final", "target_reached")
            }
            with writing(self._file.path.parent):
                for sink in self._sinks:
                    sink.write(step, values)


def written_steps(path: Path) -> set[int]:
    """Return the steps of which `path` has a readable line; none if there is no such
    file.
    """
    steps: set[int] = set()
    for line in lines(path) if path.exists() else ():
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            read = json.loads(line)
            if read["kind"] == "step":
                steps.add(read["step"])
    return steps


def _whole_lines(path: Path) -> int:
    """Return the size of the complete lines, in bytes."""
    if not path.exists():
        return 0
    with opened(path) as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - CHUNK)
            file.seek(start)
            if (found := file.read(end - start).rfind(b"\n")) >= 0:
                return start + found + 1
            end = start
    return 0


def _outcome(
    parts: Sequence[tuple[TrainStep, Batch, TrainMetrics]], defining: Collection[str]
) -> dict[str, Any]:
    """Return reward and success of the trained trajectories by task domain, success
    only for domains whose environments define it, and the components of the reward
    only for domains that have several.
    """
    rewards: dict[str, list[float]] = {}
    components: dict[str, dict[str, list[float]]] = {}
    successes: dict[str, list[bool]] = {}
    tokens = turns = 0
    for _, batch, _ in parts:
        for group in batch.groups:
            for trajectory in group.trajectories:
                reward = trajectory.reward or 0.0
                rewards.setdefault(group.env, []).append(reward)
                for name, value in trajectory.rewards.items():
                    components.setdefault(group.env, {}).setdefault(name, []).append(value)
                successes.setdefault(group.env, []).append(bool(trajectory.success))
                tokens += sum(len(sequence.tokens) for sequence in trajectory.sequences)
                turns += sum(len(sequence.turns) for sequence in trajectory.sequences)
    count = sum(map(len, rewards.values()))
    several = {
        domain: {name: sum(values) / len(values) for name, values in named.items()}
        for domain, named in components.items()
    }
    return {
        "reward": {name: sum(values) / len(values) for name, values in rewards.items()},
        **({"rewards": several} if several else {}),
        "success": {
            name: sum(values) / len(values)
            for name, values in successes.items()
            if name in defining
        },
        "trajectories": count,
        "batch_tokens": tokens,
        "turns_mean": turns / count if count else 0.0,
    }


def _staleness(parts: Sequence[tuple[TrainStep, Batch, TrainMetrics]]) -> dict[str, int]:
    """Return the number of trajectories by staleness: the steps between the weights
    that started them and the trained step.
    """
    ages = Counter(
        command.step - origin(trajectory.initiated_version, group.restored_to.get(trajectory.id))
        for command, batch, _ in parts
        for group in batch.groups
        for trajectory in group.trajectories
    )
    return {str(age): ages[age] for age in sorted(ages)}


def _mean_values(parts: Sequence[tuple[TrainStep, Batch, TrainMetrics]]) -> dict[str, float]:
    """Average the trainer's metrics over mini-batches, and sum its seconds and tokens.
    An age that a mini-batch does not have is a share of 0.
    """
    gathered: dict[str, list[float]] = {}
    for _, _, metrics in parts:
        for name, value in metrics.values.items():
            gathered.setdefault(name, []).append(value)
    means = {
        name: sum(values) / (len(parts) if name.startswith("age/") else len(values))
        for name, values in gathered.items()
    }
    means["train_s"] = sum(metrics.train_s for _, _, metrics in parts)
    means["trained_tokens"] = float(sum(metrics.tokens for _, _, metrics in parts))
    return means


def _flat(line: Mapping[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """Return the numbers of a nested line, with names such as `a/b`."""
    numbers: list[tuple[str, float]] = []
    for name, value in line.items():
        if isinstance(value, Mapping):
            numbers.extend(_flat(value, f"{prefix}{name}/"))
        elif isinstance(value, int | float):
            numbers.append((f"{prefix}{name}", float(value)))
    return numbers


PACKAGES = {"tensorboard": "torch.utils.tensorboard", "trackio": "trackio", "wandb": "wandb"}


class TensorBoard:
    """Writes event files to `<run>/tensorboard`."""

    def __init__(self, module: Any, run_dir: Path) -> None:
        self._writer = module.SummaryWriter(str(run_dir / "tensorboard"))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Trackio:
    """Mirrors to a run of Trackio's project `rollweave`, in the database of this
    machine; `trackio show --project rollweave` shows it.

    Its name is that of the run and a number of the run directory, so that `--resume`
    continues it, and no other run of the same name does.
    """

    def __init__(self, module: Any, run_dir: Path, config: dict[str, Any]) -> None:
        self._run = module.init(
            project="rollweave",
            name=f"{run_dir.name}-{_kept_id(run_dir / 'trackio_id')}",
            config=config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class WandB:
    """Mirrors to a W&B run of the same name, offline or online as the user's
    environment selects.

    `--resume` continues the same W&B run.
    """

    def __init__(self, module: Any, run_dir: Path, config: dict[str, Any]) -> None:
        self._run = module.init(
            project="rollweave",
            name=run_dir.name,
            dir=str(run_dir),
            config=config,
            id=_kept_id(run_dir / "wandb_id"),
            resume="allow",
        )
        self._run.define_metric("*", step_metric="training_step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "training_step": step})

    def close(self) -> None:
        self._run.finish()


def _kept_id(file: Path) -> str:
    """Return the run's id there; a new one that is written to the file if it is
    absent.
    """
    if not file.exists():
        file.write_text(secrets.token_hex(4))
    return file.read_text()


def missing_sinks(names: Sequence[str]) -> list[str]:
    """Return those of `names` whose package is not installed."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def open_sinks(names: Sequence[str], run_dir: Path, config: dict[str, Any]) -> list[Sink]:
    """Open the sinks of `run.sinks`. Raises ConfigError if a package is missing."""
    missing = missing_sinks(names)
    if missing:
        raise ConfigError(f"run.sinks: {missing[0]} is not installed; {how_to_install(missing[0])}")
    sinks: list[Sink] = []
    for name in names:
        module = importlib.import_module(PACKAGES[name])
        match name:
            case "tensorboard":
                sinks.append(TensorBoard(module, run_dir))
            case "trackio":
                sinks.append(Trackio(module, run_dir, config))
            case _:
                sinks.append(WandB(module, run_dir, config))
    return sinks
