"""Commands by their kind."""

import types
from collections.abc import Iterable
from typing import Any


def of(commands: Iterable[Any], kind: type[Any] | types.UnionType) -> list[Any]:
    """Return the commands of this kind, in their order."""
    return [command for command in commands if isinstance(command, kind)]
