"""Commands that further distributions of this repository announce by entry points."""

from importlib.metadata import entry_points
from typing import Any

from rollweave.io.extras import without_distribution

COMMANDS = {
    "advise": "rollweave-sim",
    "reproduce": "rollweave-papers",
    "simulate": "rollweave-sim",
}
"""The distribution of each command."""

ENTRY_POINTS = "rollweave.commands"


def command(name: str) -> Any:
    """Return the function of a command. Raises ConfigError if its distribution is not
    installed.
    """
    for entry in entry_points(group=ENTRY_POINTS):
        if entry.name == name:
            return entry.load()
    raise without_distribution(f"`rollweave {name}`", COMMANDS[name])
