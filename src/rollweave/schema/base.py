"""The base of all values (frozen, closed to unknown fields), their ids, and seeds.

Subclasses repeat `frozen` and `kw_only` for msgspec and mypy.
"""

from typing import Any, NewType, TypeVar, cast

import msgspec
import xxhash

TaskId = NewType("TaskId", str)
GroupId = NewType("GroupId", str)
TrajectoryId = NewType("TrajectoryId", str)
EngineId = NewType("EngineId", str)


class Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An immutable value. Two values with the same fields are equal."""


class TaggedStruct(Struct, frozen=True, kw_only=True, tag=True):
    """A value that travels in a union; its encoding carries the class name."""


T = TypeVar("T")


def copied(value: T) -> T:
    """Return a copy of a value from a configuration or JSON, which copies its dicts and
    lists at every depth. The user's code gets copies, so that its changes affect
    nothing else.
    """
    return cast(T, _copied(value))


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


def mix(*parts: object) -> int:
    """Return a seed of 63 bits that depends on every part."""
    text = "\x1f".join(map(str, parts))
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1
