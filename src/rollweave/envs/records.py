"""Tasks from a JSONL file with one record per line.

Invariants: a record belongs to exactly one split (by its hash, or because `held_out` is
a separate file); an epoch visits every record of a split once, in a random order that
differs by epoch; each caller gets copies of records.
"""

import functools
import json
import random
from collections.abc import Iterator
from typing import Any

from rollweave.envs.base import Split, split_of
from rollweave.io.http.messages import read_messages
from rollweave.io.json_lines import json_lines
from rollweave.schema.base import copied, mix
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
    """Return the file and row of the split's record number `index`. Records in
    `left_out`, named as `file:line`, do not count. If `held_out` is "", two eighths of
    `path` are held out.

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
def _numbered(path: str, field: str, option: str) -> tuple[tuple[int, dict[str, Any]], ...]:
    form = f" with {field!r}, text or messages" if field else ""
    numbered = []
    for number, record in json_lines(path, f"options.{option}", form=form):
        place = f"{path}:{number}"
        if field:
            must_have_field(record, field, place)
            try:
                messages_of(record[field], field)
            except ValueError as error:
                raise ConfigError(f"{place}: {error}") from error
        numbered.append((number, record))
    if not numbered:
        raise ConfigError(f"options.{option} must have records, {path} has none")
    return tuple(numbered)


def numbered_records(
    path: str, field: str, option: str = "path"
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Return an iterator over the line number and a copy of every record, whose `field`
    is text or messages.

    Raises ConfigError that names file and line.
    """
    numbered = _numbered(path, field, option)
    return ((number, copied(record)) for number, record in numbered)


def numbered_prompts(path: str, field: str) -> Iterator[tuple[int, tuple[Message, ...]]]:
    """Return an iterator over the prompt of every record with its line number. Raises
    ConfigError as `numbered_records` does.
    """
    numbered = _numbered(path, field, "path")
    return ((number, messages_of(record[field], field)) for number, record in numbered)


def record_at(path: str, field: str, row: int, option: str = "path") -> dict[str, Any]:
    """Return a copy of the record in row `row` of the file. Raises ConfigError as
    `numbered_records` does.
    """
    return copied(_numbered(path, field, option)[row][1])


def messages_of(prompt: Any, field: str) -> tuple[Message, ...]:
    """Return text as a user's message, and messages as the gateway reads them. `field`
    is the prompt's place, for errors.

    Raises ValueError.
    """
    if isinstance(prompt, str):
        return (Message(role="user", content=prompt),)
    if not isinstance(prompt, list):
        raise ValueError(f"{field} must be text or a list of messages, got {prompt!r:.80}")
    messages = read_messages(prompt, field)
    if not messages:
        raise ValueError(f"{field} must have messages, got no messages")
    return messages


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
    """Return the rows of a split's records, without the records in `left_out`.

    With `undivided` the file is not divided; its held-out records serve both held-out
    splits.
    """
    without = set(left_out)
    kept = (
        (row, record[field] if field else record)
        for row, (number, record) in enumerate(_numbered(path, field, option))
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
