"""One run, as the page shows it.

Invariants: nothing is written, locked or sent to a run; a file that is missing, torn or
damaged causes at most one line in `problems`, and everything else is shown; content
that was read is not read again.
"""

import contextlib
import json
import os
import socket
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rollweave.io.reading import named
from rollweave.record.report.data import (
    DAMAGE,
    RunData,
    add_line,
    damaged_lines,
    parts_of,
    summary_of,
    totals,
)
from rollweave.record.rundir import RunDir
from rollweave.record.summary import headline_figures
from rollweave.record.transcript import (
    TokenDecoder,
    template_arguments,
    tokenizer_of,
    transcript,
)
from rollweave.schema.errors import ConfigError, CorruptJournalError
from rollweave.schema.status import RunStatus
from rollweave_ui.attempts import PAGE, AttemptIndex, AttemptRow, Query
from rollweave_ui.files import (
    AppendedFile,
    ReplacedFile,
    UnknownRunError,
    held,
    one_line,
)
from rollweave_ui.lanes import LaneIndex

BUDGET_S = 0.4
"""Maximum seconds for which a request reads files before it answers with what was read.
"""

SILENT_S = 15.0
"""Seconds without a new state after which a living controller counts as silent."""

POINTS = 240
"""Maximum number of points of a curve; neighbors are averaged if there are more."""

LOG_LINES = 60
"""Number of the newest warnings and long waits that are shown."""

RECENT_STEPS = 10
"""Number of steps over which the present shares of time are taken."""

EVALUATION = ("step", "at", "final", "success", "reward", "episodes")
"""The parts of an evaluation that are shown."""

SUMMARY = ("account", "trajectories", "tokens", "wall_s", "error", "ended_by", "attempts")
"""The parts of a summary that are shown."""

SIGNALS = (
    ("loss", "loss"),
    ("entropy", "entropy"),
    ("kl_rollout", "KL to the sampling policy"),
    ("grad_norm", "gradient norm"),
    ("clip_fraction", "clipped tokens"),
    ("logprob_gap_mean", "log-prob gap, engine to trainer"),
)
"""The trainer's values that are drawn, with their titles."""

PHASES = {
    "running": "training",
    "serving": "serving rollouts",
    "draining": "finishing rollouts in flight",
    "saving": "saving the last checkpoint",
    "evaluating": "final evaluation",
    "finished": "ending",
}
"""The activity of a living run by its phase."""


