"""Run a configuration for a bench in a temporary directory, and measure its parts."""

import contextlib
import dataclasses
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import scratch_folder
from rollweave.io.boot import import_from_working_directory
from rollweave.record.report.data import RunData, read_run
from rollweave.record.rundir import RunDir
from rollweave.record.summary import Summary
from rollweave.record.trace import ENGINES, TRAINER
from rollweave.runtime import launch
from rollweave.runtime.hosts.cluster import SECRET_VARIABLE
from rollweave.runtime.metrics import Progress
from rollweave.schema.config.loading import load
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError, RollweaveError
from rollweave.schema.hosts import Programs

EXAMPLES = "examples"
OWN, CHAT = "frozenlake_fixed.toml", "chat/sums.toml"
"""The examples of `subject`, without and with a pretrained model."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """One finished run.

    `ready_s` is the time at which the trainer was up and warmed up, in seconds from the
    run's start.
    """

    summary: Summary
    data: RunData
    ready_s: float

    @property
    def trained_s(self) -> float:
        """Return the end of the last training step."""
        return float(self.data.steps[-1]["at"]) if self.data.steps else self.ready_s

    def with_engines_ready(self, count: int) -> "MeasuredRun":
        """Return the same run, ready when its first `count` engines are, too."""
        spans = self.data.spans
        starts = sorted(one.end for one in spans if one.row == ENGINES and one.kind == "start")
        return dataclasses.replace(self, ready_s=max([self.ready_s, *starts[:count]]))

    def reached_s(self, success: float) -> float | None:
        """Return the seconds from readiness to the first periodic evaluation in which
        every task had `success`; None if none had.
        """
        line = self._reached(success)
        return None if line is None else float(line["at"]) - self.ready_s

    def reached_step(self, success: float) -> int | None:
        """Return the number of trained steps at that evaluation; None if there was
        none.
        """
        line = self._reached(success)
        return None if line is None else int(line["step"])

    def described(self, success: float) -> str:
        """Return a line about the run, which was to reach this success."""
        if (seconds := self.reached_s(success)) is not None:
            return f"success {success} after {seconds:.1f} s, {self.reached_step(success)} steps"
        return f"{self.summary.steps} steps in {self.trained_s - self.ready_s:.1f} s"

    def _reached(self, success: float) -> dict[str, Any] | None:
        for line in self.data.evaluations:
            if not line["final"] and line["success"] and min(line["success"].values()) >= success:
                return line
        return None


def to_target(
    runs: Sequence[MeasuredRun], success: float, *, quick: bool
) -> tuple[list[float], list[float], str]:
    """Return the steps and the seconds to this success of the runs that reached it, and
    why there is no median over all runs; "" if all reached it.
    """
    steps: list[float] = [step for run in runs if (step := run.reached_step(success)) is not None]
    seconds = [time for run in runs if (time := run.reached_s(success)) is not None]
    return steps, seconds, missed(len(runs) - len(steps), len(runs), quick=quick)


def missed(count: int, runs: int, *, quick: bool) -> str:
    """Return why a median is missing if so many of the runs missed the target."""
    if not count:
        return ""
    if quick:
        return "not measured: --quick trains too few steps"
    return f"not measured: {count} of {runs} seeds did not reach the target"


def example(name: str) -> Path:
    """Return a configuration of the repository.

    Raises ConfigError where the bench is not run from a clone.
    """
    for root in (Path.cwd(), Path(__file__).parents[1]):
        path = root / EXAMPLES / name
        if path.exists():
            return path
    raise ConfigError(
        f"{EXAMPLES}/{name} must be here: run this bench in a clone of the repository"
    )


@contextmanager
def subject(model: Path | None) -> Iterator[tuple[Path, list[str]]]:
    """Yield a configuration with settings that belong to it: the fixed lake, whose
    model is trained from scratch, or the sums, which a pretrained chat `model` learns.
    The working directory is the configuration's for the context. Raises ConfigError.
    """
    path = example(OWN if model is None else CHAT).resolve()
    settings = [] if model is None else [f"model.path={_quoted(str(model.resolve()))}"]
    with contextlib.chdir(path.parent):
        import_from_working_directory()
        yield path, settings


def endless(name: str, settings: Sequence[str]) -> RunConfig:
    """Return the configuration of an example that does not end on success. Raises
    ConfigError.
    """
    config = load(example(name), settings)
    return config.model_copy(update={"eval": config.eval.model_copy(update={"stop_at": None})})


def measure(config: Path, overrides: Sequence[str]) -> MeasuredRun:
    """Train as configured, and delete the run's directory.

    Raises RollweaveError where the run fails or is stopped.
    """
    with recorded(config, overrides) as (_, _, measured):
        return measured


def interleaved(
    config: Path,
    overrides: Sequence[str],
    variants: Mapping[str, Sequence[str]],
    seeds: Iterable[int],
) -> Iterator[tuple[str, int, RunDir, MeasuredRun]]:
    """Yield variant, seed, directory and measurements of one run after another: every
    variant with the first seed, then every variant with the next. A run's directory
    exists until the next run begins.

    Raises RollweaveError where a run fails or is stopped.
    """
    for seed in seeds:
        for name, settings in variants.items():
            chosen = [*overrides, *settings, f"run.seed={seed}"]
            with recorded(config, chosen) as (_, run, measured):
                yield name, seed, run, measured


@contextmanager
def recorded(
    config: Path, overrides: Sequence[str]
) -> Iterator[tuple[RunConfig, RunDir, MeasuredRun]]:
    """Train like `measure`, and keep the run's directory for the context.

    Raises RollweaveError where the run fails or is stopped.
    """
    with scratch_folder() as scratch:
        made = load(config, [*overrides, f"run.dir={_quoted(str(scratch))}", "run.sinks=[]"])
        run, measured = trained(made)
        yield made, run, measured


def trained(
    config: RunConfig, *, programs: Programs | None = None, progress: Progress | None = None
) -> tuple[RunDir, MeasuredRun]:
    """Train in the directory that `config` names, and show `progress` the lines of
    metrics.

    Raises RollweaveError where the run fails or is stopped.
    """
    summary = launch.train(config, programs=programs, progress=progress)
    if summary.interrupted:
        raise KeyboardInterrupt
    if summary.error:
        raise RollweaveError(f"{config.run.name}: {summary.error}")
    run = RunDir(Path(config.run.dir) / config.run.name)
    data = read_run(run)
    starts = [span.end for span in data.spans if span.row == TRAINER and span.kind == "start"]
    return run, MeasuredRun(summary=summary, data=data, ready_s=starts[0] if starts else 0.0)


def shares(seconds: dict[str, float]) -> dict[str, float]:
    """Return seconds by cause as shares of their sum, from readiness on."""
    running = {cause: value for cause, value in seconds.items() if cause != "starting"}
    total = sum(running.values())
    return {cause: round(value / total, 4) for cause, value in running.items()} if total else {}


@contextmanager
def run_secret() -> Iterator[None]:
    """Set a secret of the controller and its agents for the context."""
    before = os.environ.get(SECRET_VARIABLE)
    os.environ[SECRET_VARIABLE] = secrets.token_hex(32)
    try:
        yield
    finally:
        del os.environ[SECRET_VARIABLE]
        if before is not None:
            os.environ[SECRET_VARIABLE] = before


def conditions_of(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    return {"config": path.name, "set": list(overrides)}


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
