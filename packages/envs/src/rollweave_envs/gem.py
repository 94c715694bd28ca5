"""Environments with GEM's interface: `reset(seed)` returns an observation and a dict,
`step(action)` an observation, a reward, two flags and a dict, as in gymnasium, where
observations and actions are text.

GEM seeds the random numbers of the whole process in `reset`. Resets exclude each other
here, and leave these numbers as they were, so that equal seeds begin equal episodes
also where several environments share a process. What an environment draws during its
steps is reproducible only with `isolation = "process"`.
"""

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy

from rollweave.envs.base import Observation, Options, Split, Step, new_task
from rollweave.envs.registry import load
from rollweave.schema.base import mix
from rollweave.schema.errors import ConfigError
from rollweave.schema.work import Task

SOLVED = 1.0
"""Reward of a last step from which an episode counts as solved, unless its `info` says
more: that of GEM's games and of its questions.
"""

_resetting = threading.Lock()


class Gem:
    """The environment `id`, made by the function `maker` with the arguments `make`.

    `maker` is `package.module:function`, called as `function(id, **make)`: `gem.make`
    by default. `prompt` precedes the first observation. Whether an episode succeeded is
    `info["success"]` or `info["correct"]` of its last step, or else whether that step
    was rewarded with 1.
    """

    def __init__(
        self,
        *,
        id: str,
        make: Options | None = None,
        maker: str = "gem:make",
        prompt: str = "",
    ) -> None:
        function = _maker(maker)
        try:
            self._env: Any = function(id, **(make or {}))
        except Exception as error:  # of the library, for a name that it does not have
            raise ConfigError(
                f"options.id must be an environment that {maker} makes, got {id!r}: "
                f"{type(error).__name__}: {error}"
            ) from error
        self._prompt = prompt

    def reset(self, task: Task) -> Observation:
        with _own_random_numbers():
            value, info = self._env.reset(seed=task.seed % 2**31)
        text = _written(value, info)
        return Observation.of(f"{self._prompt}{text}", state_key=text)

    def step(self, action: str) -> Step:
        value, reward, terminated, truncated, info = self._env.step(action)
        text, earned = _written(value, info), float(reward)
        if not (terminated or truncated):
            return Step.of(text, reward=earned, state_key=text)
        success = info.get("success", info.get("correct", earned >= SOLVED))
        return Step.of(text, reward=earned, done=True, success=bool(success))

    def close(self) -> None:
        close = getattr(self._env, "close", None)
        if close is not None:
            close()

    @classmethod
    def make_task(cls, *, index: int, seed: int, split: Split, options: Options) -> Task:
        """Return a random seed of the split."""
        return new_task(seed=mix(seed, split, index))


def _maker(reference: str) -> Callable[..., Any]:
    """Return the function that makes environments. Raises ConfigError."""
    try:
        function = load(reference, what="options.maker")
    except ConfigError as error:
        if reference.startswith("gem:"):
            text = f"{error} (docs/ENVIRONMENTS.md says how to install GEM)"
            raise ConfigError(text) from error
        raise
    if not callable(function):
        raise ConfigError(
            f"options.maker must be a function, {reference} is a {type(function).__name__}"
        )
    return function  # type: ignore[no-any-return]


@contextlib.contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Restore the process's random numbers after this context, which one thread has at
    a time.
    """
    with _resetting:
        ours, numpys = random.getstate(), numpy.random.get_state()
        try:
            yield
        finally:
            random.setstate(ours)
            numpy.random.set_state(numpys)


def _written(value: Any, info: Options) -> str:
    """Return an observation as text, with the prefix and suffix that its `info` has."""
    parts = (info.get("prefix", ""), value, info.get("suffix", ""))
    return "\n".join(text for text in map(str, parts) if text)
