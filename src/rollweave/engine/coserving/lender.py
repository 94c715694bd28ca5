"""The borrower's side of an engine that lends (ROSE §4.1): the loan, the run's model,
its profile and its steps, on one thread.

Subclasses know the serving engine: they say for how long its requests can wait, and
divide the memory. A rollout that must go is aborted and keeps its tokens: the run
continues it elsewhere. The borrower's model is read beside the steps, on a thread that
yields to them, measured between them where serving can wait, and lost without a trace.
"""

import gc
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from rollweave.core.policy.admission import (
    FIRST_MARGIN,
    Admission,
    Profile,
    Progress,
    Slo,
    StepKind,
    stalled,
)
from rollweave.core.policy.kv_budget import KvBudget
from rollweave.engine.batching import StepWork
from rollweave.engine.core import EngineCore
from rollweave.engine.coserving.lending import LendingSocket
from rollweave.engine.coserving.memory import MappedPool, ModelMemory
from rollweave.engine.coserving.tenant import Measuring, Tenant
from rollweave.engine.pages import PagePool
from rollweave.engine.thread import Activity, Mailbox
from rollweave.io.machine import computed_dtype, device_named, yield_to_others
from rollweave.schema.errors import ConfigError
from rollweave.schema.serving import (
    Add,
    Beat,
    Beating,
    EngineCommand,
    EngineFatal,
    EngineReply,
    EngineSpec,
    FinishReason,
    LendingStats,
    Load,
    Ready,
    Sampled,
    Suspend,
)
from rollweave.weights.checkpoint import read_shape

COLOCATED = (
    "trainer.colocated must be false with an engine that is lent: it gives its memory back to the "
    "serving model alone, got true"
)

END_S = 5.0
"""Maximum seconds for a former loan to end before another one is refused."""


class RolloutMemory(Protocol):
    """The memory of the borrower's model: `rollouts` once it computes."""

    pages: PagePool
    budget: KvBudget
    rollouts: ModelMemory | None

    @property
    def pool_for(self) -> Callable[..., MappedPool]:
        """The pool of a borrower's model, whose first group has memory."""

    def begin_step(self) -> None:
        """Begin an RL step: the borrower has new weights."""

    def grow_rollouts(self, now: float) -> bool:
        """Give rollouts one more group of blocks. Return whether they may have it."""


