"""The runs in a directory: their list, and their metrics in Prometheus' format.

A run that cannot be read is shown as damaged, and hides no other run.
"""

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rollweave.io.http.exposition import Kind, Sample, exposition
from rollweave.record.rundir import RunDir
from rollweave_ui.files import UnknownRunError, held, one_line
from rollweave_ui.view import BUDGET_S, RunView

MAX_ENTRIES = 10_000
"""Maximum number of a directory's entries that are examined."""


class Runs:
    """The runs in `directory`, which may be a run itself. Calls may come from any
    thread.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._views: dict[str, RunView] = {}

    def overview(self) -> dict[str, Any]:
        """Return a row for each run, the one that was written last first."""
        until = time.monotonic() + BUDGET_S
        rows = self._each(lambda view: view.line(max(0.0, until - time.monotonic())))
        rows.sort(key=lambda row: -row["changed"])
        return {"directory": str(self._directory), "runs": rows}

    def figures(self) -> list[dict[str, Any]]:
        """Return what `/metrics` shows of each run."""
        return self._each(RunView.figures)

    def _each(self, read: Callable[[RunView], dict[str, Any]]) -> list[dict[str, Any]]:
        """Return what `read` returns for each run; for a run that cannot be read, its
        name and the reason.
        """
        rows = []
        for view in self._found():
            try:
                row = read(view)
            except Exception as error:  # what no check foresaw must not hide the other runs
                path = str(view.run.path)
                row = {
                    "name": view.name,
                    "path": path,
                    "state": "damaged",
                    "text": one_line(error),
                }
            rows.append({**row, "changed": _changed(view.run)})
        return rows

    def get(self, name: str) -> RunView:
        """Return a run by its name. Raises UnknownRunError."""
        views = {view.name: view for view in self._found()}
        if name in views:
            return views[name]
        raise UnknownRunError(f"there is no run {name!r:.80} in {self._directory}: it was deleted")

    def _found(self) -> list[RunView]:
        with held(self._lock, self._directory):
            there = {path.name: path for path in _run_directories(self._directory)}
            self._views = {
                name: self._views.get(name) or RunView(path) for name, path in there.items()
            }
            return list(self._views.values())


def is_run(path: Path) -> bool:
    """Return whether a run has written to this directory."""
    return any(
        os.path.exists(path / name) for name in ("config.toml", "metrics.jsonl", "status.json")
    )


def _run_directories(directory: Path) -> list[Path]:
    """Return the runs among the first `MAX_ENTRIES` entries of a directory, by name."""
    if is_run(directory):
        return [directory]
    try:
        with os.scandir(directory) as entries:
            looked_at = list(itertools.islice(entries, MAX_ENTRIES))
    except OSError:
        return []
    paths = sorted(directory / entry.name for entry in looked_at if _is_directory(entry))
    return [path for path in paths if is_run(path)]


def _is_directory(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a loop of links, for example
        return False


def _changed(run: RunDir) -> float:
    times = []
    for path in (run.status, run.metrics, run.config):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return round(max(times, default=0.0), 3)


def prometheus_text(runs: Iterable[dict[str, Any]]) -> str:
    """Return the figures of all runs in Prometheus' text format. Each sample has the
    label `run`. Of a run that cannot be read, only the state is returned.
    """
    samples: list[Sample] = []

    def add(kind: Kind, name: str, value: Any, /, **labels: str) -> None:
        if isinstance(value, int | float):
            samples.append(Sample(kind, name, value, labels))

    for figures in runs:
        run = figures["name"]
        add("gauge", "run_up", figures["state"] == "running", run=run, state=figures["state"])
        if figures["state"] == "damaged":
            continue
        add("counter", "run_steps_total", figures["step"], run=run)
        add("gauge", "run_steps_configured", figures["steps"] or None, run=run)
        add("gauge", "run_seconds", figures["at"], run=run)
        add("counter", "run_warnings_total", figures["warnings"], run=run)
        _add_step(add, run, figures["last"])
        for kind in ("reward", "success"):
            for task, value in (figures["evaluation"].get(kind) or {}).items():
                add("gauge", f"run_evaluation_{kind}", value, run=run, task=task)
        for part, causes in figures["idle"].items():
            for cause, seconds in causes.items():
                add("counter", "run_time_seconds_total", seconds, run=run, part=part, cause=cause)
        for reason, count in figures["stops"].items():
            add("counter", "run_attempts_ended_total", count, run=run, stop_reason=reason)
        if figures["status"] is not None and figures["state"] == "running":
            _add_status(add, run, figures["status"])
    return exposition(sorted(samples, key=lambda sample: sample.name))


def _add_step(add: Any, run: str, line: dict[str, Any]) -> None:
    for kind in ("reward", "success"):
        for task, value in (line.get(kind) or {}).items():
            add("gauge", f"run_{kind}", value, run=run, task=task)
    add("gauge", "run_tokens_per_second", line.get("tokens_per_s"), run=run)
    add("gauge", "run_step_seconds", line.get("wall_s"), run=run)
    for name, value in (line.get("trainer") or {}).items():
        add("gauge", "run_trainer", value, run=run, name=name)


def _add_status(add: Any, run: str, status: Any) -> None:
    for stage, count in status.attempts.items():
        add("gauge", "run_attempts", count, run=run, stage=stage)
    add("gauge", "run_groups_buffered", status.buffered, run=run)
    add("gauge", "run_turns_queued", status.queued_turns, run=run)
    for engine in status.engines:
        labels = {"run": run, "engine": engine.id}
        add("gauge", "run_engine_turns", engine.busy, **labels)
        add("gauge", "run_engine_slots", engine.slots, **labels)
        add("gauge", "run_engine_weights_version", engine.version, **labels)
        add("gauge", "run_engine_lent", int(engine.lent), **labels)
    longest: dict[tuple[str, str], float] = {}
    for wait in status.waits:  # one target may be waited for in several ways
        ends = wait.waiter, wait.target
        longest[ends] = max(wait.seconds, longest.get(ends, 0.0))
    for (waiter, target), seconds in longest.items():
        add("gauge", "run_wait_seconds", seconds, run=run, waiter=waiter, target=target)
