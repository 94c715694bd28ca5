"""Tasks from a JSONL file with one record per line.

Invariants: a record belongs to exactly one split (by its hash, or because `held_out` is
a separate file); an epoch visits every record of a split once, in a random order that
differs by epoch.
"""

import functools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rollweave.envs.base import Split, split_of
from rollweave.schema.base import mix
from rollweave.schema.chat import Message
from rollweave.schema.errors import ConfigError

FIELDS_SHOWN = 12
"""Maximum number of a record's fields that an error names."""


def draw_record(
    path: str,
    held_out: str,
    field: str,
    *,
    option: str = "path",
    index: int,
    seed: int,
    split: Split,
    left_out: tuple[str, ...] = (),
) -> tuple[str, int]:
    """Return the file and row of the split's record number `index`, without those
    `left_out`, each named as `file:line`. `held_out` "" holds out two eighths of
    `path`.

    `field` holds the record's prompt; "" takes the complete record. Raises ConfigError,
    naming options.`option`, for an invalid file or an empty split.
    """
    file = held_out if held_out and split is not Split.TRAIN else path
    rows = _rows(file, field, option, split, bool(held_out), left_out)
    if not rows:
        without = ", without those left out," if left_out else ""
        raise ConfigError(
            f"options.{option} must have records for split {split}, {file}{without} has none: add "
            "records, or set held_out"
        )
    epoch, place = divmod(index, len(rows))
    return file, shuffled(rows, mix(seed, split, epoch))[place]


@functools.lru_cache(16)
def records(path: str, field: str, option: str = "path") -> tuple[dict[str, Any], ...]:
    """Return every record of the file; its `field` is text or messages.

    Raises ConfigError that names file and line.
    """
    parsed: list[dict[str, Any]] = []
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"options.{option} must be a readable file, got {path!r}: {error}"
        ) from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                parsed.append(_record(line, field, f"{path}:{number}"))
            except ConfigError:
                raise
            except (ValueError, TypeError, msgspec.ValidationError) as error:
                form = f" with {field!r}, text or messages" if field else ""
                text = (
                    f"{path}:{number}: must be a JSON object{form}: {type(error).__name__}: {error}"
                )
                raise ConfigError(text) from error
    if not parsed:
        raise ConfigError(f"options.{option} must have records, {path} has none")
    return tuple(parsed)


def numbered_records(
    path: str, field: str, option: str = "path"
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield every record with its line number. Raises ConfigError as `records` does."""
    parsed = records(path, field, option)
    lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    numbers = [number for number, line in enumerate(lines, start=1) if line.strip()]
    return zip(numbers, parsed, strict=True)


def messages_of(prompt: Any) -> tuple[Message, ...]:
    """Return text as a user's message, and messages unchanged.

    Raises ValueError, TypeError, ValidationError.
    """
    if isinstance(prompt, str):
        return (Message(role="user", content=prompt),)
    messages = msgspec.convert(prompt, tuple[Message, ...])
    if not messages:
        raise ValueError("no messages")
    return messages


def _record(line: str, field: str, place: str) -> dict[str, Any]:
    record = json.loads(line)
    if not isinstance(record, dict):
        raise TypeError(f"got {line[:40]}")
    if field:
        must_have_field(record, field, place)
        messages_of(record[field])
    return record


def must_have_field(record: dict[str, Any], field: str, place: str) -> None:
    """Raise ConfigError unless the record, which is at `place`, has the field."""
    if field not in record:
        names = [*record][:FIELDS_SHOWN]
        more = ", …" if len(record) > len(names) else ""
        raise ConfigError(
            f"{place} has no field {field!r} (its fields: {', '.join(names) or 'none'}{more})"
        )


@functools.lru_cache(16)
def _rows(
    path: str, field: str, option: str, split: Split, undivided: bool, left_out: tuple[str, ...]
) -> tuple[int, ...]:
    """Return the rows of a split's records, without those left out.

    With `undivided` the file is not divided; its held-out records serve both held-out
    splits.
    """
    without = set(left_out)
    kept = (
        (row, record[field] if field else record)
        for row, (number, record) in enumerate(numbered_records(path, field, option))
        if not without or f"{path}:{number}" not in without
    )
    return tuple(
        row
        for row, prompt in kept
        if undivided or split_of(json.dumps(prompt, sort_keys=True)) is split
    )


@functools.lru_cache(16)
def shuffled(rows: tuple[int, ...], seed: int) -> tuple[int, ...]:
    """Return the rows in an order that the seed draws."""
    return tuple(random.Random(seed).sample(rows, len(rows)))
