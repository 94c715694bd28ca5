"""What drives one attempt, as the pipeline sees it, and what it is given."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rollweave.envs.base import Score
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.schema.base import EngineId, Struct
from rollweave.schema.commands import StartInit
from rollweave.schema.serving import GenerateResult, Sampling
from rollweave.schema.work import StopReason, Trajectory


class Answer(Struct, frozen=True, kw_only=True):
    """A turn as an engine gave it."""

    result: GenerateResult
    engine_id: EngineId


class TurnPort(Protocol):
    """The episode's way to the agent."""

    async def turn(self, number: int, tokens: tuple[int, ...], sampling: Sampling) -> Answer:
        """Continue `tokens`; waits for a slot and through retries."""

    def stepped(self, name: str, start: float, end: float) -> None:
        """The environment worked from `start` to `end`, in seconds of the run's clock."""


@dataclass(frozen=True, kw_only=True)
class Speech:
    """How the agent speaks in one task domain: how messages become tokens, and its
    sampling without seed and length.
    """

    codec: ChatCodec
    sampling: Sampling


class Driver(Protocol):
    """What the pipeline drives through INIT, RUN and EVAL: one attempt, at an `Env`
    (`episode.py`) or by a handler.

    Each stage is awaited once, in order, and raises `EpisodeStopError`, or is
    cancelled; then comes `close` or `kill`.
    """

    stop_reason: StopReason
    """Of INIT and RUN, once `trajectory` was called."""

    @property
    def eval_s(self) -> float:
        """Seconds that the reward took."""

    @property
    def result(self) -> str:
        """What else is kept of the attempt: JSON, or ""."""

    @property
    def turns(self) -> int:
        """That the agent has taken."""

    @property
    def prompt_tokens(self) -> int:
        """Of the first turn."""

    @property
    def reward(self) -> float:
        """So far."""

    @property
    def plan(self) -> tuple[int, ...]:
        """The first tokens of the first turn."""

    @property
    def budget_s(self) -> float:
        """Active seconds that are left."""

    async def init(self) -> None:
        """Begin."""

    async def run(self, port: TurnPort) -> StopReason:
        """Until the attempt has ended for a reason that may be trained on."""

    async def score(self) -> Score:
        """Its reward; after `close`."""

    async def close(self) -> None:
        """Free what INIT took."""

    def kill(self) -> None:
        """Free it now."""

    def trajectory(self, reason: StopReason, error: str) -> Trajectory:
        """What is stored of the attempt."""


MakeEpisode = Callable[[StartInit], Driver]
