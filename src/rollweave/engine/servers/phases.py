"""The seconds of each phase of a weight update, which an engine writes to its log. The
server generates during the first one, and stops for the others.

| phase | what happens |
|---|---|
| `bring` | the engine maps or copies the version, and verifies its digest |
| `pause` | the server ends its current step and stops |
| `verify` | all ranks check the layout of the version |
| `swap` | each rank loads its slices; the weights get their label |
| `resume` | the server continues, without the recomputation of KV that follows |
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

PHASES = ("bring", "pause", "verify", "swap", "resume")


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
