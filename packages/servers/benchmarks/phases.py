"""The seconds of each phase of a weight update, as engines write them to their logs."""

import re
from pathlib import Path

LINE = re.compile(r"^weights v\d+ updated: (.+)$", re.MULTILINE)
PART = re.compile(r"(\w+) ([\d.]+) s")


def read_updates(log: Path) -> list[dict[str, float]]:
    """Return the seconds by phase of each update in the log of an engine."""
    return [
        {phase: float(seconds) for phase, seconds in PART.findall(line)}
        for line in LINE.findall(log.read_text(errors="replace"))
    ]
