"""A JSONL file of prompts and a reward function: a task without writing an environment.

Which records there are and who gets them is `records.py`'s.
"""

import functools
from typing import Any

from rollweave.envs.base import Episode, Observation, Options, Split, Step, new_task, payload_of
from rollweave.envs.records import drawn, messages_of, records
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
        said = messages_of(asked)
        return Observation(messages=(Message(role="system", content=self._system), *said) if self._system else said)

    def step(self, action: str) -> Step:
        return Step(done=True)

    @classmethod
    def make_task(cls, *, index: int, seed: int, split: Split, options: Options) -> Task:
        """The next record of the split. Raises ConfigError for options that are wrong, and where the split is empty."""
        _reward(options["reward"])
        prompt, held_out = options.get("prompt", "prompt"), options.get("held_out", "")
        file, row = drawn(options["path"], held_out, prompt, index=index, seed=seed, split=split)
        return new_task(file=file, row=row)

    @classmethod
    def score(cls, episode: Episode, options: Options) -> Any:
        """What the reward function says of the agent's words."""
        payload = payload_of(episode.task)
        record = records(payload["file"], options.get("prompt", "prompt"))[payload["row"]]
        return _reward(options["reward"])(dict(record), "".join(episode.actions()[-1:]))


@functools.lru_cache(16)
def _reward(reference: str) -> Any:
    function = load(reference, what="options.reward")
    if not callable(function):
        raise ConfigError(f"options.reward must be a function, {reference} is a {type(function).__name__}")
    return function
