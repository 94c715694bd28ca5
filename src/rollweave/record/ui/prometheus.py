"""The metrics of all runs of a directory in Prometheus' format, for one scrape."""

from collections.abc import Iterable
from typing import Any

from rollweave.io.http.exposition import Kind, Sample, exposition


def metrics(runs: Iterable[dict[str, Any]]) -> str:
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
