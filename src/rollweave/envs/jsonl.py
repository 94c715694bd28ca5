"""Tasks from a JSONL file with one record per line: with a reward function, for users
who write no environment, or for environments that read their tasks from records.

Invariants: a record belongs to exactly one split (by its hash, or because `held_out` is
a separate file); an epoch visits every record of a split once, in a random order that
differs by epoch; each caller gets copies of records.
"""

import functools
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from rollweave.envs.base import (
    Episode,
    Observation,
    Options,
    Split,
    Step,
    new_task,
    payload_of,
    split_of,
)
from rollweave.envs.registry import DISTRIBUTION, REWARDS, announced_in, load
from rollweave.io.extras import without_distribution
from rollweave.io.http.messages import read_messages
from rollweave.io.json_lines import json_lines
from rollweave.schema.base import copied, mix
from rollweave.schema.chat import Message
from rollweave.schema.errors import ConfigError
from rollweave.schema.text import did_you_mean
from rollweave.schema.work import Task

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


class Jsonl:
    """One turn: the agent answers the record's `prompt` (text, or a list of messages),
    and its answer is scored.

    `reward` is `package.module:function`, or the name under which a package announces
    one, called as `function(record, answer)` with the record as a dict. The function
    may be async, and returns a number or a `Score`. `held_out` is a file of held-out
    records; without it two eighths of `path` are held out. Prompts that are too long
    for a trajectory are refused before a run, or left out if `overlong` is "drop": the
    check before the run lists them in `left_out`, as file and line.
    """

    def __init__(
        self,
        *,
        path: str,
        reward: str,
        held_out: str = "",
        system: str = "",
        prompt: str = "prompt",
        overlong: Literal["refuse", "drop"] = "refuse",
        left_out: Sequence[str] = (),
    ) -> None:
        _reward(reward)
        if overlong not in ("refuse", "drop"):
            raise ConfigError(f"options.overlong must be refuse or drop, got {overlong!r}")
        for file in (path, held_out):
            if file:
                check_records(file, prompt, reward)
        self._system, self._prompt = system, prompt

    def reset(self, task: Task) -> Observation:
        payload = payload_of(task)
        record = record_at(payload["file"], self._prompt, payload["row"])
        messages = messages_of(record[self._prompt], self._prompt)
        return Observation(messages=_with_system(self._system, messages))

    def step(self, action: str) -> Step:
        return Step(done=True)

    @classmethod
    def make_task(cls, *, index: int, seed: int, split: Split, options: Options) -> Task:
        """Return the next record of the split.

        Raises ConfigError for invalid options, and for an empty split.
        """
        _reward(options["reward"])
        prompt, held_out = options.get("prompt", "prompt"), options.get("held_out", "")
        file, row = draw_record(
            options["path"],
            held_out,
            prompt,
            index=index,
            seed=seed,
            split=split,
            left_out=tuple(options.get("left_out", ())),
        )
        return new_task(file=file, row=row)

    @classmethod
    def prompts(cls, options: Options) -> Iterator[tuple[str, tuple[Message, ...]]]:
        """Yield the location of each prompt in the files, with the messages with which
        an episode begins. Raises ConfigError for a record that the reward function
        refuses.
        """
        prompt, left_out = options.get("prompt", "prompt"), set(options.get("left_out", ()))
        for file in dict.fromkeys((options["path"], options.get("held_out", ""))):
            if file and "reward" in options:
                check_records(file, prompt, options["reward"])
            for number, messages in numbered_prompts(file, prompt) if file else ():
                if (place := f"{file}:{number}") not in left_out:
                    yield place, _with_system(options.get("system", ""), messages)

    @classmethod
    def drops_overlong(cls, options: Options) -> bool:
        """Return whether prompts that are too long are to be left out."""
        return bool(options.get("overlong") == "drop")

    @classmethod
    def score(cls, episode: Episode, options: Options) -> Any:
        """Return the reward function's result for the agent's answer."""
        payload = payload_of(episode.task)
        record = record_at(payload["file"], options.get("prompt", "prompt"), payload["row"])
        return _reward(options["reward"])(record, "".join(episode.actions()[-1:]))


@functools.lru_cache(16)
def check_records(file: str, prompt: str, reward: str) -> None:
    """Check the records of a file. If the reward function has an attribute
    `check_record`, it is called for each record, and raises ValueError. Raises
    ConfigError that names file and line.
    """
    check = getattr(_reward(reward), "check_record", None)
    if check is None:
        numbered_prompts(file, prompt)
        return
    for number, record in numbered_records(file, prompt):
        try:
            check(record)
        except ValueError as error:
            raise ConfigError(f"{file}:{number}: {error}") from error


def _with_system(system: str, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    return (Message(role="system", content=system), *messages) if system else messages


@functools.lru_cache(16)
def _reward(reference: str) -> Any:
    function = load(_named(reference), what="options.reward")
    if not callable(function):
        raise ConfigError(
            f"options.reward must be a function, {reference} is a {type(function).__name__}"
        )
    return function


def _named(reward: str) -> str:
    """Return the `package.module:function` that a package announces by this name."""
    announced = announced_in(REWARDS)
    if ":" in reward or reward in announced:
        return announced.get(reward, reward)
    if not announced:
        raise without_distribution(f"options.reward {reward!r}", DISTRIBUTION)
    hint = did_you_mean(reward, announced)
    if reward == "judge":
        hint = ': set it to "none", and add [[rewards]] with [rewards.judge]'
    raise ConfigError(
        f"options.reward must be one of {', '.join(sorted(announced))}, or "
        f"package.module:function, got {reward!r}{hint}"
    )
