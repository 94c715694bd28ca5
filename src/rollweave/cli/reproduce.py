"""`rollweave reproduce`: runs the experiments of `rollweave-papers`, if it is
installed.
"""

from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from rollweave.io.extras import without_distribution

COMMANDS = "rollweave.commands"
"""Group of the entry points of commands in further distributions of this repository."""

DISTRIBUTION = "rollweave-papers"


def reproduce(names: Sequence[str], *, quick: bool, as_json: bool, write: Path | None) -> None:
    """Run the experiments with these names. Raises ConfigError if the papers'
    distribution is not installed.
    """
    found = [entry for entry in entry_points(group=COMMANDS) if entry.name == "reproduce"]
    if not found:
        raise without_distribution("`rollweave reproduce`", DISTRIBUTION)
    work: Any = found[0].load()
    work(names, quick=quick, as_json=as_json, write=write)
