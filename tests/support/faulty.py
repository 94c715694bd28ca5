"""Environments that fail as users' environments do: calls that raise, that never
return, or that return no observation, and rewards that raise.

Their option `faults` has the share of each in the calls, by name, with the file
`draws`: the n-th draw of all processes that share it is the same in every run. (If each
process drew for itself, all would begin with the same numbers, and no environment would
get past the first number that is a fault.) With `hangs_once`, the first call of all
processes that can create this file never returns.
"""

import asyncio
import contextlib
import random
import threading
from typing import Any

from rollweave.envs.base import Episode, Observation, Options, Score, Step
from rollweave.envs.frozenlake import FrozenLake
from rollweave.schema.work import Task
from tests.support.game import Game

GARBAGE: Any = "not an observation"


def draw(shares: dict[str, Any]) -> float:
    """Return the next number, 0 to 1, of all processes that share the file `draws`."""
    with open(shares["draws"], "ab") as file:
        file.write(b".")
        file.flush()
        return random.Random(f"draw {file.tell()}").random()


def fault(shares: dict[str, Any]) -> str:
    """Draw the fault of a call; "" for none. Raises RuntimeError."""
    if "hangs_once" in shares:
        with contextlib.suppress(FileExistsError), open(shares["hangs_once"], "x"):
            return "hangs"
    rest = draw(shares) if "draws" in shares else 0.0
    for name in ("raises", "hangs", "garbage"):
        rest -= shares.get(name, 0.0)
        if rest < 0:
            if name == "raises":
                raise RuntimeError("the environment fails")
            return name
    return ""


def scored(episode: Episode, options: Options) -> Score:
    faults = options["faults"]
    if "draws" in faults and draw(faults) < faults.get("no_reward", 0.0):
        raise RuntimeError("the reward fails")
    return Score(reward=sum(episode.rewards), success=episode.success)


class FaultyLake(FrozenLake):
    """The fixed frozen lake, for an isolated process: a hang blocks its thread."""

    def __init__(self, *, faults: dict[str, Any], maps: Any = "fixed") -> None:
        super().__init__(maps=maps)
        self._faults = faults

    def reset(self, task: Task) -> Observation:
        return self._failed() or super().reset(task)

    def step(self, action: str) -> Step:
        return self._failed() or super().step(action)

    def _failed(self) -> Any:
        name = fault(self._faults)
        if name == "hangs":
            threading.Event().wait()
        return GARBAGE if name else None

    @classmethod
    def transcript(cls, rng: random.Random, options: Options) -> Any:
        return FrozenLake.transcript(rng, {"maps": "fixed"})

    score = staticmethod(scored)


class FaultyGame(Game):
    """The game; a hang awaits forever."""

    def __init__(self, *, faults: dict[str, Any]) -> None:
        super().__init__()
        self._faults = faults

    async def reset(self, task: Task) -> Observation:  # type: ignore[override]
        return await self._failed() or super().reset(task)

    async def step(self, action: str) -> Step:
        return await self._failed() or await super().step(action)

    async def _failed(self) -> Any:
        name = fault(self._faults)
        if name == "hangs":
            await asyncio.Event().wait()
        return GARBAGE if name else None

    score = staticmethod(scored)
