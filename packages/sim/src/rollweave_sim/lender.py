"""A simulated serving engine that lends its slack: one device, two models, and one of
them computes at a time (ROSE §4.1).

The serving model computes whole prompts and, for all its answers at once, one token a
step. The rollout model is a `SimEngine` on a second clock, which stands still while the
device serves. Whenever the device is free, rollouts compute if serving then still meets
its limits; a step is never interrupted. Admission knows steps by the profiles of both
models and by what measured steps have corrected, and not what the next step will take,
which is noisy (`sim/noise`) and depends on the contexts. KV memory is counted in bytes:
what rollouts may hold is fixed when a step of the run begins, by what serving has used
since the last one and a headroom; it is halved when serving reaches into the headroom,
and stays so until the next step.

Invariants: the device computes one step at a time; the clock of the rollouts never runs
faster than the wall's; a turn that is given back has no answer.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable

from rollweave.core.policy.admission import (
    STALL_S,
    Corrections,
    PrefillMode,
    QueuedPrefill,
    Slo,
    StepKind,
    tpot_slack,
    ttft_slack,
)
from rollweave.core.policy.kv_budget import HEADROOM, LEASE_S, KvBudget
from rollweave_sim.cost import EngineCosts
from rollweave_sim.engine import Done, SimEngine
from rollweave_sim.noise import Noise
from rollweave_sim.traffic import Memory, profiled

PAGE_BYTES = 2 << 20
"""Bytes of a page of memory (ROSE §4.1)."""

FULL = 0.9
"""Share of their memory that rollouts use when no more turns are taken. Assumption."""

ACTIVATION_S = 5.0
"""Seconds until the rollout model of an engine that begins to lend is in memory (ROSE
§4.1: at most).
"""


class Served:
    """A request of serving. `first_at` is when it got its first token."""

    __slots__ = ("arrived", "first_at", "output_tokens", "prompt_tokens")

    def __init__(self, *, arrived: float, prompt_tokens: int, output_tokens: int) -> None:
        self.arrived, self.first_at = arrived, math.inf
        self.prompt_tokens, self.output_tokens = prompt_tokens, output_tokens


class Lender:
    """One serving engine, named `name`.

    `phase` is the part of requests that it computes: prefill, decode or both. `ttft`
    and `tpot` tell which of the limits admission keeps. Times are virtual seconds in
    the order of the calls; `next_at` gives the time of the next `advance`.
    `on_first(request, now)` is called when a prompt is computed, and `on_last(request,
    now)` with the last token; `on_returned(keys)` when turns of rollouts are given
    back, with the tokens that each has sampled.
    """

    idle: tuple[str, ...] = ("",)
    """Names of what the device does while it waits for a request."""

    shrinks = True
    """True if the memory of rollouts shrinks when serving needs it."""

    def __init__(
        self,
        name: str,
        *,
        phase: str,
        cost: EngineCosts,
        limits: Slo,
        memory: Memory,
        ttft: bool = True,
        tpot: bool = True,
        lease_s: float = LEASE_S,
        noise: Noise | None = None,
    ) -> None:
        self.name, self.phase = name, phase
        self.on_first: Callable[[Served, float], None] = lambda request, now: None
        self.on_last: Callable[[Served, float], None] = lambda request, now: None
        self.on_returned: Callable[[dict[str, int]], None] = lambda keys: None
        self.engine: SimEngine | None = None
        self.serving_s = 0.0
        self.stalls = 0
        self._cost, self._limits, self._memory = cost, limits, memory
        self._ttft, self._tpot, self._lease_s = ttft, tpot, lease_s
        self._profile, self._corrections = profiled(cost), Corrections()
        self._rollouts = self._profile  # that of their model, once they have an engine
        self._noise = noise
        self._pages = KvBudget(
            max(1, int(memory.kv // PAGE_BYTES)),
            headroom=min(1.0, HEADROOM * memory.total / memory.kv),
        )
        # Serving.
        self._prompts: deque[Served] = deque()
        self._joining: deque[Served] = deque()  # answers that wait for memory
        self._ends: list[tuple[int, int, Served]] = []  # (step of the last token, …)
        self._numbers = itertools.count()
        self._steps = self._context = 0
        self._oldest = math.inf  # when an answer got its newest token, of all the earliest
        self._peak = 0.0  # most bytes of KV of serving since the rollouts' last budget
        self._use_s = 0.0  # integral of the share of KV bytes over time
        self._use_at = self._use_from = 0.0
        # The device.
        self._until = math.inf  # end of what it computes
        self._began = 0.0
        self._run = 0  # steps in which answers grow, without a choice in between
        self._pace = 1.0  # seconds of what serving computes over what it costs
        self._step: tuple[StepKind, float, float] | None = None  # of rollouts: profiled, measured
        self._computes = ""  # prompt, tokens, rollouts or a subclass's own; "" if idle
        self._last = ""
        # The rollouts' clock: `_tau` at `_wall`, which runs while they compute.
        self._tau = self._wall = self._target = 0.0
        self._resizes = False
        self._budget = 0.0
        self._marks: deque[tuple[float, float]] = deque()  # (wall, clock), a second apart
        self._progress_at = 0.0
        self._done: list[Done] = []

    # Serving.

    @property
    def serving_bytes(self) -> float:
        """Return the bytes of KV that serving uses."""
        prompts = sum(one.prompt_tokens for one in self._prompts)
        return (self._context + prompts) * self._memory.serving_token

    @property
    def load(self) -> float:
        """Return the tokens of the requests that the engine has, for load balancing."""
        return (
            sum(one.prompt_tokens for one in self._prompts)
            + self._context
            + sum(one.prompt_tokens for one in self._joining)
        )

    @property
    def takes(self) -> bool:
        """Return whether rollouts may begin more turns: they have memory for them."""
        engine = self.engine
        return engine is None or engine.kv_used < FULL * engine.kv_tokens

    @property
    def holds_rollouts(self) -> bool:
        """Return whether the rollout model can compute now."""
        return True

    def use(self, now: float) -> float:
        """Return the mean share of the memory for KV that serving has used since the
        last call.
        """
        self._count_use(now)
        seconds, self._use_s = self._use_s, 0.0
        begun, self._use_from = self._use_from, now
        return seconds / (now - begun) if now > begun else 0.0

    def arrive(self, now: float, request: Served) -> None:
        """Queue the prompt of a request."""
        self.advance_to(now)
        self._prompts.append(request)
        self._changed(now)

    def join(self, now: float, request: Served) -> None:
        """Queue an answer, whose prompt is computed."""
        self.advance_to(now)
        self._joining.append(request)
        self._changed(now)

    def _changed(self, now: float) -> None:
        """Reconsider what the device does, for a request that has come."""
        self._count_use(now)
        self._admit()
        self._peak = max(self._peak, self.serving_bytes)
        if self._computes in self.idle:
            self._choose(now)
        elif self._computes == "rollouts" and self.engine is not None:
            tau = self._now(now)
            self._stop_at(self.engine.cut_by(tau, tau + max(0.0, self._slack(now))), now)
        else:
            self._cut(now)

    def _cut(self, now: float) -> None:
        """Let a run of steps of serving end with the one that is computed now."""
        if self._computes != "tokens" or self._run <= 1:
            return
        low, high = 1, self._run
        while low < high:
            middle = (low + high) // 2
            if self._began + self._tokens_s(middle) >= now:
                high = middle
            else:
                low = middle + 1
        self._run, self._until = low, self._began + self._tokens_s(low)

    def _stop_at(self, tau: float, now: float) -> None:
        """Let rollouts compute until their clock shows `tau`."""
        self._target = tau
        self._until = max(now, self._wall + (tau - self._tau))

    def _admit(self) -> None:
        """Let answers begin that have room beside what rollouts may hold."""
        room = self._room()
        token = self._memory.serving_token
        while self._joining:
            first = self._joining[0]
            if self._context and (self._context + first.prompt_tokens) * token > room:
                return
            self._joining.popleft()
            self._context += first.prompt_tokens + 1
            self._oldest = min(self._oldest, first.first_at)
            last = self._steps + max(1, first.output_tokens - 1)
            heapq.heappush(self._ends, (last, next(self._numbers), first))

    def _room(self) -> float:
        """Return the bytes of KV that serving may use."""
        return self._memory.kv - self._budget

    # Rollouts.

    def lend(self, now: float, engine: SimEngine) -> None:
        """Begin to lend, to an engine of the run that has just started."""
        self.advance_to(now)
        self.engine, self._tau, self._wall, self._progress_at = engine, 0.0, now, now
        self._rollouts = profiled(engine.cost)
        self._marks.clear()
        self.begin_step(now)

    def take_back(self, now: float) -> None:
        """Stop lending at once; the turns are lost."""
        self.advance_to(now)
        self.engine, self._budget = None, 0.0
        self._done.clear()
        if self._computes in ("rollouts", *self.idle):
            self._computes, self._until = "", math.inf
        self._admit()
        if not self._computes:
            self._choose(now)

    def begin_step(self, now: float) -> None:
        """Set the memory of rollouts for a step of the run."""
        self._budget = self._step_budget()
        self._peak = self.serving_bytes
        self._resize(now)

    def _step_budget(self) -> float:
        """Return the bytes of KV that rollouts may hold in a step of the run."""
        used = max(self._peak, self.serving_bytes)
        return self._pages.begin_step(_pages(used)) * PAGE_BYTES

    def _resize(self, now: float) -> None:
        """Make the rollouts fit their memory, and give the turns back that do not."""
        self._resizes = self._computes == "rollouts"  # then, once the step is computed
        if self.engine is not None and not self._resizes:
            tokens = int(self._budget / self._memory.rollout_token)
            self.engine.hold(self._now(now))
            returned = self.engine.limit_kv(self._now(now), tokens)
            if returned:
                self.on_returned(returned)

    def _relieve(self, now: float) -> None:
        """Shrink the memory of rollouts when serving reaches too far into the
        headroom.
        """
        if self.engine is None or not self.shrinks:
            return
        waiting = sum(one.prompt_tokens for one in self._joining)
        wanted = self.serving_bytes + waiting * self._memory.serving_token
        cuts = self._pages.cuts
        budget = self._pages.observe(_pages(wanted)) * PAGE_BYTES
        if self._pages.cuts > cuts:
            self._budget = budget
            self._resize(now)
            self._admit()

    @property
    def cuts(self) -> int:
        """Return how often the memory of rollouts was cut."""
        return self._pages.cuts

    def call(self, now: float) -> tuple[SimEngine, float]:
        """Return the engine of the rollouts and its time, for a call that may change
        what it computes. Call `called` afterwards.
        """
        self.advance_to(now)
        assert self.engine is not None, "only an engine that lends is called"
        tau = self._now(now)
        if self._computes != "rollouts":
            self.engine.hold(tau)
        return self.engine, tau

    def called(self, now: float) -> None:
        """Continue after a call of the rollouts' engine."""
        if self.engine is None:
            return
        if self._computes == "rollouts":
            end = self.engine.next_at()
            if end is not None and end < self._target:
                self._stop_at(end, now)
        elif not self._computes:
            self._choose(now)
        elif self.engine.has_work:
            self._cut(now)

    def wall(self, tau: float) -> float:
        """Return when the rollouts' clock shows `tau`, if they compute until then."""
        return self._wall + max(0.0, tau - self._tau)

    def _now(self, now: float) -> float:
        if self._computes != "rollouts":
            return self._tau
        return min(self._target, self._tau + (now - self._wall))

    # The device.

    def next_at(self) -> float | None:
        """Return the time of the next report or work of `advance`; None while idle."""
        if self._done:
            return self._wall
        stalls = self._stalls_at()
        due = min(self._until, stalls)
        return due if due < math.inf else None

    def _stalls_at(self) -> float:
        if self.engine is None or self._computes == "rollouts" or not self.engine.has_work:
            return math.inf
        return self._progress_at + STALL_S

    def advance(self, now: float) -> list[Done]:
        """Process everything up to and including `now`. Returns the finished turns."""
        self.advance_to(now)
        done, self._done = self._done, []
        return done

    def advance_to(self, now: float) -> None:
        while True:
            stalls = self._stalls_at()
            if min(self._until, stalls) > now:
                return
            if stalls < self._until:
                self._progress_at = stalls
                self.stalls += 1
                assert self.engine is not None, "it stalls"
                self.engine.hold(self._tau)
                self.on_returned(self.engine.give_all(self._tau))
                continue
            self._finish(self._until)

    def _finish(self, at: float) -> None:
        """End what the device computes, and choose what it computes next."""
        computed, self._computes, self._until = self._computes, "", math.inf
        self._last = computed
        if computed in ("prompt", "tokens"):
            self.serving_s += at - self._began
        self._count_use(at)
        if computed == "prompt":
            self._learn(StepKind.SERVING_PREFILL, at - self._began)
            request = self._prompts.popleft()
            request.first_at = at
            self.on_first(request, at)
        elif computed == "tokens":
            self._learn(StepKind.SERVING_DECODE, at - self._began)
            self._steps += self._run
            self._context += self._run * len(self._ends)
            self._oldest = at if self._ends else math.inf
            while self._ends and self._ends[0][0] <= self._steps:
                request = heapq.heappop(self._ends)[2]
                self._context -= request.prompt_tokens + max(2, request.output_tokens)
                self.on_last(request, at)
            if not self._ends:
                self._context, self._oldest = 0, math.inf
        elif computed == "rollouts":
            assert self.engine is not None, "rollouts compute while the engine lends"
            self._tau, self._wall, self._progress_at = self._target, at, at
            if self._step is not None:
                kind, profiled_s, seconds = self._step
                self._corrections.measured(kind, profiled_s=profiled_s, seconds=seconds)
                self._step = None
            self._mark(at)
            for done in self.engine.advance(self._tau):
                self._done.append(_at(done, at))
        if self._resizes:
            self._resize(at)
        self._peak = max(self._peak, self.serving_bytes)
        self._admit()
        self._relieve(at)
        self._choose(at)

    def _choose(self, now: float) -> None:
        """Let the device compute the next step of one of the models, or steps of
        serving up to the end of an answer while rollouts have nothing to compute.
        """
        rollouts = False
        serves = bool(self._prompts or self._ends)
        if self._is_busy(now, serves):
            return
        if self.engine is not None and self.holds_rollouts:
            self._expire(now)
            end = self.engine.first_end(self._tau)
            rollouts = end is not None
            if end is not None and self._may_run(now, self._expected_s(), serves):
                self._step = (*self._profiled(), end - self._tau)
                limit = self._tau + max(end - self._tau, self._span(now, serves))
                end = self.engine.cut_by(self._tau, limit)
                self._computes, self._target, self._wall = "rollouts", end, now
                self._until = now + (end - self._tau)
                return
            if end is None:
                self._progress_at = now
        if self._prompts:
            self._draw_pace(1)
            seconds = self._prompt_s(self._prompts[0])
            self._computes = "prompt"
        elif self._ends:
            self._run = 1 if rollouts else self._ends[0][0] - self._steps
            self._draw_pace(self._run)
            seconds = self._tokens_s(self._run)
            self._computes = "tokens"
        else:
            return
        self._began, self._until = now, now + seconds

    def _is_busy(self, now: float, serves: bool) -> bool:
        """Return whether the device does something else than to compute a step."""
        return False

    def _profiled(self) -> tuple[StepKind, float]:
        """Return the kind of the planned rollout step, and its profiled seconds."""
        assert self.engine is not None, "it lends"
        prompt, decode = self.engine.next_work
        kind = StepKind.ROLLOUT_PREFILL if prompt else StepKind.ROLLOUT_DECODE
        profile = self._rollouts
        return kind, profile.chunked.seconds(prompt) + profile.decode.seconds(decode)

    def _expected_s(self) -> float:
        """Return the expected seconds of the planned rollout step."""
        kind, profiled_s = self._profiled()
        return self._corrections.factor(kind) * profiled_s

    def _draw_pace(self, steps: int) -> None:
        """Draw the noise of what serving computes next."""
        self._pace = self._noise.factor(steps) if self._noise is not None else 1.0

    def _may_run(self, now: float, seconds: float, serves: bool) -> bool:
        """Return whether a rollout step of `seconds`, as expected, may start now."""
        return not serves or seconds <= self._slack(now)

    def _span(self, now: float, serves: bool) -> float:
        """Return the seconds for which rollouts may compute without another choice."""
        return self._slack(now) if serves else math.inf

    def _slack(self, now: float) -> float:
        """Return the seconds that serving can wait (ROSE eq. 1 and 2), where a prompt
        also waits for those before it.
        """
        slack, ahead, limits = math.inf, 0, self._limits
        if self._ttft:
            factor = self._corrections.factor(StepKind.SERVING_PREFILL)
            for request in self._prompts:
                queued = QueuedPrefill(
                    arrived=request.arrived, tokens=request.prompt_tokens, ahead=ahead
                )
                seconds = ttft_slack(
                    queued,
                    slo=limits,
                    profile=self._profile,
                    mode=PrefillMode.MONOLITHIC,
                    now=now,
                    factor=factor,
                )
                slack, ahead = min(slack, seconds), ahead + request.prompt_tokens
        if self._tpot and self._ends:
            seconds = tpot_slack(
                self._oldest + limits.tpot_s,
                profile=self._profile,
                batch=len(self._ends),
                now=now,
                factor=self._corrections.factor(StepKind.SERVING_DECODE),
            )
            slack = min(slack, seconds - self._profile.prefill_s(ahead, PrefillMode.MONOLITHIC))
        return slack

    def _learn(self, kind: StepKind, seconds: float) -> None:
        """Correct the profile by a step of serving that is computed."""
        if kind is StepKind.SERVING_PREFILL:
            tokens = self._prompts[0].prompt_tokens
            profiled_s = self._profile.prefill_s(tokens, PrefillMode.MONOLITHIC)
        else:
            profiled_s = self._profile.decode.seconds(len(self._ends)) * self._run
        self._corrections.measured(kind, profiled_s=profiled_s, seconds=seconds)

    def _prompt_s(self, request: Served) -> float:
        tokens = request.prompt_tokens
        return self._pace * self._cost.step_s(
            prefill_tokens=tokens,
            prefill_context=tokens * (tokens + 1) // 2,
            decode=0,
            decode_context=0,
        )

    def _tokens_s(self, steps: int = 1) -> float:
        return self._pace * self._cost.decode_s(
            decode=len(self._ends), decode_context=self._context, steps=steps
        )

    def _mark(self, now: float) -> None:
        """Note what the rollouts' clock shows: now, and about every second before."""
        marks = self._marks
        if len(marks) > 1 and now - marks[-2][0] < 1.0:
            marks.pop()
        marks.append((now, self._tau))

    def _expire(self, now: float) -> None:
        """Forget the KV of turns that finished longer ago than the lease."""
        assert self.engine is not None, "it lends"
        expired = None
        while self._marks and now - self._marks[0][0] >= self._lease_s:
            expired = self._marks.popleft()[1]
        if expired is not None:
            self.engine.forget(math.nextafter(expired, math.inf))

    def _count_use(self, now: float) -> None:
        self._use_s += (now - self._use_at) * self.serving_bytes / self._memory.kv
        self._use_at = now


def _pages(size: float) -> int:
    return math.ceil(size / PAGE_BYTES)


def _at(done: Done, at: float) -> Done:
    return Done(
        key=done.key,
        at=at,
        output_tokens=done.output_tokens,
        cached_tokens=done.cached_tokens,
        queue_s=done.queue_s,
    )
