"""Runs with two vLLM servers, one of whose engines is lost: killed, or stopped in the
middle of an update.

In the middle of an update, the server is suspended, has mapped the new version and has
not yet reported that it is loaded. It is stopped when its table of memory shows such a
mapping; a stop that came too late, which the journal shows, is tried again.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.soak.bench import unaccounted
from benchmarks.soak.run_under_test import RunUnderTest
from benchmarks.vllm.exactness import ENGINE
from rollweave.record.journal import JournalEntry
from rollweave.record.journal_file import JournalReader
from rollweave.sandbox.processes import Table, family, started
from rollweave.schema.base import EngineId
from rollweave.schema.config.loading import load
from rollweave.schema.errors import RollweaveError
from rollweave.schema.events import (
    EngineJoined,
    EngineLost,
    EngineSuspended,
    Event,
    WeightsLoaded,
    WeightsLoadFailed,
)

MAPPED = "/memfd:weights-"
"""Name by which a process's memory map lists a published version."""

POLL_S = 0.002
"""Seconds between two looks at the memory of a server: an update takes tens of
milliseconds.
"""

EVENTS_S = 2.0
"""Seconds between two readings of the journal, and between two of the processes."""

UPDATE_S, LOST_S, STEP_S = 600.0, 400.0, 900.0
"""Maximum seconds until an engine updates, until a stopped one is lost, and until one
has rejoined and a step is trained.
"""

TRIES = 8
"""Maximum number of stops until one is in the middle of an update."""


@dataclass(frozen=True, kw_only=True)
class Survived:
    """The losses of a run, which are none if all of this is 0. `reason` is why the
    engine was lost, `tries` how often one was stopped.
    """

    unaccounted: int
    trained_twice: int
    mixed_versions: int
    leftovers: int
    reason: str
    tries: int
    rejoined_s: float
    account: dict[str, Any]


def kill_one(config: Path, settings: Sequence[str]) -> Survived:
    """Kill an engine, with SIGKILL. Raises RollweaveError if the run does not
    recover.
    """

    def struck(run: RunUnderTest) -> int:
        run.strike(ENGINE, signal.SIGKILL, min)
        run.wait(_every(EVENTS_S, lambda: bool(_losses(run))), LOST_S, "the loss of the engine")
        return 1

    return _survived(config, settings, struck)


def stop_one_in_update(config: Path, settings: Sequence[str]) -> Survived:
    """Stop the server of an engine in the middle of an update, with SIGSTOP. Raises
    RollweaveError if the run does not recover.
    """

    def struck(run: RunUnderTest) -> int:
        for number in range(1, TRIES + 1):
            before = len(_losses(run))
            _stop_in_update(run)
            lost = _every(EVENTS_S, lambda before=before: len(_losses(run)) > before)  # type: ignore[misc]
            run.wait(lost, LOST_S, "the loss of the engine")
            if lost_in_update(list(_events(run))):
                return number
        raise RollweaveError(f"none of {TRIES} stops was in the middle of an update")

    return _survived(config, settings, struck)


def _survived(
    config: Path, settings: Sequence[str], strike: Callable[[RunUnderTest], int]
) -> Survived:
    """Run until an engine was lost and has rejoined; `strike` returns once it is
    lost.
    """
    with RunUnderTest(load(config, settings)) as run:
        run.start()
        run.wait(lambda: run.trained >= 2, STEP_S, "two trained steps")
        seen = _processes(run)
        joined = _joined(run)
        tries = strike(run)
        reason, lost_at = _losses(run)[-1].splitlines()[0], time.monotonic()
        anew = _every(EVENTS_S, lambda: _joined(run) >= joined + tries)
        run.wait(anew, STEP_S, "a new engine")
        rejoined_s, before = time.monotonic() - lost_at, run.trained
        run.wait(lambda: run.trained > before, STEP_S, "a step with the new engine")
        seen |= _processes(run)
        summary = run.stop(STEP_S)
        ids = run.lineage().ids
        return Survived(
            unaccounted=unaccounted(summary["account"], trained=len(ids)),
            trained_twice=len(ids) - len(set(ids)),
            mixed_versions=run.mixed_versions() if run.config.rollout.mode == "decoupled" else 0,
            leftovers=run.leftovers + len(Table.now().below(seen)),
            reason=reason,
            tries=tries,
            rejoined_s=round(rejoined_s, 1),
            account=summary["account"],
        )


def _processes(run: RunUnderTest) -> dict[int, int]:
    """Return the start times, by pid, of the processes of all engines."""
    return started(pid for engine in run.children(ENGINE) for pid in family(engine))


def _stop_in_update(run: RunUnderTest) -> None:
    """Stop all processes of a server once it has mapped a version."""
    until, looked, servers = time.monotonic() + UPDATE_S, 0.0, list[list[int]]()
    while time.monotonic() < until:
        if time.monotonic() - looked > EVENTS_S:
            run.inspect()
            engines, looked = run.children(ENGINE), time.monotonic()
            servers = [sorted(family(engine) - {engine}) for engine in engines]
        for pids in servers:
            if any(map(_has_mapped, pids)):
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGSTOP)
                return
        time.sleep(POLL_S)
    raise RollweaveError(f"no engine was updated within {UPDATE_S:g} s")


def _has_mapped(pid: int) -> bool:
    try:
        return MAPPED in Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # it has ended
        return False


def _every(seconds: float, condition: Callable[[], bool]) -> Callable[[], bool]:
    """Return a condition that is examined at most once in so many seconds."""
    examined = 0.0

    def examine() -> bool:
        nonlocal examined
        if time.monotonic() - examined < seconds:
            return False
        held, examined = condition(), time.monotonic()
        return held

    return examine


def lost_in_update(events: Sequence[Event]) -> bool:
    """Return whether the engine that was lost last had been suspended for an update."""
    suspended, last = dict[EngineId, bool](), False
    for event in events:
        match event:
            case EngineSuspended(engine_id=engine):
                suspended[engine] = True
            case WeightsLoaded(engine_id=engine) | WeightsLoadFailed(engine_id=engine):
                suspended[engine] = False
            case EngineLost(engine_id=engine):
                last, suspended[engine] = suspended.get(engine, False), False
            case _:
                pass
    return last


def _losses(run: RunUnderTest) -> list[str]:
    """Return the reasons for the losses of engines, in order."""
    return [event.error for event in _events(run) if isinstance(event, EngineLost)]


def _joined(run: RunUnderTest) -> int:
    return sum(isinstance(event, EngineJoined) for event in _events(run))


def _events(run: RunUnderTest) -> Iterator[Event]:
    for _, entry in JournalReader[JournalEntry](run.run.journal, JournalEntry):
        yield entry.event
