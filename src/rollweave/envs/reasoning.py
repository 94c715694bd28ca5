"""Any dataset of reasoning-gym: one question, one answer, scored by the dataset itself.

Invariant: a question belongs to exactly one split by its own text.
"""

import functools
import json
import re
from typing import Any

from rollweave.envs.base import (
    Episode,
    Observation,
    Options,
    Score,
    Split,
    Step,
    mix,
    new_task,
    payload_of,
    split_of,
)
from rollweave.io.extras import from_extra
from rollweave.schema.errors import ConfigError, RewardError
from rollweave.schema.work import Task

with from_extra("envs"):
    import reasoning_gym

INSTRUCTION = "\nGive the final answer between <answer> and </answer>."
TRIES = 200
"""Draws until a question of the split is found: an eighth of them belongs to a held-out
split, so far more than enough.
"""

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class Reasoning:
    """`prompt`, a question of `dataset` (with the settings `config`), and how to
    answer; the agent has one turn.

    The answer is what stands in its last `<answer>…</answer>`, else all it said. The
    reward is the dataset's score, 0 to 1.
    """

    def __init__(self, *, dataset: str, config: Options | None = None, prompt: str = "") -> None:
        _entry(dataset, json.dumps(config or {}, sort_keys=True), 0)
        self._dataset, self._config, self._prompt = dataset, config or {}, prompt

    def reset(self, task: Task) -> Observation:
        question = _question(self._dataset, self._config, task)["question"]
        return Observation.of(f"{self._prompt}{question}{INSTRUCTION}")

    def step(self, action: str) -> Step:
        return Step(done=True)

    @classmethod
    def make_task(cls, *, index: int, seed: int, split: Split, options: Options) -> Task:
        """A question of the split.

        Raises ConfigError where the dataset has too few different ones.
        """
        config = json.dumps(options.get("config", {}), sort_keys=True)
        for attempt in range(TRIES):
            own = mix(seed, split, index, attempt) % 2**31
            if split_of(_entry(options["dataset"], config, own)["question"]) is split:
                return new_task(seed=own)
        raise ConfigError(
            f"options.id must have questions for split {split}, {options['dataset']!r} has too few"
        )

    @classmethod
    def score(cls, episode: Episode, options: Options) -> Score:
        """The dataset's own score of the answer.

        An answer that its scorer cannot read is wrong, not an error.
        """
        dataset, config = options["dataset"], options.get("config", {})
        entry = _question(dataset, config, episode.task)
        scorer = _dataset(dataset, json.dumps(config, sort_keys=True), episode.task.seed)
        try:
            reward = float(scorer.score_answer(answer_in(" ".join(episode.actions()[-1:])), entry))
        except Exception as error:
            try:
                scorer.score_answer(entry["answer"], entry)
            except Exception:
                raise RewardError(
                    f"{dataset}: the scorer fails on its own answer: {error}"
                ) from error
            reward = 0.0
        return Score(reward=reward, success=reward >= 1.0)


def answer_in(text: str) -> str:
    """What stands in the last `<answer>…</answer>`, else the whole text; without white
    space around it.
    """
    found = _ANSWER.findall(text)
    return str(found[-1] if found else text).strip()


def _question(dataset: str, config: Options, task: Task) -> dict[str, Any]:
    payload_of(task)
    return _entry(dataset, json.dumps(config, sort_keys=True), task.seed)


@functools.lru_cache(256)
def _dataset(name: str, config: str, seed: int) -> Any:
    """A dataset of one question: some datasets prepare all of theirs at once."""
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=1, **json.loads(config))
    except Exception as error:  # the library asserts what its settings must be
        raise ConfigError(
            f"options.id must be a dataset of reasoning-gym, got {name!r} with {config}: {error}"
        ) from error


@functools.lru_cache(256)
def _entry(name: str, config: str, seed: int) -> dict[str, Any]:
    entry: dict[str, Any] = _dataset(name, config, seed)[0]
    return entry