class RunView:
    """One run. Calls may come from any thread."""

    def __init__(self, path: Path) -> None:
        self.run, self.name = RunDir(path), path.name
        self._lock = threading.Lock()
        self._metrics_file = AppendedFile(self.run.metrics)
        self._files = {
            "summary": ReplacedFile(self.run.summary),
            "config": ReplacedFile(self.run.config),
            "status": ReplacedFile(self.run.status),
        }
        self._attempts = AttemptIndex(self.run.trajectories)
        self._lanes = LaneIndex(self.run.trace)
        self._decoder: TokenDecoder | None = None
        self._damaged: dict[str, str] = {}
        self.status: RunStatus | None = None
        self.settings: dict[str, Any] = {}
        self._clear(summary=None)

    def _clear(self, summary: dict[str, Any] | None) -> None:
        """Forget everything that was read from metrics.jsonl, and keep the summary."""
        self.data = RunData(name=self.name, summary=summary)
        self.waiting: list[dict[str, Any]] = []
        self._strange_lines = 0

    # Reading.

    @contextlib.contextmanager
    def _advanced(self, index: AttemptIndex | LaneIndex | None = None) -> Iterator[bool]:
        """Hold the run, read what is new, also of `index`, and yield whether nothing is
        left to read.
        """
        with held(self._lock, self.run.path):
            yield self._advance(BUDGET_S, index)

    def _advance(self, budget_s: float, index: AttemptIndex | LaneIndex | None = None) -> bool:
        until = time.monotonic() + budget_s
        self._replace("summary", self._set_summary)
        self._replace("config", self._set_config)
        self._replace("status", self._set_status)
        complete = self._read_metrics(until)
        if index is not None:
            complete &= index.advance(max(0.05, until - time.monotonic()))
        return complete

    def _read_metrics(self, until: float) -> bool:
        while True:
            lines, replaced = self._metrics_file.lines()
            if replaced:
                self._clear(self.data.summary)
            for line in lines:
                self._add_line(line)
            if not self._metrics_file.unread:
                return True
            if time.monotonic() >= until:
                return False

    def _add_line(self, text: bytes) -> None:
        try:
            line = json.loads(text)
            if line.get("kind") == "waiting":
                self.waiting = [*self.waiting[-LOG_LINES:], line]
            else:
                add_line(self.data, line)
        except DAMAGE:
            self._strange_lines += 1

    def _replace(self, name: str, use: Callable[[bytes | None], None]) -> None:
        try:
            content, changed = self._files[name].content()
            if changed:
                use(content)
                self._damaged.pop(name, None)
        except OSError as error:
            self._damaged[name] = named(error)
        except (ValueError, RecursionError, msgspec.MsgspecError) as error:
            reason = " ".join(str(error).split())[:200]
            path = self._files[name].path
            self._damaged[name] = f"{path}: it is damaged and left out: {reason}"

    def _set_summary(self, content: bytes | None) -> None:
        self.data.summary = None  # also if it is damaged
        self.data.summary = summary_of(content) if content is not None else None

    def _set_config(self, content: bytes | None) -> None:
        self.settings = tomllib.loads(content.decode()) if content is not None else {}
        self._decoder = None

    def _set_status(self, content: bytes | None) -> None:
        self.status = None  # also if it is damaged
        self.status = msgspec.json.decode(content, type=RunStatus) if content is not None else None

    # Answers.

    def line(self, budget_s: float) -> dict[str, Any]:
        """Return the run's row in the list of runs."""
        with held(self._lock, self.run.path):
            complete = self._advance(budget_s)
            data, status = self.data, self.status
            curves = self._curves("success") or self._curves("reward")
            return {
                **self._head(),
                "measures": self._measures(),
                "spark": [round(point[2], 3) for point in curves[0]["points"]] if curves else [],
                "waits": self._worst_waits(2),
                "warnings": len(data.warnings),
                "complete": complete,
                "version": status.version if status is not None else -1,
            }

    def overview(self) -> dict[str, Any]:
        """Return everything about the run except its attempts and lanes."""
        with self._advanced() as complete:
            data = self.data
            return {
                **self._head(),
                "complete": complete,
                "problems": self._problems(),
                "measures": self._measures(),
                "success": self._curves("success"),
                "reward": self._curves("reward"),
                "evaluations": [_some(line, EVALUATION) for line in data.evaluations[-POINTS:]],
                "best": data.best,
                "signals": self._signals(),
                "idle": {part: data.idle(part) for part in ("engines", "trainer")},
                "recent": {
                    part: totals(data.steps[-RECENT_STEPS:], "idle", part)
                    for part in ("engines", "trainer")
                },
                "staleness": {str(age): n for age, n in sorted(data.staleness().items())},
                "stops": dict(data.stop_reasons()),
                "status": msgspec.to_builtins(self.status) if self.status is not None else None,
                "warnings": data.warnings[-LOG_LINES:][::-1],
                "warning_count": len(data.warnings),
                "waited": self.waiting[-LOG_LINES:][::-1],
                "summary": self._summary(),
                "settings": self.settings,
            }

    def lanes(self, start: float | None, end: float | None, bins: int) -> dict[str, Any]:
        """Return the lanes of the trace between two times in seconds, by default of the
        whole trace.
        """
        with self._advanced(self._lanes) as complete:
            last = self._lanes.end_s
            start, end = start or 0.0, last if end is None else end
            hosts: dict[str, str] = {}
            if self.status is not None:
                names = self.status.hosts
                hosts = {engine.id: names.get(engine.host, "") for engine in self.status.engines}
            return {
                "complete": complete,
                "start": start,
                "end": end,
                "last": last,
                "hosts": hosts,
                "lanes": self._lanes.window(start, end, bins),
                "problems": self._problems(),
            }

    def attempts(
        self, query: Query, *, order: str, offset: int, limit: int = PAGE
    ) -> dict[str, Any]:
        """Return a page of the attempts that `query` admits."""
        with self._advanced(self._attempts) as complete:
            page = self._attempts.page(query, order=order, offset=offset, limit=limit)
            return {
                **page,
                "complete": complete,
                "domains": self._attempts.domains(),
                "problems": self._problems(),
            }

    def attempt(self, name: str, attempt: int | None) -> dict[str, Any]:
        """Return an attempt with its tokens, the attempts of its group, and the
        attempts at the same task.

        Raises UnknownRunError if the attempt does not exist or cannot be read.
        """
        with self._advanced(self._attempts) as complete:
            row = self._attempts.find(name, attempt)
            if row is None:
                more = "" if complete else ": not all are read yet, ask again"
                raise UnknownRunError(f"there is no attempt {name} in {self.name}{more}")
            arguments = dict[str, Any]()
            try:
                trajectory = self._attempts.load(row)
                arguments = template_arguments(self.run)
                decoder = self._decoder or TokenDecoder(tokenizer_of(self.run))
                self._decoder, note = decoder, ""
            except (CorruptJournalError, OSError, msgspec.DecodeError) as error:
                raise UnknownRunError(one_line(error)) from error
            except (ConfigError, ValueError) as error:
                # without a tokenizer, tokens are numbers
                decoder, note = TokenDecoder(None), one_line(error)
            return {
                "attempt": transcript(row.stored, trajectory, decoder),
                "template_arguments": arguments,
                "group": _rows(self._attempts.beside(row)),
                "task": _rows(self._attempts.of_task(row)),
                "note": note,
            }

    def figures(self) -> dict[str, Any]:
        """Return what `/metrics` shows of the run."""
        with self._advanced():
            data = self.data
            return {
                **self._head(),
                "last": data.steps[-1] if data.steps else {},
                "evaluation": data.evaluations[-1] if data.evaluations else {},
                "idle": {part: data.idle(part) for part in ("engines", "trainer")},
                "stops": dict(data.stop_reasons()),
                "warnings": len(data.warnings),
                "status": self.status,
            }

    # Parts of answers.

    def _head(self) -> dict[str, Any]:
        data, status = self.data, self.status
        kind, text = self._state()
        rollout, run = _table(self.settings, "rollout"), _table(self.settings, "run")
        steps = run.get("steps")
        if not isinstance(steps, int) or not steps:
            steps = status.steps if status is not None else 0
        done = len({line["step"] for line in data.steps})
        at = status.at if status is not None and kind != "finished" else data.wall_s
        return {
            "name": self.name,
            "path": str(self.run.path),
            "state": kind,
            "text": text,
            "mode": rollout.get("mode", ""),
            "tasks": _tasks(self.settings),
            "model": _model(self.settings),
            "step": max(done, status.step if status is not None else 0),
            "steps": steps,
            "at": at,
            "eta_s": self._remaining(steps, at) if kind == "running" else None,
            "lives": data.generations,
            "simulated": data.simulated,
            "tokens_per_s": _mean(line.get("tokens_per_s") for line in data.steps[-RECENT_STEPS:]),
        }

    def _state(self) -> tuple[str, str]:
        """Return the kind of the run's state, and a line about it."""
        status, summary = self.status, self.data.summary
        if status is not None and not status.ended:
            age = time.time() - status.written_at
            if status.machine == socket.gethostname() and not os.path.exists(f"/proc/{status.pid}"):
                return "killed", f"process {status.pid} is gone; continue with --resume"
            if age > SILENT_S:
                return "silent", f"nothing heard for {age:.0f} s (process {status.pid})"
            return "running", PHASES.get(status.phase, status.phase)
        if summary is not None:
            if summary.get("error"):
                return "failed", str(summary["error"])
            if summary.get("interrupted"):
                return "interrupted", "ended by the user; continue with --resume"
            return "finished", str(summary.get("ended_by") or "")
        if status is not None:
            return "failed", status.error or "ended without a summary; see its log"
        if not self.data.generations:
            return "empty", "it has not begun to write"
        return "unknown", "no status file: an older version wrote this run, or it was copied"

    def _remaining(self, steps: int, at: float) -> float | None:
        """Return the seconds until the last step at the present pace; None without a
        pace.
        """
        recent = self.data.steps[-RECENT_STEPS:]
        if len(recent) < 2 or not steps:
            return None
        per_step = (recent[-1]["at"] - recent[0]["at"]) / (len(recent) - 1)
        if at - recent[-1]["at"] > max(60.0, 5 * per_step):
            return None  # the run is stuck
        left: float = (steps - 1 - recent[-1]["step"]) * per_step
        return max(0.0, left)

    def _measures(self) -> dict[str, Any]:
        """Return the headline figure of each task domain, from the newest evaluation or
        else from the last steps.
        """
        data = self.data
        if data.evaluations:
            line = data.evaluations[-1]
            where = "final evaluation" if line.get("final") else f"held out, step {line['step']}"
        elif data.steps:
            line, where = data.steps[-1], f"training, step {data.steps[-1]['step']}"
        else:
            return {}
        figures = headline_figures(line.get("success") or {}, line.get("reward") or {})
        return {
            name: {"kind": kind, "value": value, "where": where}
            for name, (kind, value) in figures.items()
        }

    def _curves(self, measure: str) -> list[dict[str, Any]]:
        """Return the training curve of each task domain as points `[step, at, value,
        low, high]`. `low` and `high` are the bounds of the values that a point
        averages.
        """
        points: dict[str, list[tuple[int, float, float]]] = {}
        for line in self.data.steps:
            values = line.get(measure)
            for name, value in values.items() if isinstance(values, dict) else ():
                points.setdefault(name, []).append((line["step"], line["at"], value))
        return [{"name": name, "points": _thin(values)} for name, values in points.items()]

    def _signals(self) -> list[dict[str, Any]]:
        drawn: list[dict[str, Any]] = []
        sources: list[tuple[str, Callable[[Mapping[str, Any]], Any]]] = [
            ("tokens/s", lambda line: line.get("tokens_per_s")),
            ("seconds per step", lambda line: line.get("wall_s")),
            ("mean staleness of a batch", lambda line: _mean_age(line.get("staleness") or {})),
            *(
                (title, lambda line, name=name: (line.get("trainer") or {}).get(name))
                for name, title in SIGNALS
            ),
        ]
        for title, value_of in sources:
            found = [
                (line["step"], line["at"], value)
                for line in self.data.steps
                if isinstance(value := value_of(line), int | float)
            ]
            if found:
                drawn.append({"name": title, "points": _thin(found)})
        return drawn

    def _worst_waits(self, count: int) -> list[dict[str, Any]]:
        if self.status is None or self._state()[0] != "running":
            return []
        waits = [wait for wait in self.status.waits if is_long(wait.seconds, wait.usual_s)]
        waits.sort(key=lambda wait: -wait.seconds)
        return [msgspec.to_builtins(wait) for wait in waits[:count]]

    def _summary(self) -> dict[str, Any] | None:
        summary = self.data.summary
        return _some(summary, SUMMARY) if summary is not None else None

    def _problems(self) -> list[str]:
        unread = (self._metrics_file.problem, self._lanes.problem)
        lines = [*self._damaged.values(), *self._attempts.damaged.values(), *filter(None, unread)]
        if self._strange_lines:
            lines.append(f"metrics.jsonl: {damaged_lines(self._strange_lines)}")
        if not self.run.path.is_dir():
            lines.insert(0, f"{self.run.path} was deleted: what was read of it is shown")
        return lines


