"""Ways in which serving and rollouts share a simulated engine that ROSE compares its
own with (§6.1): the stages of its Table 2, Prism's, and autoscaling in both directions.
They are values of `sharing` in a file of serving engines.
"""

import math
from collections.abc import Sequence

from rollweave.core.policy.admission import PrefillMode
from rollweave.sim.lender import Lender, Served
from rollweave.sim.serving import SHARING, ServingCluster
from rollweave_papers.ondemand import OnDemand

LONGER = 4.0
"""Factor by which the limit of rollouts is longer than that of serving, in Prism's
multiplexing.
"""

RELOAD_S = 20.0
"""Seconds in which an engine that holds one model at a time loads the other one.
Assumption: "tens of seconds" (ROSE §3.2; the values of Fig. 3c are not in the text).
"""

KEPT_S = 60.0
"""Seconds without requests after which such an engine loads the rollout model: the
window over which Knative decides to scale down.
"""


class WithoutAdmission(Lender):
    """An engine that knows no slack."""

    def _slack(self, now: float) -> float:
        return 0.0


class TakingTurns(WithoutAdmission):
    """An engine whose two models take turns, step by step."""

    def _may_run(self, now: float, seconds: float, serves: bool) -> bool:
        return not serves or self._last != "rollouts"


class FixedHalves(TakingTurns):
    """An engine whose rollouts have a fixed half of the memory."""

    shrinks = False

    def _step_budget(self) -> float:
        return self._memory.kv / 2


class EarliestDue(WithoutAdmission):
    """An engine that computes the model whose next token is due first, rollouts by a
    limit that is `LONGER` times as long.
    """

    def _may_run(self, now: float, seconds: float, serves: bool) -> bool:
        return not serves or self._progress_at + LONGER * self._limits.tpot_s < self._due()

    def _due(self) -> float:
        """Return when the next token of serving is due."""
        prompts = self._prompts[0].arrived + self._limits.ttft_s if self._prompts else math.inf
        return min(prompts, self._oldest + self._limits.tpot_s)


class OneModel(WithoutAdmission):
    """An engine that holds one of the models at a time, and loads the other one to
    compute it.
    """

    idle = ("", "kept")
    shrinks = False

    _holds, _wanted, _idle_at = "serving", "", 0.0

    @property
    def takes(self) -> bool:
        return self.holds_rollouts and super().takes

    @property
    def holds_rollouts(self) -> bool:
        return self._holds == "rollouts" and not self._wanted

    @property
    def holds_serving(self) -> bool:
        """Return whether the serving model can compute without a reload."""
        return self._holds == "serving"

    def has_room(self, request: Served, *, prompt: bool) -> bool:
        """Return whether the prompt of a request, or its answer, would meet its limit
        here by the profile, without a reload.
        """
        if not self.holds_serving:
            return False
        if prompt:
            tokens = request.prompt_tokens + sum(one.prompt_tokens for one in self._prompts)
            return self._profile.prefill_s(tokens, PrefillMode.MONOLITHIC) <= self._limits.ttft_s
        waiting = sum(one.prompt_tokens for one in self._joining) + request.prompt_tokens
        batch = len(self._ends) + len(self._joining) + 1
        fits = (self._context + waiting) * self._memory.serving_token <= self._memory.kv
        return fits and self._profile.decode.seconds(batch) <= self._limits.tpot_s

    def wake(self, now: float) -> None:
        """Load the serving model again, for requests to come."""
        self.advance_to(now)
        if self._holds == "rollouts" and self._wanted != "serving":
            self._wanted = "serving"
            self._changed(now)

    def _room(self) -> float:
        return self._memory.kv

    def _step_budget(self) -> float:
        return self._memory.kv

    def _finish(self, at: float) -> None:
        if self._computes == "reload":
            self._holds, self._wanted, self._idle_at = self._wanted, "", at
        elif self._computes in ("prompt", "tokens"):
            self._idle_at = at
        super()._finish(at)

    def _is_busy(self, now: float, serves: bool) -> bool:
        """Load the other model, if it is needed now or serving was idle for long.

        Returns whether the device does, or waits for that.
        """
        if self._holds == "rollouts":
            if not (serves or self._wanted):
                return False
            if self.engine is not None:
                self.on_returned(self.engine.give_all(self._tau))
            wanted = "serving"
        elif serves or self.engine is None:
            return False
        elif now < self._idle_at + KEPT_S:
            self._computes, self._until = "kept", self._idle_at + KEPT_S
            return True
        else:
            wanted = "rollouts"
        self._wanted, self._computes, self._until = wanted, "reload", now + RELOAD_S
        return True


class Spatial(ServingCluster):
    """Engines whose two models take turns."""

    lender = TakingTurns


class Preemption(Spatial):
    """Engines whose two models take turns, without a prefix cache of rollouts."""

    prefix_cache = False


class Partition(ServingCluster):
    """Engines in turns with fixed halves of the memory, without a prefix cache."""

    lender, prefix_cache = FixedHalves, False


class Multiplexing(ServingCluster):
    """Engines of Prism, without a prefix cache."""

    lender, prefix_cache = EarliestDue, False


class Autoscaling(ServingCluster):
    """Engines that hold one model at a time."""

    lender = OneModel

    def _engine_for(self, request: Served, engines: Sequence[Lender], *, prompt: bool) -> Lender:
        """Return the first engine that has room. If none has, one more loads the
        serving model.
        """
        kinds = [one for one in engines if isinstance(one, OneModel)]
        for engine in kinds:
            if engine.has_room(request, prompt=prompt):
                return engine
        for engine in kinds:
            if not engine.holds_serving:
                engine.wake(self._clock.now)
                self._touched(engine)
                break
        serving = [engine for engine in kinds if engine.holds_serving]
        return min(serving or kinds, key=lambda one: one.load)


SHARING |= {
    "spatial": Spatial,
    "preemption": Preemption,
    "partition": Partition,
    "multiplexing": Multiplexing,
    "autoscaling": Autoscaling,
    "serverless": OnDemand,
    "spot": OnDemand,
}
