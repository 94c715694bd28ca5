"""The seconds of each phase of a weight update, which an engine writes to its log. The
server generates during the first one, and stops for the others.

| phase | what happens |
|---|---|
| `bring` | the engine maps or copies the version, and verifies its digest |
| `pause` | the server ends its current step and stops |
| `verify` | all ranks check the layout of the version |
| `swap` | each rank loads its slices; the weights get their label |
| `resume` | the server continues; the recomputation of KV, which follows, is not included |
"""

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PHASES = ("bring", "pause", "verify", "swap", "resume")

LINE = re.compile(r"^weights v\d+ updated: (.+)$", re.MULTILINE)
PART = re.compile(r"(\w+) ([\d.]+) s")


class UpdateTimes:
    """The seconds of each phase of one update."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def measured(self, phase: str) -> Iterator[None]:
        """Add the time in the context to `phase`."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] += time.monotonic() - started

    def report(self, version: int) -> None:
        """Write a line to the log of this process."""
        parts = ", ".join(f"{phase} {seconds:.4f} s" for phase, seconds in self.seconds.items())
        sys.stderr.write(f"weights v{version} updated: {parts}\n")


def read_updates(log: Path) -> list[dict[str, float]]:
    """Return the seconds by phase of each update in the log of an engine."""
    return [
        {phase: float(seconds) for phase, seconds in PART.findall(line)}
        for line in LINE.findall(log.read_text(errors="replace"))
    ]