def is_long(seconds: float, usual_s: float) -> bool:
    """Return whether a wait is longer than the waits of a healthy run."""
    return seconds > max(10.0, 2.0 * usual_s)


def _rows(rows: Iterable[AttemptRow]) -> list[dict[str, Any]]:
    return [row.as_object() for row in rows][:PAGE]


def _model(settings: Mapping[str, Any]) -> str:
    model = _table(settings, "model")
    path = model.get("path")
    return Path(str(path)).name if path else ("from scratch" if "scratch" in model else "")


def _some(line: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: line.get(name) for name in names}


def _table(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = settings.get(name)
    return value if isinstance(value, dict) else {}


def _tasks(settings: Mapping[str, Any]) -> list[str]:
    """Return the names of the task domains."""
    tasks = settings.get("tasks")
    tables = [task for task in tasks if isinstance(task, dict)] if isinstance(tasks, list) else []
    return [str(task.get("name") or task.get("env", "")) for task in tables]


def _mean(values: Iterable[Any]) -> float | None:
    found = [value for value in values if isinstance(value, int | float)]
    return sum(found) / len(found) if found else None


def _mean_age(ages: Mapping[str, int]) -> float | None:
    count = sum(ages.values())
    return sum(int(age) * number for age, number in ages.items()) / count if count else None


def _thin(points: list[tuple[int, float, float]]) -> list[list[float]]:
    """Return at most `POINTS` points `[step, at, mean, least, most]`."""
    thinned = []
    for part in parts_of(points, POINTS):
        values = [value for _, _, value in part]
        mean = sum(values) / len(values)
        thinned.append([part[-1][0], part[-1][1], mean, min(values), max(values)])
    return thinned
