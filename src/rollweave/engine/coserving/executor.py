"""The co-serving executor (ROSE §4.1): a serving model, and the model of a run that
borrows what serving leaves.

One thread takes commands of both, and computes one step at a time. Serving comes first:
after each of its steps, a rollout step may follow if `core/policy/admission` finds that
every serving request can wait for it, and one that arrives in the meantime, too. Pages
follow `core/policy/kv_budget`.
"""

import time
from collections.abc import Callable
from functools import partial

import msgspec
import torch

from rollweave.core.policy.admission import Admission
from rollweave.core.policy.kv_budget import KvBudget
from rollweave.engine.batching import StepWork
from rollweave.engine.core import EngineCore
from rollweave.engine.coserving.lender import END_S, LendingEngine
from rollweave.engine.coserving.memory import (
    LEASES_S,
    MappedPool,
    ModelMemory,
    SharedPages,
    serving_pool,
)
from rollweave.engine.coserving.serving_load import FIRST_PROMPT, ServingLoad
from rollweave.engine.coserving.tenant import measure_profile
from rollweave.io.machine import device_named
from rollweave.schema.errors import ConfigError
from rollweave.schema.serving import Add, EngineCommand, EngineReply, EngineSpec, Ready

RETRY_S = 0.005
"""Seconds until a rollout step that was not admitted is considered again."""


class CoServing(LendingEngine):
    """An engine that serves, and lends what its clients leave."""

    _shared: SharedPages

    def __init__(
        self,
        spec: EngineSpec,
        reply: Callable[[EngineReply], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        budget: Callable[[int], KvBudget] = KvBudget,
        end_s: float = END_S,
    ) -> None:
        # the kernel that reads KV in place is first compared on blocks without pages
        spec = msgspec.structs.replace(spec, paged_attention=False)
        super().__init__(spec, reply, clock=clock, end_s=end_s)
        self._make_budget = budget
        self._load = ServingLoad()
        self._core = EngineCore(
            self.spec,
            self._telling(reply),
            between_steps=self._mailbox.post,
            clock=clock,
            watch=self._watch_serving,
            make_pool=partial(serving_pool, page_bytes=self.lend.page_bytes),
            doing=self._activity.begin,
        )
        """The engine of the serving model."""

    def post(self, command: EngineCommand) -> None:
        if not isinstance(command, Add):
            super().post(command)
            return
        with self._wake:
            self._load.arrive(command.request.id, self._clock())
            self._mailbox.post(command)

    def _loop(self) -> None:
        while self._mailbox.execute(self._core):
            self._take_events()
            computed = self._serve()
            # requests that have arrived meanwhile come before a rollout
            if not self._mailbox.execute(self._core):
                break
            if not self._compute_for_borrower() and not computed:
                self._wait()

    def _close(self) -> None:
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

    def _make_room(self) -> None:
        """Give the serving model the pages that its requests need."""
        if not self._shared.make_room(self._clock()) and self._borrowed is not None:
            self._recall("the serving model needs all pages")
            self._shared.make_room(self._clock())  # a model being built goes afterwards

    def _watch_serving(self, work: StepWork, seconds: float) -> None:
        if self._admission is not None:
            self._load.measured(self._admission, work, seconds)

    def _slack(self, admission: Admission, now: float) -> float:
        return self._load.slack(self._core, admission, now)

    def _longest_s(self, admission: Admission) -> float:
        return self._load.longest_s(admission)

    @property
    def _serves(self) -> bool:
        return self._core.has_work
