"""Any dataset of reasoning-gym: one question, one answer, scored by the dataset's
scorer.

Invariant: a question belongs to exactly one split by its text.
"""

import functools
import json
from typing import Any

import reasoning_gym

from rollweave.envs.base import (
    Episode,
    Observation,
    Options,
    Score,
    Split,
    Step,
    new_task,
    payload_of,
    split_of,
)
from rollweave.schema.base import copied, mix
from rollweave.schema.chat import Message
from rollweave.schema.errors import ConfigError, RewardError
from rollweave.schema.work import Task

INSTRUCTION = "\nGive the final answer between <answer> and </answer>."
TRIES = 200
"""Maximum draws of a question of the split: an eighth of all questions belongs to each
held-out split, so this is far more than enough.
"""

SHOTS_SEED = 1
"""The seed of the questions that precede others with their answers."""

OPENING, CLOSING = "<answer>", "</answer>"


class Reasoning:
    """`prompt`, a question of `dataset` (with the settings `config`), and the answer
    format; the agent has one turn.

    `shots` other questions of the training split, always the same ones, precede it with
    their answers, as turns of the conversation. The agent's answer is the content of
    its last `<answer>…</answer>`, otherwise its complete message. The reward is the
    dataset's score, 0 to 1.
    """

    def __init__(
        self, *, dataset: str, config: Options | None = None, prompt: str = "", shots: int = 0
    ) -> None:
        _entry(dataset, json.dumps(config or {}, sort_keys=True), 0)
        if shots < 0:
            raise ConfigError(f"options.shots must be at least 0, got {shots}")
        self._dataset, self._config, self._prompt = dataset, config or {}, prompt
        self._shots = shots

    def reset(self, task: Task) -> Observation:
        messages = list[Message]()
        for number in range(self._shots):
            options = {"dataset": self._dataset, "config": self._config}
            shot = self.make_task(index=number, seed=SHOTS_SEED, split=Split.TRAIN, options=options)
            entry = _question(self._dataset, self._config, shot)
            answer = f"{OPENING}{entry['answer']}{CLOSING}"
            messages += [self._message(entry), Message(role="assistant", content=answer)]
        asked = self._message(_question(self._dataset, self._config, task))
        return Observation(messages=(*messages, asked))

    def _message(self, entry: Options) -> Message:
        """Return the message that asks a question."""
        text = f"{self._prompt}{entry['question']}{INSTRUCTION}"
        return Message(role="user", content=text)

    def step(self, action: str) -> Step:
        return Step(done=True)

    @classmethod
    def make_task(cls, *, index: int, seed: int, split: Split, options: Options) -> Task:
        """Return a question of the split.

        Raises ConfigError if the dataset has too few different ones.
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
        """Return the dataset's score of the answer.

        An answer that its scorer cannot parse is wrong, not an error.
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
    """Return the content of the last `<answer>…</answer>`, otherwise the complete text;
    without white space around it.
    """
    answer, start = text, text.find(OPENING)
    while start >= 0 and (end := text.find(CLOSING, start)) >= 0:
        answer = text[start + len(OPENING) : end]
        start = text.find(OPENING, end)
    return answer.strip()


def _question(dataset: str, config: Options, task: Task) -> dict[str, Any]:
    payload_of(task)
    return copied(_entry(dataset, json.dumps(config, sort_keys=True), task.seed))


@functools.lru_cache(256)
def _dataset(name: str, config: str, seed: int) -> Any:
    """Return a dataset of one question: some datasets prepare all of theirs at once."""
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=1, **json.loads(config))
    except Exception as error:  # the library checks its settings by assertions
        raise ConfigError(
            f"options.id must be a dataset of reasoning-gym, got {name!r} with {config}: {error}"
        ) from error


@functools.lru_cache(256)
def _entry(name: str, config: str, seed: int) -> dict[str, Any]:
    entry: dict[str, Any] = _dataset(name, config, seed)[0]
    return entry
