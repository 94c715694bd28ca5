"""The base of all values: frozen, closed to unknown fields.

Subclasses repeat `frozen` and `kw_only` for msgspec and mypy.
"""

from typing import NewType

import msgspec

TaskId = NewType("TaskId", str)
GroupId = NewType("GroupId", str)
TrajectoryId = NewType("TrajectoryId", str)
EngineId = NewType("EngineId", str)


class Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An immutable value. Two values with the same fields are equal."""


class TaggedStruct(Struct, frozen=True, kw_only=True, tag=True):
    """A value that travels in a union; its encoding carries the class name."""
