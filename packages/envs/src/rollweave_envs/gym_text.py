"""Any gymnasium environment whose observations can be written as text and whose actions
can be named.
"""

import re
from collections.abc import Sequence
from typing import Any, Literal

import gymnasium
from gymnasium.spaces import Discrete, Text

from rollweave.envs.base import Observation, Options, Step
from rollweave.schema.errors import ConfigError
from rollweave.schema.work import Task

INVALID_REWARD = -0.1
INVALID = " invalid"

_NUMBER = re.compile(r"\s*(\d{1,9})\s*", re.ASCII)


class GymText:
    """`gymnasium.make(id, **make)` in words.

    With a `Discrete` action space the agent answers one of `actions` (by position), or
    the number if none are named; with a `Text` space its message is the action.
    Observations are written as they are, or as the environment renders itself (`observe
    = "render"`), which must be as text (`make = { render_mode = "ansi" }`). `prompt`
    precedes the first observation. An invalid action costs 0.1. Whether an episode
    succeeded is taken from `info["success"]` at its end, and is otherwise unknown.
    """

    def __init__(
        self,
        *,
        id: str,
        make: Options | None = None,
        actions: Sequence[str] = (),
        prompt: str = "",
        observe: Literal["value", "render"] = "value",
    ) -> None:
        if observe not in ("value", "render"):
            raise ConfigError(f"options.observe must be value or render, got {observe!r}")
        try:
            self._env: gymnasium.Env[Any, Any] = gymnasium.make(
                id, disable_env_checker=True, **(make or {})
            )
        except gymnasium.error.Error as error:
            raise ConfigError(
                f"options.id must be an environment of gymnasium, got {id!r}: {error}"
            ) from error
        if observe == "render" and self._env.render_mode != "ansi":
            raise ConfigError(
                "options.make.render_mode must be ansi where options.observe is render, got "
                f"{self._env.render_mode!r}"
            )
        self._actions, self._prompt, self._observe = tuple(actions), prompt, observe
        space = self._env.action_space
        if not isinstance(space, Discrete | Text):
            raise ConfigError(
                f"options.id must have Discrete or Text actions, {id} has {type(space).__name__}"
            )
        if actions and (not isinstance(space, Discrete) or len(actions) != space.n):
            raise ConfigError(
                f"options.actions must name every action of {space}, got {len(actions)} names"
            )

    def reset(self, task: Task) -> Observation:
        value, _ = self._env.reset(seed=task.seed % 2**31)
        text = self._shown(value)
        return Observation.of(f"{self._prompt}{text}", state_key=text)

    def step(self, action: str) -> Step:
        parsed = self._parsed(action)
        if parsed is None:
            return Step.of(INVALID, reward=INVALID_REWARD)
        value, reward, terminated, truncated, info = self._env.step(parsed)
        text, earned = self._shown(value), float(reward)
        if not (terminated or truncated):
            return Step.of(text, reward=earned, state_key=text)
        success = bool(info["success"]) if "success" in info else None
        return Step.of(text, reward=earned, done=True, success=success)

    def close(self) -> None:
        self._env.close()

    @classmethod
    def words(cls, options: Options) -> Sequence[str]:
        """Return the names of the actions.

        The environment's own texts are not known beforehand.
        """
        return [*options.get("actions", ()), INVALID]

    def _shown(self, value: Any) -> str:
        """Return an observation as text."""
        return str(self._env.render() if self._observe == "render" else value)

    def _parsed(self, action: str) -> Any:
        """Return the environment's action; None for a message that is none."""
        space, text = self._env.action_space, action.strip()
        if isinstance(space, Text):
            return next((each for each in (action, text) if space.contains(each)), None)
        assert isinstance(space, Discrete), "checked when it was made"
        if self._actions:
            return int(space.start) + self._actions.index(text) if text in self._actions else None
        number = _NUMBER.fullmatch(action)
        return int(number[1]) if number is not None and space.contains(int(number[1])) else None
