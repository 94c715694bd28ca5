"""Encode values as MessagePack or JSON, whatever they hold: the last defense of stored
and sent data.

Text is made valid where it enters (`schema/text.py`). A value that slips through must
not end the process that stores or sends it. So a value that the encoder rejects is
repaired and encoded again: a surrogate becomes U+FFFD, and an integer beyond 64 bits
the nearest 64-bit integer.
"""

from typing import Any

import msgspec

from rollweave.schema.text import valid

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
