"""Gymnasium's environments and reasoning-gym's datasets under one name.

`id` is an argument of `gymnasium.make` ("FrozenLake-v1"), or "reasoning_gym/" and a
dataset ("reasoning_gym/chain_sum").
"""

import math
from collections.abc import Awaitable, Sequence
from typing import Any, Literal

from rollweave.envs.base import Env, Episode, Observation, Options, Score, Split, Step, new_task
from rollweave.schema.base import mix
from rollweave.schema.errors import ConfigError
from rollweave.schema.work import Task

DATASETS = "reasoning_gym/"


class Gym:
    """An environment in words (`gym_text.GymText`), or a dataset's questions
    (`reasoning.Reasoning`).

    `make` are its settings, and `prompt` precedes the first observation. `actions` and
    `observe` are for environments only: see `GymText`; `shots` is for datasets only:
    see `Reasoning`.
    """

    def __init__(
        self,
        *,
        id: str,
        make: Options | None = None,
        actions: Sequence[str] = (),
        prompt: str = "",
        observe: Literal["value", "render"] = "value",
        shots: int = 0,
    ) -> None:
        if shots and not id.startswith(DATASETS):
            raise ConfigError(
                f"options must have no shots for an environment, got {id!r} with {shots}"
            )
        if id.startswith(DATASETS) and (actions or observe != "value"):
            raise ConfigError(
                f"options must have no actions and no observe for a dataset, got {id!r} with "
                f"{actions}, {observe!r}"
            )
        own = {"id": id, "make": make or {}, "prompt": prompt}
        if id.startswith(DATASETS):
            kind, options = _kind({**own, "shots": shots})
        else:
            kind, options = _kind({**own, "actions": actions, "observe": observe})
        self._env: Env = kind(**options)

    def reset(self, task: Task) -> Observation | Awaitable[Observation]:
        return self._env.reset(task)

    def step(self, action: str) -> Step | Awaitable[Step]:
        return self._env.step(action)

    def close(self) -> None:
        close = getattr(self._env, "close", None)
        if close is not None:
            close()

    @classmethod
    def make_task(cls, *, index: int, seed: int, split: Split, options: Options) -> Task:
        """Return a question of the split, or for an environment a random seed.

        Raises ConfigError if a dataset has too few questions.
        """
        kind, own = _kind(options)
        if hasattr(kind, "make_task"):
            task: Task = kind.make_task(index=index, seed=seed, split=split, options=own)
            return task
        return new_task(seed=mix(seed, split, index))

    @classmethod
    def score(cls, episode: Episode, options: Options) -> Score:
        """Return the dataset's score of the answer, or for an environment the sum of
        its rewards.
        """
        kind, own = _kind(options)
        if hasattr(kind, "score"):
            score: Score = kind.score(episode, own)
            return score
        return Score(reward=math.fsum(episode.rewards), success=episode.success)

    @classmethod
    def words(cls, options: Options) -> Sequence[str]:
        """Return the names of the actions.

        The environment's own texts are not known beforehand.
        """
        kind, own = _kind(options)
        words: Sequence[str] = kind.words(own) if hasattr(kind, "words") else ()
        return words


def _kind(options: Options) -> tuple[Any, dict[str, Any]]:
    """Return the class behind `id`, and its options.

    Each is imported on demand: both libraries are slow to load.
    """
    if not options["id"].startswith(DATASETS):
        from rollweave_envs.gym_text import GymText

        return GymText, dict(options)
    from rollweave_envs.reasoning import Reasoning

    dataset = options["id"].removeprefix(DATASETS)
    return Reasoning, {
        "dataset": dataset,
        "config": options.get("make", {}),
        "prompt": options.get("prompt", ""),
        "shots": options.get("shots", 0),
    }
