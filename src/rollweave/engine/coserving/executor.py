"""The co-serving executor (ROSE §4.1): a serving model, and the model of a run that
borrows what serving leaves.

One thread takes commands of both, and computes one step at a time. Serving comes first:
after each of its steps, a rollout step may follow if `core/policy/admission` finds that
every serving request can wait for it, and one that arrives in the meantime, too. Pages
follow `core/policy/kv_budget`. A rollout that must go is aborted and keeps its tokens:
the run continues it elsewhere. The borrower's model is read beside the steps, on
a thread that yields to them, measured between them where serving can wait, and lost
without a trace when its connection ends.
"""

import gc
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

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
from rollweave.engine.coserving.memory import (
    LEASES_S,
    MappedPool,
    ModelMemory,
    SharedPages,
    serving_pool,
)
from rollweave.engine.coserving.serving_load import FIRST_PROMPT, ServingLoad
from rollweave.engine.coserving.tenant import Measuring, Tenant, measure_profile
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

RETRY_S = 0.005
"""Seconds until a rollout step that was not admitted is considered again."""

COLOCATED = (
    "trainer.colocated must be false with an engine that is lent: it gives its memory back to the "
    "serving model alone, got true"
)

END_S = 5.0
"""Maximum seconds for a former loan to end before another one is refused."""


