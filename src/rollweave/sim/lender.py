"""A simulated serving engine that lends its slack: one device, two models, and one of
them computes at a time (ROSE §4.1).

The serving model computes whole prompts and, for all its answers at once, one token a
step. The rollout model is a `SimEngine` on a second clock, which stands still while
the device serves. Whenever the device is free, the rules of `Sharing` decide which of
the two computes next; a step is never interrupted. KV memory is counted in bytes: what
rollouts may hold is fixed when a step of the run begins, by what serving has used since
the last one and a headroom; it is halved when serving reaches into the headroom, and
stays so until the next step.

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
from rollweave.sim.coserving import Memory, Sharing, profiled
from rollweave.sim.cost import EngineCosts
from rollweave.sim.engine import Done, SimEngine

PAGE_BYTES = 2 << 20
"""Bytes of a page of memory (ROSE §4.1)."""

FULL = 0.9
"""Share of their memory that rollouts use when no more turns are taken. Assumption."""

ACTIVATION_S = 5.0
"""Seconds until the rollout model of an engine that begins to lend is in memory (ROSE
§4.1: at most).
"""

RELOAD_S = 20.0
"""Seconds in which an engine that holds one model at a time loads the other one.
Assumption: "tens of seconds" (ROSE §3.2; the values of Fig. 3c are not in the text).
"""

KEPT_S = 60.0
"""Seconds without requests after which such an engine loads the rollout model: the
window over which Knative decides to scale down.
"""


class Served:
    """A request of serving. `first_at` is when it got its first token."""

    __slots__ = ("arrived", "first_at", "output_tokens", "prompt_tokens")

    def __init__(self, *, arrived: float, prompt_tokens: int, output_tokens: int) -> None:
        self.arrived, self.first_at = arrived, math.inf
        self.prompt_tokens, self.output_tokens = prompt_tokens, output_tokens


class Lender:
    """One serving engine, named `name`.

    `phase` is the part of requests that it computes: prefill, decode or both. Times are
    virtual seconds in the order of the calls; `next_at` gives the time of the next
    `advance`. `on_first(request, now)` is called when a prompt is computed, and
    `on_last(request, now)` with the last token; `on_returned(keys)` when turns of
    rollouts are given back, with the tokens that each has sampled.
    """

    def __init__(
        self,
        name: str,
        *,
        phase: str,
        cost: EngineCosts,
        limits: Slo,
        memory: Memory,
        sharing: Sharing,
        lease_s: float = LEASE_S,
    ) -> None:
        self.name, self.phase = name, phase
        self.on_first: Callable[[Served, float], None] = lambda request, now: None
        self.on_last: Callable[[Served, float], None] = lambda request, now: None
        self.on_returned: Callable[[dict[str, int]], None] = lambda keys: None
        self.engine: SimEngine | None = None
        self.serving_s = 0.0
        self.stalls = 0
        self._cost, self._limits, self._memory, self._sharing = cost, limits, memory, sharing
        self._lease_s = lease_s
        self._profile, self._corrections = profiled(cost), Corrections()
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
        self._computes = ""  # prompt, tokens, rollouts, kept or reload; "" if idle
        self._last = ""
        # The model in memory, where one has it at a time: serving or rollouts.
        self._holds, self._wanted = "serving", ""
        self._idle_at = 0.0
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
        if not self.holds_rollouts:
            return False
        return engine is None or engine.kv_used < FULL * engine.kv_tokens

    @property
    def holds_rollouts(self) -> bool:
        """Return whether the rollout model can compute without a reload."""
        return not self._sharing.reloads or (self._holds == "rollouts" and not self._wanted)

    @property
    def holds_serving(self) -> bool:
        """Return whether the serving model can compute without a reload."""
        return not self._sharing.reloads or self._holds == "serving"

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
        if self._computes in ("", "kept"):
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
        room = self._memory.kv - (0.0 if self._sharing.reloads else self._budget)
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

    # Rollouts.

    def lend(self, now: float, engine: SimEngine) -> None:
        """Begin to lend, to an engine of the run that has just started."""
        self.advance_to(now)
        self.engine, self._tau, self._wall, self._progress_at = engine, 0.0, now, now
        self._marks.clear()
        self.begin_step(now)

    def take_back(self, now: float) -> None:
        """Stop lending at once; the turns are lost."""
        self.advance_to(now)
        self.engine, self._budget = None, 0.0
        self._done.clear()
        if self._computes in ("rollouts", "kept"):
            self._computes, self._until = "", math.inf
        self._admit()
        if not self._computes:
            self._choose(now)

    def begin_step(self, now: float) -> None:
        """Set the memory of rollouts for a step of the run."""
        if self._sharing.shrinks:
            used = max(self._peak, self.serving_bytes)
            self._budget = self._pages.begin_step(_pages(used)) * PAGE_BYTES
        else:
            self._budget = self._memory.kv / (1 if self._sharing.reloads else 2)
        self._peak = self.serving_bytes
        self._resize(now)

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
        if self.engine is None or not self._sharing.shrinks:
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
            self._idle_at = at
        elif computed == "reload":
            self._holds, self._wanted, self._idle_at = self._wanted, "", at
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
        if self._sharing.reloads and self._reloads(now, serves):
            return
        if self.engine is not None and self.holds_rollouts:
            self._expire(now)
            end = self.engine.first_end(self._tau)
            rollouts = end is not None
            if end is not None and self._may_run(now, end - self._tau, serves):
                limit = self._tau + max(end - self._tau, self._span(now, serves))
                end = self.engine.cut_by(self._tau, limit)
                self._computes, self._target, self._wall = "rollouts", end, now
                self._until = now + (end - self._tau)
                return
            if end is None:
                self._progress_at = now
        if self._prompts:
            request = self._prompts[0]
            seconds = self._prompt_s(request)
            self._computes = "prompt"
        elif self._ends:
            self._run = 1 if rollouts else self._ends[0][0] - self._steps
            seconds = self._tokens_s(self._run)
            self._computes = "tokens"
        else:
            return
        self._began, self._until = now, now + seconds

    def _reloads(self, now: float, serves: bool) -> bool:
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

    def _may_run(self, now: float, seconds: float, serves: bool) -> bool:
        """Return whether rollouts may compute a step of so many seconds now."""
        if not serves:
            return True
        sharing = self._sharing
        if sharing.turns:
            return self._last != "rollouts"
        if sharing.factor:
            due = self._progress_at + sharing.factor * self._limits.tpot_s
            return due < self._due()
        return seconds <= self._slack(now)

    def _span(self, now: float, serves: bool) -> float:
        """Return the seconds for which rollouts may compute without another choice."""
        if not serves:
            return math.inf
        if self._sharing.turns or self._sharing.factor:
            return 0.0
        return self._slack(now)

    def _due(self) -> float:
        """Return when the next token of serving is due."""
        prompts = self._prompts[0].arrived + self._limits.ttft_s if self._prompts else math.inf
        return min(prompts, self._oldest + self._limits.tpot_s)

    def _slack(self, now: float) -> float:
        """Return the seconds that serving can wait (ROSE eq. 1 and 2), where a prompt
        also waits for those before it.
        """
        slack, ahead, limits = math.inf, 0, self._limits
        if self._sharing.turns or self._sharing.factor or self._sharing.reloads:
            return 0.0
        if self._sharing.ttft:
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
        if self._sharing.tpot and self._ends:
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
        return self._cost.step_s(
            prefill_tokens=tokens,
            prefill_context=tokens * (tokens + 1) // 2,
            decode=0,
            decode_context=0,
        )

    def _tokens_s(self, steps: int = 1) -> float:
        return self._cost.decode_s(
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
