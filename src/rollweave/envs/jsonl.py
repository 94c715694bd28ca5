"""Tasks from a JSONL file of prompts and a reward function, for users who write no
environment.

`records.py` reads the file and chooses its records.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from rollweave.envs.base import Episode, Observation, Options, Split, Step, new_task, payload_of
from rollweave.envs.records import (
    draw_record,
    messages_of,
    numbered_prompts,
    numbered_records,
    record_at,
)
from rollweave.envs.registry import load
from rollweave.schema.chat import Message
from rollweave.schema.errors import ConfigError
from rollweave.schema.work import Task


class Jsonl:
    """One turn: the agent answers the record's `prompt` (text, or a list of messages),
    and its answer is scored.

    `reward` is `package.module:function`, called as `function(record, answer)` with the
    record as a dict. The function may be async, and returns a number or a `Score`.
    `held_out` is a file of held-out records; without it two eighths of `path` are held
    out. Prompts that are too long for a trajectory are refused before a run, or left
    out if `overlong` is "drop": the check before the run lists them in `left_out`, as
    file and line.
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
    function = load(reference, what="options.reward")
    if not callable(function):
        raise ConfigError(
            f"options.reward must be a function, {reference} is a {type(function).__name__}"
        )
    return function
