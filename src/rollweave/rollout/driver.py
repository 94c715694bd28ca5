"""The interface between the pipeline and the driver of one attempt."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rollweave.engine.clients.base import OnTokens
from rollweave.envs.base import Score
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.schema.base import EngineId, Struct
from rollweave.schema.chat import Message
from rollweave.schema.commands import StartInit
from rollweave.schema.serving import GenerateResult, Sampling
from rollweave.schema.work import BLAME_OF, StopReason, Trajectory

DELAY_S = 4.0
"""Seconds between two calls of `Driver.on_delay`: fewer than any limit that the core
puts on a stage.
"""


class TurnResult(Struct, frozen=True, kw_only=True):
    """A generation result and the engine that produced it."""

    result: GenerateResult
    engine_id: EngineId


class TurnPort(Protocol):
    """The driver's access to the agent."""

    async def turn(
        self,
        number: int,
        tokens: tuple[int, ...],
        sampling: Sampling,
        on_tokens: OnTokens | None = None,
    ) -> TurnResult:
        """Continue `tokens`; wait for a slot and through retries. `on_tokens` is called
        with the deltas of `StreamTurn`.
        """

    def record_span(self, name: str, start: float, end: float) -> None:
        """Record that the environment worked from `start` to `end`, in seconds of the
        run's clock.
        """


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """The agent's configuration in one task domain: the codec between messages and
    tokens, and the sampling parameters without seed and length.
    """

    codec: ChatCodec
    sampling: Sampling


class Driver(Protocol):
    """Drives one attempt through INIT, RUN and EVAL, for an `Env` (`env_episode.py`) or
    a handler (`handler_episode.py`).

    The pipeline awaits each stage once, in order. A stage raises `EpisodeStopError` or
    is cancelled. Then the pipeline calls `close` or `kill`.
    """

    stop_reason: StopReason
    """The reason of INIT and RUN; set by `trajectory`."""

    on_delay: Callable[[], None]
    """Called every `DELAY_S` seconds while a stage waits for something that does not
    count as its time, such as an image.
    """

    @property
    def eval_s(self) -> float:
        """Seconds that the computation of the reward took."""

    @property
    def result(self) -> str:
        """Further output of the attempt that is stored: JSON, or ""."""

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The messages so far; for a handler, those of its last answered request."""

    @property
    def turns(self) -> int:
        """Number of turns that the agent has taken."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the first turn's prompt in tokens."""

    @property
    def reward(self) -> float:
        """Reward accumulated so far."""

    @property
    def plan(self) -> tuple[int, ...]:
        """The first tokens of the first turn."""

    @property
    def budget_s(self) -> float:
        """Active seconds that remain."""

    async def init(self) -> None:
        """Prepare the attempt."""

    async def run(self, port: TurnPort) -> StopReason:
        """Run the attempt until it ends for a reason that permits training."""

    async def score(self) -> Score:
        """Return the reward; called after `close`."""

    async def close(self) -> None:
        """Release what INIT acquired."""

    def kill(self) -> None:
        """Release it at once."""

    def trajectory(self, reason: StopReason, error: str) -> Trajectory:
        """Return the record of the attempt that is stored."""


MakeEpisode = Callable[[StartInit], Driver]


def record_of(command: StartInit, reason: StopReason, error: str) -> Trajectory:
    """Return the record of an attempt without its tokens and reward."""
    return Trajectory(
        id=command.trajectory_id,
        group_id=command.group_id,
        task=command.task,
        attempt=command.attempt,
        initiated_version=command.initiated_version,
        sequences=(),
        reward=None,
        stop_reason=reason,
        blame=BLAME_OF[reason],
        error=error,
    )
