"""The driver of one attempt: its interface to the pipeline, and the time that the
attempt takes (ProRL Agent §3.2).

Invariants: time counts only while the agent generates or the environment works, never
while a turn queues; every call of user code has a limit; every failure in such a call
becomes one `EpisodeStopError` with a typed reason.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from rollweave.engine.clients.base import OnTokens
from rollweave.envs.base import Score
from rollweave.schema.base import EngineId, Struct
from rollweave.schema.chat import Message
from rollweave.schema.commands import StartInit
from rollweave.schema.errors import RollweaveError
from rollweave.schema.serving import GenerateResult, Sampling
from rollweave.schema.text import shortened
from rollweave.schema.work import BLAME_OF, Limits, StopReason, Timing, Trajectory

T = TypeVar("T")


class EpisodeStopError(RollweaveError):
    """End the attempt with this reason.

    The message may quote user code; it is valid text of bounded length.
    """

    def __init__(self, reason: StopReason, message: str) -> None:
        super().__init__(shortened(message))
        self.reason = reason


class Budget:
    """Track the time of one attempt. `clock` is the run's, in seconds."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self._limits, self._clock = limits, clock
        self.init_s = self.generate_s = self.env_s = self.queue_s = self.eval_s = 0.0

    @property
    def remaining_s(self) -> float:
        """Return the active seconds that remain; negative if the last call overran."""
        return self._limits.time_s - self.init_s - self.generate_s - self.env_s - self.eval_s

    def timing(self) -> Timing:
        """Return the timing of INIT and RUN; that of EVAL is stored with the reward."""
        return Timing(
            init_s=self.init_s,
            run_s=self.generate_s + self.env_s,
            queue_s=self.queue_s,
            generate_s=self.generate_s,
            env_s=self.env_s,
        )

    def charge_turn(self, requested_at: float, generate_s: float) -> None:
        """Charge a turn that was requested at `requested_at` and is answered now.

        The part of it that was not generation was queueing.
        """
        self.generate_s += generate_s
        self.queue_s += max(0.0, self._clock() - requested_at - generate_s)

    async def run_limited(
        self, call: Awaitable[T], *, hang: StopReason, failure: StopReason, what: str
    ) -> T:
        """Await a call of the environment under the step limit and the remaining
        budget.

        The caller charges the time.
        """
        left_s = max(0.0, self.remaining_s)
        try:
            async with asyncio.timeout(min(self._limits.step_s, left_s)) as scope:
                return await call
        except Exception as error:
            if isinstance(error, TimeoutError) and scope.expired():
                raise self.timeout_error(left_s, hang=hang, what=what) from None
            text = (
                str(error)
                if isinstance(error, RollweaveError)
                else f"{type(error).__name__}: {error}"
            )
            raise EpisodeStopError(failure, f"{what}: {text}") from error

    def timeout_error(self, left_s: float, *, hang: StopReason, what: str) -> EpisodeStopError:
        """Return the error for `what`, which began with `left_s` active seconds and
        timed out.
        """
        if left_s < self._limits.step_s:
            text = f"the active time of {self._limits.time_s:g} s ran out in {what}"
            return EpisodeStopError(StopReason.TIME_BUDGET, text)
        return EpisodeStopError(hang, f"{what} did not answer within {self._limits.step_s:g} s")


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


async def report_delays(episode: Driver) -> None:
    """Report regularly that the attempt waits for what does not count as its time."""
    while True:
        await asyncio.sleep(DELAY_S)
        episode.on_delay()


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


SpawnTask = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]
"""Runs a coroutine as a task of this name, of an owner that awaits it."""


class Spans(Protocol):
    """Receives the durations of an attempt's phases; `record/trace.py` draws them."""

    def episode_span(self, lane: str, name: str, start: float, end: float) -> None:
        """Record one phase of the attempt `lane`."""

    def episode_over(self, lane: str) -> None:
        """Record that the attempt is over."""
