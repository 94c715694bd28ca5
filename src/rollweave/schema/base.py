"""The base of every noun: frozen, closed to unknown fields.

Subclasses repeat `frozen` and `kw_only` for msgspec and mypy.
"""

from typing import NewType

import msgspec

TaskId = NewType("TaskId", str)
GroupId = NewType("GroupId", str)
TrajectoryId = NewType("TrajectoryId", str)
EngineId = NewType("EngineId", str)


class Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value. Two nouns with the same fields are the same noun."""


class TaggedStruct(Struct, frozen=True, kw_only=True, tag=True):
    """A noun that travels in a union: the wire carries its class name."""
