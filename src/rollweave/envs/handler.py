"""The general form of a task: an agent handler that lives through init, run and eval (ProRL §3.2), and how an `Env` is one.

An `Env` answers one action at a time. A handler leads: it asks the agent as often as it likes, in conversations of its own
making. Invariant: after `run`, or after `on_error`, which whoever drives the handler calls with the stage that failed, it holds
nothing that costs anything; `eval` needs the episode alone.
"""

import enum
from collections.abc import Sequence
from typing import Protocol

from rollweave.envs.base import Episode, Observation, Score
from rollweave.envs.tasks import OpenedEnv, Worlds
from rollweave.schema.chat import Message
from rollweave.schema.work import Task


class Stage(enum.StrEnum):
    """Where a handler is in its life."""

    INIT = "init"
    RUN = "run"
    EVAL = "eval"


class Agent(Protocol):
    """What a handler sees of the agent."""

    async def act(self, messages: Sequence[Message], *, state_key: str = "") -> str:
        """Say these new messages to the agent and return its words. Whoever limits the agent's turns raises here."""

    def reward(self, value: float) -> None:
        """Set the reward of the words just returned."""


class AgentHandler(Protocol):
    """One attempt at one task. Single use."""

    async def init(self, task: Task) -> None:
        """Start what the task needs."""

    async def run(self, agent: Agent) -> bool | None:
        """Let the agent work until the task is over; True or False where success is known. Frees what `init` took."""

    async def eval(self, episode: Episode) -> Score:
        """The reward of the ended attempt."""

    async def on_error(self, stage: Stage, error: BaseException) -> None:
        """A stage raised, was cancelled, or ran out of time: free what is held."""

    def final_result(self) -> dict[str, object]:
        """What a client that asked for this attempt gets beside tokens and reward."""


class EnvHandler:
    """An environment as a handler. `seed` decides injected faults."""

    def __init__(self, worlds: Worlds, *, seed: int) -> None:
        self._worlds, self._seed = worlds, seed
        self._env: OpenedEnv | None = None
        self._first: Observation | None = None
        self._steps = 0
        self._success: bool | None = None

    async def init(self, task: Task) -> None:
        """Open and reset the environment. Raises EnvError."""
        self._env = await self._worlds.open(task, seed=self._seed)
        self._first = await self._env.reset(task)

    async def run(self, agent: Agent) -> bool | None:
        """Alternate agent and environment until the environment is done, then close it. Raises EnvError."""
        assert self._env is not None, "run follows init"
        assert self._first is not None, "run follows init"
        messages, state_key = self._first.messages, self._first.state_key
        while True:
            step = await self._env.step(await agent.act(messages, state_key=state_key))
            self._steps += 1
            agent.reward(step.reward)
            if step.done:
                break
            messages, state_key = step.messages, step.state_key
        self._success = step.success
        await self._env.close()
        self._env = None
        return self._success

    async def eval(self, episode: Episode) -> Score:
        """The reward. Raises RewardError."""
        return await self._worlds.score(episode, seed=self._seed)

    async def on_error(self, stage: Stage, error: BaseException) -> None:
        """Free the environment at once."""
        if self._env is not None:
            self._env.kill()
            self._env = None

    def final_result(self) -> dict[str, object]:
        """How far it came."""
        return {"steps": self._steps, "success": self._success}
