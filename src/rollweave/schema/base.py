"""The base of all values (frozen, closed to unknown fields), their ids, and seeds; and
their encoding as MessagePack or JSON, whatever they hold: the last defense of stored
and sent data.

Subclasses repeat `frozen` and `kw_only` for msgspec and mypy. Text is made valid where
it enters (`schema/text.py`). A value that slips through must not end the process that
stores or sends it. So a value that the encoder rejects is repaired and encoded again: a
surrogate becomes U+FFFD, and an integer beyond 64 bits the nearest 64-bit integer.
"""

from typing import Any, NewType, TypeVar, cast

import msgspec
import xxhash

from rollweave.schema.text import valid

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


_msgpack = msgspec.msgpack.Encoder()
_json = msgspec.json.Encoder()

LEAST, MOST = -(1 << 63), (1 << 64) - 1
"""Smallest and largest integer that MessagePack can hold."""

DEPTH = 100
"""Maximum nesting of objects and lists: far below what JSON decoders accept at any
depth of the call stack.
"""


def packed(value: object) -> bytes:
    """Encode the value as MessagePack.

    A member of a union carries its class name (`TaggedStruct`).
    """
    try:
        return _msgpack.encode(value)
    except (UnicodeEncodeError, OverflowError):
        return _msgpack.encode(_repaired(value))


def as_json(value: object) -> bytes:
    """Encode the value as JSON."""
    try:
        return _json.encode(value)
    except UnicodeEncodeError:
        return _json.encode(_repaired(value))


def is_deep(value: Any) -> bool:
    """Return whether objects and lists are nested more than `DEPTH` deep."""
    within = [value] if isinstance(value, dict | list) else []
    for _ in range(DEPTH):
        if not within:
            return False
        within = [
            inner
            for outer in within
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    return bool(within)


def _repaired(value: object) -> Any:
    return _within(msgspec.to_builtins(value, builtin_types=(bytes, bytearray, memoryview)))


def _within(value: Any) -> Any:
    match value:
        case str():
            return valid(value)
        case bool():
            return value
        case int():
            return min(max(value, LEAST), MOST)
        case dict():
            return {_within(key): _within(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_within(inner) for inner in value]
        case _:
            return value