class LendingEngine(ABC):
    """An engine that lends. `post` queues a command of its own clients, from any
    thread; `run` blocks until `Shutdown`.
    """

    _shared: RolloutMemory
    _profile: Profile  # of the serving model

    def __init__(
        self,
        spec: EngineSpec,
        reply: Callable[[EngineReply], None],
        *,
        clock: Callable[[], float],
        end_s: float,
    ) -> None:
        assert spec.lend is not None, "an engine that does not lend"
        self.spec, self.lend, self._reply, self._clock = spec, spec.lend, reply, clock
        self._slo = Slo(ttft_s=spec.lend.ttft_s, tpot_s=spec.lend.tpot_s)
        self._wake = threading.Condition()
        self._activity = Activity(clock)
        self._mailbox = Mailbox(self._wake)
        self._events: deque[Callable[[], None]] = deque()
        """Calls that the loan needs on the executor's thread."""
        self._borrowed: Tenant | None = None
        self._loan, self._loan_over = False, threading.Condition()
        self._end_s = end_s
        self._admission: Admission | None = None
        self._measuring: Measuring | None = None
        self._progress = Progress()
        self._aborted = self._stalls = self._loans = 0
        self._rollout_steps = self._rollout_tokens = 0
        self._rollout_busy_s = self._delay_s = self._activation_s = 0.0
        self._rollout_at = clock()

    @abstractmethod
    def _build(self) -> Ready:
        """Build what serves, before anything is lent."""

    @abstractmethod
    def _loop(self) -> None:
        """Compute until `Shutdown`."""

    @abstractmethod
    def _close(self) -> None:
        """End what serves, also if it was not built."""

    @abstractmethod
    def _slack(self, admission: Admission, now: float) -> float:
        """Return for how many seconds all serving requests can wait."""

    @abstractmethod
    def _longest_s(self, admission: Admission) -> float:
        """Return the seconds that the prompt of the next serving request may take."""

    @property
    @abstractmethod
    def _serves(self) -> bool:
        """True if the serving model has a step to compute."""

    def post(self, command: EngineCommand) -> None:
        """Queue a command of the engine's clients. A heartbeat is answered at once."""
        if isinstance(command, Beat):
            self._reply(self.beating())
        else:
            self._mailbox.post(command)

    def beating(self) -> Beating:
        """Return what the executor is doing."""
        return self._activity.beating()

    def begin(self, spec: EngineSpec, reply: Callable[[EngineReply], None]) -> str:
        """Begin a loan. Return why there is none, or "". A former loan has some time to
        end: a run that starts its engine again may connect before that.
        """
        with self._loan_over:
            if not self._loan_over.wait_for(lambda: not self._loan, self._end_s):
                return f"engine {self.spec.model} is lent to another run"
            self._loan = True
        self._call(lambda: self._begin(spec, self._telling(reply)))
        return ""

    def post_borrowed(self, command: EngineCommand) -> None:
        """Queue a command of the borrower."""
        self._call(lambda: self._forward(command))

    def end(self) -> None:
        """End the loan: the borrower is gone."""
        self._call(self._end)

    def _call(self, function: Callable[[], None]) -> None:
        with self._wake:
            self._events.append(function)
            self._wake.notify()

    # The thread of the executor

    def run(self) -> None:
        """Build the serving side, lend at the socket, and compute."""
        listener: LendingSocket | None = None
        try:
            ready = self._build()
            # the end of a loan collects the garbage of its model, not all objects
            gc.freeze()
            listener = LendingSocket(self.lend.socket, self)
            self._reply(ready)
            with torch.inference_mode():
                self._loop()
        except Exception as error:
            self._reply(EngineFatal(error=f"{type(error).__name__}: {error}"))
        finally:
            if listener is not None:
                listener.close()
                self._end()
            self._close()

    def _take_events(self) -> None:
        while self._events:
            self._for_borrower(self._events.popleft())
        if self._borrowed is not None and self._admission is not None:
            self._for_borrower(self._borrowed.execute)

    def _for_borrower(self, work: Callable[[], object]) -> bool:
        """Do what the loan needs, and return whether that is true. A failure ends the
        loan, and not the engine.
        """
        try:
            return bool(work())
        except Exception as error:
            self._recall(f"{type(error).__name__}: {error}")
            return False

    # The borrower

    def _telling(self, reply: Callable[[EngineReply], None]) -> Callable[[EngineReply], None]:
        """Return what passes replies on, with the loan in samples."""

        def send(told: EngineReply) -> None:
            if isinstance(told, Sampled):
                stats = msgspec.structs.replace(told.stats, lending=self.stats())
                told = msgspec.structs.replace(told, stats=stats)
            reply(told)

        return send

    def _begin(self, spec: EngineSpec, reply: Callable[[EngineReply], None]) -> None:
        """Take memory for the borrower's model, and read it beside the steps."""
        started = self._clock()
        try:
            tenant = self._tenant(spec, reply)
        except Exception as error:
            reply(EngineFatal(error=str(error)))
            return
        self._borrowed = tenant
        self._loans += 1

        def build() -> None:
            yield_to_others()
            tenant.build()
            self._call(lambda: self._built(tenant, started, reply))

        threading.Thread(target=build, name="borrower's model", daemon=True).start()

    def _tenant(self, spec: EngineSpec, reply: Callable[[EngineReply], None]) -> Tenant:
        if spec.released:
            raise ConfigError(COLOCATED)
        spec = msgspec.structs.replace(
            spec,
            device=self.spec.device,
            dtype=computed_dtype(spec.dtype, device_named(self.spec.device).type),
            profile=False,  # it would use all blocks
            paged_attention=False,
        )
        pool = self._shared.pool_for(
            read_shape(Path(spec.model)),
            kv_tokens=spec.kv_tokens,
            block_tokens=spec.block_tokens,
            device=device_named(spec.device),
            dtype=getattr(torch, spec.dtype),
        )
        mailbox = Mailbox(self._wake)
        core = EngineCore(
            spec,
            reply,
            between_steps=mailbox.post,
            clock=self._clock,
            watch=self._watch_rollouts,
            loads_beside=True,
            make_pool=lambda _, **__: pool,
            doing=self._activity.begin,
        )
        return Tenant(core, mailbox, pool)

    def _built(self, tenant: Tenant, started: float, reply: Callable[[EngineReply], None]) -> None:
        if tenant is not self._borrowed:  # the loan ended in the meantime
            tenant.core.close()
            tenant.pool.close()
            return
        if tenant.error:
            reply(EngineFatal(error=tenant.error))
            return
        self._measuring = Measuring(tenant, started=started, now=self._clock())

    def _measure(self) -> bool:
        """Compute a step of the borrower's profile if serving can wait for it. A size
        that has waited too long for that is left out; the smallest one is measured
        then in any case.
        """
        measuring, now = self._measuring, self._clock()
        assert measuring is not None
        admission = Admission(slo=self._slo, profile=self._profile, rollout=self._profile)
        slack, idle = self._slack(admission, now), not self._serves
        fits = FIRST_MARGIN * measuring.expected_s <= slack if measuring.expected_s else idle
        if not fits and not stalled(measuring.since, now):
            return False
        profile = measuring.step(fits=fits)
        measuring.since = self._clock()
        if profile is not None:
            self._activate(measuring, profile)
        return True

    def _activate(self, measuring: Measuring, profile: Profile) -> None:
        """Begin to compute rollouts."""
        self._measuring = None
        self._admission = Admission(slo=self._slo, profile=self._profile, rollout=profile)
        now = self._clock()
        self._progress.restart(now)
        self._activation_s = now - measuring.started
        self._shared.rollouts = measuring.tenant.memory
        self._shared.begin_step()

    def _forward(self, command: EngineCommand) -> None:
        if self._borrowed is None:
            return
        if isinstance(command, Suspend) and command.release:
            self._recall(COLOCATED)
            return
        if self._admission is not None:
            if isinstance(command, Load):
                self._shared.begin_step()
            if isinstance(command, Add) and not self._borrowed.core.has_work:
                self._progress.restart(self._clock())
        self._borrowed.mailbox.post(command)

    def _recall(self, reason: str) -> None:
        """Take all pages back. The borrower's process ends, and with it the loan."""
        if self._borrowed is not None:
            self._borrowed.core.reply(EngineFatal(error=reason))
            self._drop()

    def _end(self) -> None:
        self._drop()
        with self._loan_over:
            self._loan = False
            self._loan_over.notify()

    def _drop(self) -> None:
        """Drop the borrower's model and return its pages."""
        tenant, self._borrowed = self._borrowed, None
        building = self._admission is None and self._measuring is None
        if self._measuring is not None:
            self._measuring.end()
        self._admission = self._measuring = None
        if tenant is not None:
            self._shared.rollouts = None
            self._rollout_tokens += tenant.core.output_tokens
            tenant.core.close()
            if not building or tenant.error:
                tenant.pool.close()
            del tenant
            gc.collect()

    # Rollouts

    def _roll(self) -> bool:
        """Compute a rollout step if it may run now. Return whether it did."""
        tenant, admission, now = self._borrowed, self._admission, self._clock()
        assert tenant is not None
        assert admission is not None
        core = tenant.core
        if not core.has_work:
            self._progress.restart(now)
            return False
        slack = self._slack(admission, now)
        computed = admission.admits(slack) and self._step(tenant, admission, slack)
        self._return_stalled(core)
        return computed

    def _return_stalled(self, core: EngineCore) -> None:
        """Return the rollouts that have made no progress for too long."""
        late = self._progress.stalled(core.live, self._clock())
        if late:
            self._stalls += 1
        for id in late:
            self._abort(id)

    def _step(self, tenant: Tenant, admission: Admission, slack: float) -> bool:
        """Compute a rollout step that fits in the slack. Return False if no rollout
        could have a slot and blocks.
        """
        core, memory, now = tenant.core, tenant.memory, self._clock()
        assert memory is not None
        planner = core.planner
        for _ in range(memory.missing_groups()):
            if not self._shared.grow_rollouts(now):
                break
        planner.slots = admission.slots(
            longest_s=self._longest_s(admission), most=core.spec.max_slots
        )
        sampling = sum(entry.missing == 1 for entry in planner.running)
        planner.decoding = admission.decoding(slack, most=sampling)
        planner.chunk_tokens = admission.chunk(slack, decode=planner.decoding)
        computed = bool(planner.decoding or planner.chunk_tokens) and core.step()
        if computed:
            self._rollout_steps += 1
            tokens = {entry.id: entry.computed for entry in planner.running}
            self._progress.stepped(tokens, self._clock())
        return computed

    def _watch_rollouts(self, work: StepWork, seconds: float) -> None:
        self._rollout_busy_s += seconds
        self._rollout_at = self._clock()
        if self._admission is None:
            return
        kind = StepKind.ROLLOUT_PREFILL if work.prefill_tokens else StepKind.ROLLOUT_DECODE
        profiled = self._admission.profiled_s(prompt=work.prefill_tokens, decode=work.decode)
        self._admission.corrections.measured(kind, profiled_s=profiled, seconds=seconds)

    def _abort(self, id: str) -> None:
        """Return a rollout with its tokens."""
        assert self._borrowed is not None
        self._aborted += 1
        self._borrowed.core.abort(id, FinishReason.RETURNED)

    def stats(self) -> LendingStats:
        """Return what the loan has brought and cost so far."""
        borrowed = self._borrowed
        memory = borrowed.memory if borrowed is not None else None
        return LendingStats(
            lent=borrowed is not None and self._admission is not None,
            loans=self._loans,
            budget_pages=self._shared.budget.budget,
            rollout_pages=memory.pages if memory is not None else 0,
            total_pages=self._shared.pages.total,
            pages_moved=self._shared.pages.moved,
            cuts=self._shared.budget.cuts,
            aborted=self._aborted,
            stalls=self._stalls,
            rollout_steps=self._rollout_steps,
            rollout_tokens=self._rollout_tokens
            + (borrowed.core.output_tokens if borrowed is not None else 0),
            rollout_busy_s=self._rollout_busy_s,
            rollout_age_s=self._clock() - self._rollout_at,
            delay_s=self._delay_s,
            activation_s=self._activation_s,
        )
