"""Reads the files of a run, even while it runs, and after it was killed.

Invariants: only `metrics.jsonl` is required; if another file is missing or damaged, its
part of the report is left out. Lines that are torn or foreign are ignored.
"""

import contextlib
import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rollweave.io.reading import lines, whole
from rollweave.record.rundir import RunDir
from rollweave.record.trace import ENGINES, ENVIRONMENTS, TRAINER
from rollweave.schema.errors import ConfigError

FILE_BYTES = 64 << 20
"""Maximum size of a summary or a configuration."""

DAMAGE = (ValueError, RecursionError, AttributeError, msgspec.MsgspecError)
"""Exceptions that `add_line` and `summary_of` raise for content that no run has
written.
"""

T = TypeVar("T")

Figures = dict[str, float | None]


class _Figures(msgspec.Struct):
    """The fields of a step or an evaluation on whose types readers depend."""

    step: int
    at: float
    reward: Figures = {}
    success: Figures = {}
    staleness: dict[int, int] = {}
    idle: dict[str, dict[str, float]] = {}
    trainer: dict[str, Any] = {}
    stop_reasons: dict[str, int] = {}


class _Warning(msgspec.Struct):
    """The fields of a warning on whose types readers depend."""

    at: float
    component: str
    message: str


class _Summary(msgspec.Struct):
    """The fields of a summary on whose types readers depend."""

    wall_s: float
    idle: dict[str, dict[str, float]] = {}
    stop_reasons: dict[str, int] = {}


SHAPES = {"step": _Figures, "evaluation": _Figures, "warning": _Warning}
"""The checked fields of the lines of metrics.jsonl, by the kind of line."""


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """A box of the trace, in seconds of the run's clock."""

    row: int
    lane: int
    name: str
    start: float
    end: float

    @property
    def kind(self) -> str:
        """The first word of the name: `turn`, `init`, `step`, `eval`, `train`,
        `publish`, `load`…
        """
        return self.name.split(" ", 1)[0]

    @property
    def engine(self) -> str:
        """The engine that answered a turn; empty for other spans."""
        parts = self.name.split(" ")
        return parts[2] if parts[0] == "turn" and len(parts) > 2 else ""


