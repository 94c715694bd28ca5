"""Commands by their kind."""

from collections.abc import Iterable
from typing import Any


def of(commands: Iterable[Any], kind: type[Any] | tuple[type[Any], ...]) -> list[Any]:
    """Return the commands of this kind, in their order."""
    return [command for command in commands if isinstance(command, kind)]