class CoServing:
    """An engine that lends. `post` queues a command for the serving model, from any
    thread; `run` blocks until `Shutdown`.
    """

    def __init__(
        self,
        spec: EngineSpec,
        reply: Callable[[EngineReply], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        budget: Callable[[int], KvBudget] = KvBudget,
        end_s: float = END_S,
    ) -> None:
        assert spec.lend is not None, "an engine that does not lend"
        # the kernel that reads KV in place is first compared on blocks without pages
        self.spec = msgspec.structs.replace(spec, paged_attention=False)
        self.lend, self._reply, self._clock = spec.lend, reply, clock
        self._make_budget = budget
        self._slo = Slo(ttft_s=spec.lend.ttft_s, tpot_s=spec.lend.tpot_s)
        self._wake = threading.Condition()
        self._activity = Activity(clock)
        self._events: deque[Callable[[], None]] = deque()
        """Calls that the loan needs on the executor's thread."""
        self._load = ServingLoad()
        self._borrowed: Tenant | None = None
        self._loan, self._loan_over = False, threading.Condition()
        self._end_s = end_s
        self._admission: Admission | None = None
        self._measuring: Measuring | None = None
        self._progress = Progress()
        self._aborted = self._stalls = self._loans = self._rollout_steps = 0
        self._rollout_tokens = 0
        self._rollout_busy_s = self._delay_s = self._activation_s = 0.0
        self._rollout_at = clock()
        self._mailbox = Mailbox(self._wake)
        self._core = EngineCore(
            self.spec,
            self._telling(reply),
            between_steps=self._mailbox.post,
            clock=clock,
            watch=self._watch_serving,
            make_pool=partial(serving_pool, page_bytes=spec.lend.page_bytes),
            doing=self._activity.begin,
        )
        """The engine of the serving model."""

    # Calls of other threads

    def post(self, command: EngineCommand) -> None:
        """Queue a command of the serving model's clients. A heartbeat is answered at
        once.
        """
        if isinstance(command, Beat):
            self._reply(self.beating())
            return
        with self._wake:
            if isinstance(command, Add):
                self._load.arrive(command.request.id, self._clock())
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
        """Build the serving model, lend at the socket, and serve."""
        try:
            ready = self._build()
            # the end of a loan collects the garbage of its model, not all objects
            gc.freeze()
            listener = LendingSocket(self.lend.socket, self)
        except Exception as error:
            self._reply(EngineFatal(error=f"{type(error).__name__}: {error}"))
            return
        self._reply(ready)
        try:
            with torch.inference_mode():
                while self._mailbox.execute(self._core):
                    self._take_events()
                    computed = self._serve()
                    # requests that have arrived meanwhile come before a rollout
                    if not self._mailbox.execute(self._core):
                        break
                    if not self._compute_for_borrower() and not computed:
                        self._wait()
        except Exception as error:
            self._reply(EngineFatal(error=f"{type(error).__name__}: {error}"))
        finally:
            listener.close()
            self._end()
            self._core.close()

    def _build(self) -> Ready:
        if device_named(self.spec.device).type == "cpu":
            torch.set_num_threads(self.spec.threads)
        ready, pool, planner = self._core.build(), self._core.runner.pool, self._core.planner
        assert isinstance(pool, MappedPool)
        with torch.inference_mode():
            self._profile = profile = measure_profile(
                self._core.runner,
                blocks=pool.group_blocks,
                slots=self.spec.max_slots,
            )
        memory = ModelMemory(pool, planner.ledger, planner)
        for name, limit, alone in (
            (
                "--ttft-ms",
                self._slo.ttft_s,
                profile.chunked.seconds(FIRST_PROMPT),
            ),
            ("--tpot-ms", self._slo.tpot_s, profile.decode.seconds(1)),
        ):
            if limit <= alone:
                raise ConfigError(
                    f"{name} must be more than the {1e3 * alone:.1f} ms that the engine takes "
                    f"alone, got {1e3 * limit:g}"
                )
        self._shared = SharedPages(
            pool.pages,
            self._make_budget(pool.pages.total),
            memory,
            abort=self._abort,
            now=self._clock(),
        )
        return ready

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

    def _wait(self) -> None:
        with self._wake:
            if self._events or self._mailbox:
                return
            borrowed = self._borrowed
            waits = self._core.has_work or self._measuring is not None
            timeout = RETRY_S if waits else None
            if borrowed is not None and self._admission is not None:
                if borrowed.mailbox:
                    return
                timeout = RETRY_S if borrowed.core.has_work else LEASES_S
            self._activity.end()
            self._wake.wait(timeout)

    def _serve(self) -> bool:
        """Compute a serving step, if there is one. Return whether there was."""
        if self._borrowed is not None and self._admission is not None:
            self._for_borrower(lambda: self._shared.keep(self._clock()))
        if not self._core.has_work:
            return False
        self._make_room()
        computed = self._core.step()
        self._load.stepped(self._core, self._clock())
        return computed

    def _compute_for_borrower(self) -> bool:
        """Compute a rollout step, or one that measures the borrower's model, if it may
        run now. Return whether it did.
        """
        if self._measuring is not None:
            work = self._measure
        elif self._borrowed is not None and self._admission is not None:
            work = self._roll
        else:
            return False
        began = self._clock()
        with self._wake:
            waits = self._core.has_work or bool(self._mailbox)
            self._load.await_arrival()
        computed = self._for_borrower(work)
        if computed:
            since = began if waits else self._load.first_arrival
            self._delay_s += max(0.0, self._clock() - since)
        return computed

    # Serving

    def _make_room(self) -> None:
        """Give the serving model the pages that its requests need."""
        if not self._shared.make_room(self._clock()) and self._borrowed is not None:
            self._recall("the serving model needs all pages")
            self._shared.make_room(self._clock())  # a model being built goes afterwards

    def _watch_serving(self, work: StepWork, seconds: float) -> None:
        if self._admission is not None:
            self._load.measured(self._admission, work, seconds)

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
        slack = self._load.slack(self._core, admission, now)
        idle = not self._core.has_work
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
        slack = self._load.slack(self._core, admission, now)
        computed = admission.admits(slack) and self._step(tenant, admission, slack)
        late = self._progress.stalled(core.live, self._clock())
        if late:
            self._stalls += 1
        for id in late:
            self._abort(id)
        return computed

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
            longest_s=self._load.longest_s(admission), most=core.spec.max_slots
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
