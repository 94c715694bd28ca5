"""The ways of ROSE's baselines to use the GPUs of others: values of `sharing` in a file
of serving engines.

In some, serving and rollouts share a simulated engine (§6.1): the stages of its Table
2, Prism's, and autoscaling in both directions. In the others, simulated engines without
users come and go: serverless GPUs, and spot instances (§6, baselines λRL and RLBoost+).
A run borrows these like serving engines, but has all of their GPUs. None has the
run's model in memory before: each starts a process, and loads its weights. A serverless
engine ends after its lease, and another one begins in its place at once. Spot instances
are there as a trace says, or as they are drawn. Turns of an engine that ends continue
elsewhere with the tokens that they have.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rollweave.core.policy.admission import PrefillMode
from rollweave.schema import events as e
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.simulation import ServingFile
from rollweave_sim.clock import Clock
from rollweave_sim.engine import SimEngine
from rollweave_sim.lender import Lender, Served
from rollweave_sim.lending import Lending
from rollweave_sim.serving import SHARING, ServingCluster
from rollweave_sim.traffic import count, timed_rows

START_S = 60.0
"""Seconds until an engine is ready that the run starts on a GPU which it did not have
before, without its weights: as long as for any engine that starts in a simulation. ROSE
has "tens of seconds" (§2.3; the values of its Fig. 3c are not in the text).
"""

LEASE_S = 900.0
"""Seconds after which a serverless engine ends (ROSE §6)."""

UP_S, DOWN_S = 1800.0, 600.0
"""Mean seconds for which a drawn spot instance is there and not there; both are
exponentially distributed. Assumption: ROSE's trace (App. B) is a figure alone.
"""

COLUMNS = ("TIMESTAMP", "Engines")
"""Columns of a trace of spot instances."""


class OnDemand(Lending):
    """The engines without users of a simulation, serverless or spot. Raises
    ConfigError.
    """

    def __init__(
        self,
        config: RunConfig,
        serving: ServingFile,
        *,
        clock: Clock,
        post: Callable[[e.Event], None],
    ) -> None:
        names = [f"s{number}" for number in range(serving.engines)]
        super().__init__(names, run=config.run.name, clock=clock, post=post)
        self._lent: set[str] = set()
        self._absent: set[str] = set()
        self._draw = random.Random(f"spot/{config.run.seed}")
        self._serverless = serving.sharing == "serverless"
        self._counts: Iterator[tuple[float, int]] | None = None
        if serving.trace is not None:
            self._counts = iter(available(Path(serving.trace)))

    def start(self) -> None:
        """Begin to report, and to come and go."""
        if self._serverless:
            self._clock.after(LEASE_S, self._end_leases)
        elif self._counts is not None:
            self._follow()
        else:
            for name in self.names:
                there = self._draw.random() < UP_S / (UP_S + DOWN_S)
                if not there:
                    self._absent.add(name)
                self._change_later(name)
        super().start()

    def _lender(self, name: str) -> e.Lender:
        return e.Lender(
            name=name,
            kv_use=0.0,
            lent_to=self._run if name in self._lent else "",
            recalled=name in self.recalled or name in self._absent,
        )

    def activate(self, name: str) -> float:
        self._lent.add(name)
        return START_S

    def lend(self, name: str, engine: SimEngine) -> SimEngine | None:
        return None if name in self.recalled or name in self._absent else engine

    def take_back(self, name: str) -> None:
        self._lent.discard(name)

    # Coming and going.

    def _end_leases(self) -> None:
        """End all serverless engines. Others may begin at once."""
        self._absent.update(self.names)
        self.report()
        self._absent.clear()
        self._clock.after(LEASE_S, self._end_leases)

    def _change_later(self, name: str) -> None:
        """Let a spot instance end, or come, after a time that is drawn."""
        mean_s = DOWN_S if name in self._absent else UP_S
        self._clock.after(self._draw.expovariate(1 / mean_s), lambda: self._change(name))

    def _change(self, name: str) -> None:
        self._absent ^= {name}
        self.report()
        self._change_later(name)

    def _follow(self) -> None:
        """Have as many spot instances as the trace says, from now on."""
        assert self._counts is not None, "there is a trace"
        for at, engines in self._counts:
            if at > self._clock.now:
                self._clock.at(at, lambda engines=engines: self._set(engines))  # type: ignore[misc]
                return
            self._choose(engines)

    def _set(self, engines: int) -> None:
        self._choose(engines)
        self.report()
        self._follow()

    def _choose(self, engines: int) -> None:
        """Draw which of the instances end, or which come."""
        there = [name for name in self.names if name not in self._absent]
        if len(there) > engines:
            self._absent.update(self._draw.sample(there, len(there) - engines))
        else:
            come = min(engines - len(there), len(self._absent))
            self._absent.difference_update(self._draw.sample(sorted(self._absent), come))


def available(path: Path) -> list[tuple[float, int]]:
    """Return the numbers of engines of a trace, each with the seconds since its first
    line. Raises ConfigError, which names the line.
    """
    rows = timed_rows(path, COLUMNS)
    first = rows[0][1]
    return [
        (at - first, count(where, COLUMNS[1], row[COLUMNS[1]], least=0)) for where, at, row in rows
    ]


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
