"""A JSONL file of prompts and a reward function: a task without writing an environment.

Invariants: a record belongs to exactly one split (by its prompt's hash, or because `held_out` is a file of its own); an epoch
visits every record of a split once, in an order of its own.
"""

import functools
import json
import random
from pathlib import Path
from typing import Any

import msgspec

from rollweave.envs.base import Episode, Observation, Options, Split, Step, mix, new_task, payload_of, split_of
from rollweave.envs.registry import load
from rollweave.schema.chat import Message
from rollweave.schema.errors import ConfigError
from rollweave.schema.work import Task


class Jsonl:
    """One turn: the record's `prompt` (text, or a list of messages), then what the agent says is scored.

    `reward` is `package.module:function`, called as `function(record, answer)` with the record as a dict, may be async, and
    returns a number or a `Score`. `held_out` is a file of held-out records; without it two eighths of `path` are held out.
    """

    def __init__(self, *, path: str, reward: str, held_out: str = "", system: str = "", prompt: str = "prompt") -> None:
        _reward(reward)
        for file in (path, held_out):
            if file:
                records(file, prompt)
        self._path, self._held_out, self._system, self._prompt = path, held_out, system, prompt

    def reset(self, task: Task) -> Observation:
        payload = payload_of(task)
        asked = records(payload["file"], self._prompt)[payload["row"]][self._prompt]
        said = _messages(asked)
        return Observation(messages=(Message(role="system", content=self._system), *said) if self._system else said)

    def step(self, action: str) -> Step:
        return Step(done=True)

    @classmethod
    def make_task(cls, *, index: int, seed: int, split: Split, options: Options) -> Task:
        """The next record of the split. Raises ConfigError for options that are wrong, and where the split is empty."""
        _reward(options["reward"])
        file, row = drawn(options, options.get("prompt", "prompt"), index=index, seed=seed, split=split)
        return new_task(file=file, row=row)

    @classmethod
    def score(cls, episode: Episode, options: Options) -> Any:
        """What the reward function says of the agent's words."""
        payload = payload_of(episode.task)
        record = records(payload["file"], options.get("prompt", "prompt"))[payload["row"]]
        return _reward(options["reward"])(dict(record), "".join(episode.actions()[-1:]))


def drawn(options: Options, prompt: str, *, index: int, seed: int, split: Split) -> tuple[str, int]:
    """The file and row of the split's record number `index`, from `options.path` and `options.held_out`.

    Raises ConfigError for a file that is wrong, and where the split is empty.
    """
    held_out = options.get("held_out", "")
    file = held_out if held_out and split is not Split.TRAIN else options["path"]
    rows = _rows(file, prompt, split, bool(held_out))
    if not rows:
        raise ConfigError(f"options.path must have records for split {split}, {file} has none: add records, or set held_out")
    epoch, place = divmod(index, len(rows))
    return file, _order(rows, mix(seed, split, epoch))[place]


@functools.lru_cache(16)
def _reward(reference: str) -> Any:
    function = load(reference, what="options.reward")
    if not callable(function):
        raise ConfigError(f"options.reward must be a function, {reference} is a {type(function).__name__}")
    return function


@functools.lru_cache(16)
def records(path: str, prompt: str) -> tuple[dict[str, Any], ...]:
    """Every record of the file. Raises ConfigError that names file and line."""
    found: list[dict[str, Any]] = []
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"options.path must be a readable file, got {path!r}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            _messages(record[prompt])
        except (ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
            raise ConfigError(
                f"{path}:{number}: must be a JSON object with {prompt!r}, text or messages: {type(error).__name__}: {error}"
            ) from error
        found.append(record)
    if not found:
        raise ConfigError(f"options.path must have records, {path} has none")
    return tuple(found)


def _messages(asked: Any) -> tuple[Message, ...]:
    if isinstance(asked, str):
        return (Message(role="user", content=asked),)
    messages = msgspec.convert(asked, tuple[Message, ...])
    if not messages:
        raise ValueError("no messages")
    return messages


@functools.lru_cache(16)
def _rows(path: str, prompt: str, split: Split, whole: bool) -> tuple[int, ...]:
    """The records of a split, by row. With `whole` the file is of one kind; its held-out records serve both held-out splits."""
    found = records(path, prompt)
    if whole:
        return tuple(range(len(found)))
    return tuple(row for row, record in enumerate(found) if split_of(json.dumps(record[prompt], sort_keys=True)) is split)


@functools.lru_cache(16)
def _order(rows: tuple[int, ...], seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).sample(rows, len(rows)))
