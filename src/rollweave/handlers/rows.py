"""Tasks from a JSONL file: a line is a task, whose payload it is.

Invariants: a line belongs to exactly one split, by its hash, or because the held-out lines are a file of their own; an epoch
visits every line of a split once, in an order of its own.
"""

import functools
import json
import random
from pathlib import Path

from rollweave.envs.base import Split, mix, new_task, split_of
from rollweave.schema.base import TaskId
from rollweave.schema.errors import ConfigError
from rollweave.schema.work import Task


def draw(path: str, held_out: str, *, index: int, seed: int, split: Split) -> Task:
    """Task number `index` of a split; an empty one where `path` is "". Raises ConfigError."""
    if not path:
        return new_task(seed=mix(seed, split, index))
    file = held_out if held_out and split is not Split.TRAIN else path
    rows = _rows(file, split, bool(held_out))
    if not rows:
        raise ConfigError(f"options.tasks must have tasks for split {split}, {file} has none: add some, or set held_out")
    epoch, place = divmod(index, len(rows))
    return Task(id=TaskId(""), env="", seed=mix(seed, split, index), payload=_order(rows, mix(seed, split, epoch))[place])


@functools.lru_cache(16)
def _rows(path: str, split: Split, whole: bool) -> tuple[str, ...]:
    """The lines of a split. With `whole` the file is of one kind."""
    found = []
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"options.tasks must be a readable file, got {path!r}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: must be a JSON object: {error}") from error
        if not isinstance(record, dict):
            raise ConfigError(f"{path}:{number}: must be a JSON object, got {line[:40]}")
        if whole or split_of(json.dumps(record, sort_keys=True)) is split:
            found.append(line)
    return tuple(found)


@functools.lru_cache(16)
def _order(rows: tuple[str, ...], seed: int) -> tuple[str, ...]:
    return tuple(random.Random(seed).sample(rows, len(rows)))
