"""Record journals: `python -m tests.journals.record OUT` runs the core's and the
simulator's tests and some seeds of faults, and writes the journals of their cores.

Journals that do not replay are left out: tests change some states by hand. Of the
others as many are kept as `--events` allows, first those that execute lines of the core
that no journal kept before executes.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rollweave.core.core import Core
from rollweave.schema.base import packed
from rollweave.schema.commands import Command
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError
from rollweave.schema.events import Event, RunStarted
from rollweave_sim.faults import search
from tests.journals.recording import (
    STATUS_EVERY,
    SUFFIX,
    Recording,
    differences,
    digest_of,
    status_digest,
)
from tests.support.core import always_split

TESTS = (
    "tests/core",
    "--ignore=tests/core/policy",
    *(
        f"packages/sim/tests/test_{name}.py"
        for name in ("affinity", "borrowed", "hosts", "joining")
    ),
)
"""Tests whose cores are recorded."""
SEEDS = range(40)
"""Seeds of faults whose cores are recorded."""
MAX_EVENTS = 8_000
"""Maximum events of a journal."""
MIN_EVENTS = 30
"""Minimum events of a journal."""


class Tape(NamedTuple):
    """What a core was told and did. `entries` has each event with its commands."""

    config: RunConfig
    entries: list[tuple[float, Event, bytes]]


_tapes: dict[int, tuple[Core, Tape]] = {}
_all: list[Tape] = []
_snapshots: dict[bytes, Tape] = {}
_handle, _snapshot, _init = Core.handle, Core.snapshot, Core.__init__
_restore = Core.restore.__func__  # type: ignore[attr-defined]
_restoring = list[Tape | None]()


def install() -> None:
    """Record every core of this process from here on."""
    Core.__init__ = _recorded_init  # type: ignore[method-assign]
    Core.handle = _recorded_handle  # type: ignore[method-assign]
    Core.snapshot = _recorded_snapshot  # type: ignore[method-assign]
    Core.restore = classmethod(_recorded_restore)  # type: ignore[assignment]


def _recorded_init(self: Core, config: RunConfig, state: Any = None, **options: Any) -> None:
    _init(self, config, state, **options)
    tape = _restoring[-1] if _restoring else Tape(config, []) if state is None else None
    if tape is not None:
        if state is None:
            _all.append(tape)
        _tapes[id(self)] = self, tape


def _recorded_handle(self: Core, now: float, event: Event) -> list[Command]:
    commands = _handle(self, now, event)
    known = _tapes.get(id(self))
    if known is not None and len(known[1].entries) <= MAX_EVENTS:
        known[1].entries.append((now, event, digest_of(commands)))
    return commands


def _recorded_snapshot(self: Core) -> bytes:
    snapshot = _snapshot(self)
    known = _tapes.get(id(self))
    if known is not None:
        _snapshots[snapshot] = Tape(known[1].config, list(known[1].entries))
    return snapshot


def _recorded_restore(cls: type[Core], snapshot: bytes, config: RunConfig, **options: Any) -> Core:
    known = _snapshots.get(snapshot)
    continued = None
    if known is not None and known.config == config:
        continued = Tape(config, list(known.entries))
        _all.append(continued)
    _restoring.append(continued)
    try:
        return _restore(cls, snapshot, config, **options)
    finally:
        _restoring.pop()


def uninstall() -> None:
    Core.__init__, Core.handle, Core.snapshot = _init, _handle, _snapshot  # type: ignore[method-assign]
    Core.restore = classmethod(_restore)  # type: ignore[assignment]


def recorded(tape: Tape) -> Recording | None:
    """Return the recording of a tape that replays; None for one that does not."""
    plain = _recorded(tape, splits=False)
    if plain is not None or all(group.phase == "both" for group in tape.config.engines):
        return plain
    with always_split():
        return _recorded(tape, splits=True)


def _recorded(tape: Tape, *, splits: bool) -> Recording | None:
    try:
        config = tape.config.model_dump_json(exclude_unset=True)
        core = Core(RunConfig.model_validate_json(config))
        digests = bytearray()
        last = len(tape.entries) - 1
        for number, (now, event, expected) in enumerate(tape.entries):
            found = digest_of(core.handle(now, event))
            if found != expected:
                return None
            if number == last or number % STATUS_EVERY == STATUS_EVERY - 1:
                found = status_digest(core, now, found)
            digests += found
        recording = Recording(
            config=config.encode(),
            events=[(now, event) for now, event, _ in tape.entries],
            digests=bytes(digests),
            splits=splits,
        )
        ends = not list(differences(recording, restores=True))
        return recording if ends else None
    except (ConfigError, AssertionError, LookupError, ValueError, TypeError, AttributeError):
        return None


def lines_of(recording: Recording) -> set[tuple[str, int]]:
    """Return the lines of the core that a replay executes."""
    seen: set[tuple[str, int]] = set()

    def local(frame: Any, what: str, _: Any) -> Any:
        if what == "line":
            seen.add((frame.f_code.co_filename, frame.f_lineno))
        return local

    def trace(frame: Any, what: str, argument: Any) -> Any:
        return local if "/rollweave/core/" in frame.f_code.co_filename else None

    sys.settrace(trace)
    try:
        list(differences(recording))
    finally:
        sys.settrace(None)
    return seen


def main(out: Path, most: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    install()
    pytest.main(
        ["-q", "-p", "no:randomly", "-W", "ignore::pytest.PytestAssertRewriteWarning", *TESTS]
    )
    print(len(_all), "cores of tests")
    for seed in SEEDS:
        search(seed)
    uninstall()
    tapes, seen = [], set[bytes]()
    for tape in _all:
        if not MIN_EVENTS <= len(tape.entries) <= MAX_EVENTS:
            continue
        if not isinstance(tape.entries[0][1], RunStarted):
            continue
        key = packed(
            [tape.entries[0][1], tape.entries[-1][1], tape.entries[-1][0], len(tape.entries)]
        )
        if key not in seen:
            seen.add(key)
            tapes.append(tape)
    print(len(_all), "cores;", len(tapes), "different ones of a fitting length")
    kept, covered, events = 0, set[tuple[str, int]](), 0
    later = []
    for tape in sorted(tapes, key=lambda tape: len(tape.entries)):
        recording = recorded(tape)
        if recording is None:
            continue
        lines = lines_of(recording) if len(tape.entries) < 3000 else set()
        if lines and lines <= covered:
            later.append(recording)
            continue
        covered |= lines
        kept += 1
        events += len(recording.events)
        recording.write(out / f"{kept:04}{SUFFIX}")
    for recording in later[::-1]:
        if events > most:
            break
        kept += 1
        events += len(recording.events)
        recording.write(out / f"{kept:04}{SUFFIX}")
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"{kept} journals, {events:,} events, {size:,} bytes, {len(covered):,} lines")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 200_000)