@dataclass(slots=True)
class RunData:
    """The content of a report."""

    name: str
    steps: list[dict[str, Any]] = field(default_factory=list)
    # steps that were lost with their trainers
    lost: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[dict[str, Any]] = field(default_factory=list)
    best: int | None = None
    generations: int = 0
    simulated: bool = False  # rewards are drawn, nothing is learned
    summary: dict[str, Any] | None = None
    config: str = ""
    spans: list[TraceSpan] = field(default_factory=list)
    lanes: dict[tuple[int, int], str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    """A line about each file that is left out, whole or in part."""

    def leave_out(self, path: Path, message: str) -> None:
        """Note that a file is left out, whole or in part."""
        self.left_out.append(f"{path}: {message}")
        self.warnings.append({"at": self.wall_s, "component": path.name, "message": message})

    @property
    def tasks(self) -> list[str]:
        """Task domains in order of appearance."""
        names = [name for line in [*self.steps, *self.evaluations] for name in line["reward"]]
        return list(dict.fromkeys(names))

    @property
    def measures(self) -> dict[str, str]:
        """The measure of each task domain: "success" if its environment has reported
        success in any line, else "reward".
        """
        lines = [*self.steps, *self.evaluations]
        return {
            name: "success" if any(name in line["success"] for line in lines) else "reward"
            for name in self.tasks
        }

    @property
    def wall_s(self) -> float:
        if self.summary is not None:
            return float(self.summary["wall_s"])
        return float(self.steps[-1]["at"]) if self.steps else 0.0

    def staleness(self) -> Counter[int]:
        """Count trained trajectories by the number of steps between the weights that
        started them and the step.
        """
        ages: Counter[int] = Counter()
        for line in self.steps:
            for age, count in line.get("staleness", {}).items():
                ages[int(age)] += count
        return ages

    def inherent_staleness(self) -> Counter[int]:
        """Count trajectories by the number of versions published during their rollout
        (Laminar §6).
        """
        return Counter(
            {int(age): int(count) for age, count in self._counted("inherent_staleness").items()}
        )

    def stop_reasons(self) -> Counter[str]:
        return Counter(
            {reason: int(count) for reason, count in self._counted("stop_reasons").items()}
        )

    def idle(self, component: str) -> dict[str, float]:
        """Return the seconds of `engines` or `trainer` by activity or cause of
        waiting.
        """
        return self._counted("idle", component)

    def weights(self) -> dict[str, float]:
        """Return how long engines received new weights, and stopped for them."""
        return self._counted("weights")

    def workers(self) -> dict[str, float]:
        """Return the starts and seconds of rollout workers; empty unless their number
        changed.
        """
        return self._counted("workers")

    def _counted(self, *names: str) -> dict[str, float]:
        """Return totals of the whole run, including lost steps: the summary's totals,
        or without a summary the sums up to the last step.

        If a controller was killed, the lines add up to less than the summary, since
        they lack what the controller did after its last step.
        """
        if self.summary is not None and names[0] in self.summary:
            return _under(self.summary, names)
        return totals([*self.lost, *self.steps], *names)


def read_run(run: RunDir) -> RunData:
    """Read the run's files. Raises ConfigError if there is nothing to report."""
    if not run.metrics.exists():
        raise ConfigError(f"{run.path} must hold metrics.jsonl, found none yet")
    data, strange = RunData(name=run.path.resolve().name), 0
    for text in lines(run.metrics):
        try:
            add_line(data, json.loads(text.decode(errors="replace")))
        except DAMAGE:
            # the last line may be torn, or be written at this moment
            strange += text.endswith(b"\n")
    if strange:
        data.leave_out(run.metrics, damaged_lines(strange))
    with _left_out(data, run.summary):
        data.summary = summary_of(whole(run.summary, FILE_BYTES))
    with _left_out(data, run.config):
        config = whole(run.config, FILE_BYTES).decode(errors="replace")
        tomllib.loads(config)
        data.config = config
    with _left_out(data, run.trace):
        _read_trace(run.trace, data)
    return data


@contextlib.contextmanager
def _left_out(data: RunData, path: Path) -> Iterator[None]:
    """Leave out a file that is missing, and name a file that cannot be read."""
    try:
        yield
    except FileNotFoundError:
        pass
    except OSError as error:
        data.leave_out(path, f"it is left out: {error.strerror or error}")
    except DAMAGE as error:
        reason = " ".join(str(error).split())[:200]
        data.leave_out(path, f"it is damaged and left out: {reason}")


def summary_of(content: bytes) -> dict[str, Any]:
    """Return the summary in a file's content. Raises one of `DAMAGE`."""
    summary: dict[str, Any] = json.loads(content)
    msgspec.convert(summary, _Summary, str_keys=True)
    return summary


def damaged_lines(count: int) -> str:
    """Describe the lines of metrics.jsonl that are left out."""
    return f"{count} lines are damaged and left out"


def add_line(data: RunData, line: dict[str, Any]) -> None:
    """Add a line of metrics.jsonl. Steps that follow a lost trainer replace the steps
    that were lost with the trainer. Raises one of `DAMAGE`.
    """
    kind = line.get("kind")
    if (shape := SHAPES.get(kind or "")) is not None:
        msgspec.convert(line, shape, str_keys=True)
    match kind:
        case "step":
            while data.steps and data.steps[-1]["step"] >= line["step"]:
                data.lost.append(data.steps.pop())
            data.steps.append(line)
        case "evaluation":
            data.evaluations.append(line)
        case "warning":
            data.warnings.append(line)
        case "best":
            data.best = line.get("step")
        case "started" | "resumed":
            data.generations += 1
            data.simulated = bool(line.get("simulated"))
        case _:
            pass


def parts_of(items: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    """Divide items into at most `most` parts of about equal sizes, in order."""
    count = min(most, len(items))
    for index in range(count):
        yield items[index * len(items) // count : (index + 1) * len(items) // count]


def totals(lines: Iterable[Mapping[str, Any]], *names: str) -> dict[str, float]:
    """Return the sums over the lines of what each line has under `names`."""
    summed: Counter[str] = Counter()
    for line in lines:
        summed.update(_under(line, names))
    return dict(summed)


def _under(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    for name in names:
        values = values.get(name) or {}
    return dict(values)


def _objects(texts: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the texts that are JSON objects."""
    for text in texts:
        try:
            value = json.loads(text.decode(errors="replace"))
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value


def _read_trace(path: Path, data: RunData) -> None:
    """Read boxes and lane names of `trace.json`, which has one event per line."""
    for event in _objects(line.rstrip().rstrip(b",") for line in lines(path)):
        with contextlib.suppress(KeyError, TypeError):  # a foreign event
            _read_event(event, data)


def _read_event(event: dict[str, Any], data: RunData) -> None:
    if event.get("ph") == "M" and event["name"] == "thread_name":
        data.lanes[event["pid"], event["tid"]] = event["args"]["name"]
    elif event.get("ph") == "X" and event["pid"] in (ENGINES, ENVIRONMENTS, TRAINER):
        start = event["ts"] / 1e6
        data.spans.append(
            TraceSpan(event["pid"], event["tid"], event["name"], start, start + event["dur"] / 1e6)
        )
