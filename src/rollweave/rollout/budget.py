"""The time of one attempt: the duration of each stage, and the active seconds that
remain (ProRL Agent §3.2).

Invariants: time counts only while the agent generates or the environment works, never
while a turn queues; every call of user code has a limit; every failure in such a call
becomes one `EpisodeStopError` with a typed reason.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rollweave.schema.errors import RollweaveError
from rollweave.schema.text import shortened
from rollweave.schema.work import Limits, StopReason, Timing

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
