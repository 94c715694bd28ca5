"""What drives one attempt, as the pipeline sees it."""

from collections.abc import Callable
from typing import Protocol

from rollweave.envs.base import Score
from rollweave.rollout.episode import TurnPort
from rollweave.schema.commands import StartInit
from rollweave.schema.work import StopReason, Trajectory


class Driver(Protocol):
    """What the pipeline drives through INIT, RUN and EVAL: one attempt (`rollout/episode.py` is the usual one).

    Each stage is awaited once, in order, and raises `EpisodeStopError`, or is cancelled; then comes `close` or `kill`.
    """

    stop_reason: StopReason
    """Of INIT and RUN, once `trajectory` was called."""
    eval_s: float

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
