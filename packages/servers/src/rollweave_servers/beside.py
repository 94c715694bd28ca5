"""An engine that lends the time between the steps of another server on its device: a
vLLM with our scheduler (ROSE §5). Rollouts are computed in this process, while it holds
the baton of the server (`baton`) and `core/policy/admission` finds by the published
load that serving can wait. It serves nothing itself.

The rollouts' KV has a fixed share of memory, which is taken at the start. The server's
is its own: its use, which the run is told, decides whether the engine is lent at all.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import assert_never

import msgspec
import torch

from rollweave.core.policy.admission import Admission
from rollweave.core.policy.kv_budget import KvBudget
from rollweave.engine.coserving.lender import END_S, LendingEngine
from rollweave.engine.coserving.memory import MappedPool, ModelMemory, group_size
from rollweave.engine.pages import PagePool, driver_of
from rollweave.io.machine import computed_dtype, device_named
from rollweave.schema.errors import ConfigError
from rollweave.schema.serving import (
    Abort,
    Add,
    Beat,
    EngineCommand,
    EngineReply,
    EngineSpec,
    EngineStats,
    ExportKv,
    FinishReason,
    Generated,
    GenerateResult,
    ImportKv,
    KvRefused,
    LendingStats,
    Load,
    LoadCheckpoint,
    LoadFailed,
    Ready,
    ReleaseKv,
    Rerank,
    Resume,
    Sampled,
    Shutdown,
    Stage,
    StageFailed,
    Stats,
    Suspend,
    Suspended,
)
from rollweave.weights.checkpoint import ModelShape, read_shape
from rollweave_servers.baton import Baton
from rollweave_servers.lending.rollweave_lending import Snapshot
from rollweave_servers.published_load import PublishedLoad

RETRY_S = 0.05
"""Seconds until a rollout step that was not admitted is considered again, unless the
server makes an offer.
"""

OBSERVE_S = 0.5
"""Seconds between two looks at the server while there are no rollouts. Snapshots have
more steps than a server computes in this time.
"""


SERVES_NOTHING = "the engine serves nothing itself: ask the server beside it"


class FixedShare:
    """The memory of rollouts: as much as the KV cache of `spec` takes, and no more."""

    def __init__(self, spec: EngineSpec) -> None:
        assert spec.lend is not None
        shape, device = read_shape(Path(spec.model)), device_named(spec.device)
        driver = driver_of(device, spec.lend.page_bytes)
        size, layer_pages = group_size(
            shape,
            block_tokens=spec.block_tokens,
            dtype=getattr(torch, computed_dtype(spec.dtype, device.type)),
            page_bytes=driver.page_bytes,
        )
        groups = max(1, -(-spec.kv_tokens // (size * spec.block_tokens)))
        self.pages = PagePool(driver, groups * layer_pages * shape.layers)
        self.budget = KvBudget(self.pages.total, headroom=0.0)
        self.rollouts: ModelMemory | None = None

    def pool_for(
        self,
        shape: ModelShape,
        *,
        kv_tokens: int,
        block_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> MappedPool:
        """Return the pool of a borrower's model, whose first group has memory. Raises
        ConfigError if the share is too small for it.
        """
        size, layer_pages = group_size(
            shape,
            block_tokens=block_tokens,
            dtype=dtype,
            page_bytes=self.pages.driver.page_bytes,
        )
        group_pages = layer_pages * shape.layers
        groups = min(-(-kv_tokens // (size * block_tokens)), self.pages.total // group_pages)
        if groups < 1:
            raise ConfigError(
                f"--kv-tokens must be enough for the first {size * block_tokens} tokens of the "
                f"run's model, which take {group_pages} pages, got {self.pages.total} pages"
            )
        return MappedPool(
            self.pages,
            shape,
            groups=groups,
            block_tokens=block_tokens,
            device=device,
            dtype=dtype,
        )

    def begin_step(self) -> None:
        """Let rollouts have the whole share."""
        self.budget.begin_step(0)

    def grow_rollouts(self, now: float) -> bool:
        """Give rollouts one more group of blocks. Return whether there is one."""
        memory = self.rollouts
        assert memory is not None
        if self.pages.free < memory.pool.group_pages:
            return False
        memory.grow(now)
        return True


class BesideServing(LendingEngine):
    """An engine that lends, beside the server whose socket `spec.lend.beside` names."""

    _shared: FixedShare

    def __init__(
        self,
        spec: EngineSpec,
        reply: Callable[[EngineReply], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        end_s: float = END_S,
    ) -> None:
        super().__init__(spec, reply, clock=clock, end_s=end_s)
        self._ends = False
        self._baton: Baton | None = None
        self._observed_at = clock()

    def post(self, command: EngineCommand) -> None:
        """Answer a command of the engine's own clients, from any thread."""
        match command:
            case Stats():
                self._call(lambda: self._reply(Sampled(stats=self._engine_stats())))
            case Add(request=request):
                result = GenerateResult.empty(request.id, FinishReason.ERROR, SERVES_NOTHING)
                self._reply(Generated(result=result))
            case ExportKv(id=id) | ImportKv(id=id):
                self._reply(KvRefused(id=id, error=SERVES_NOTHING))
            case Stage(manifest=manifest):
                key = {"version": manifest.version, "publication_id": manifest.publication_id}
                self._reply(StageFailed(**key, error=SERVES_NOTHING))
            case Load(manifest=manifest):
                self._reply(LoadFailed(version=manifest.version, error=SERVES_NOTHING))
            case LoadCheckpoint(version=version):
                self._reply(LoadFailed(version=version, error=SERVES_NOTHING))
            case Suspend():
                self._reply(Suspended(in_flight=0))
            case Abort() | Rerank() | ReleaseKv() | Resume():
                pass  # there is no request or export, and nothing stands still
            case Shutdown():
                self._call(self._end_soon)
            case Beat():
                super().post(command)
            case _:
                assert_never(command)

    def _end_soon(self) -> None:
        self._ends = True

    # The thread of the executor

    def _build(self) -> Ready:
        spec = self.spec
        if device_named(spec.device).type == "cpu":
            torch.set_num_threads(spec.threads)
        self._shared = FixedShare(spec)
        self._baton = Baton(self.lend.beside, patience_s=self._slo.ttft_s, wake=self._wake)
        about = self._baton.about
        self._server = about["server"]
        self._load = PublishedLoad(self._slo, chunk_tokens=about["chunk_tokens"])
        self._profile = self._load.profile
        return Ready(
            version=-1,
            kv_total_tokens=about["kv_tokens"],
            max_slots=about["slots"],
            max_context=read_shape(Path(spec.model)).context,
        )

    def _close(self) -> None:
        if self._baton is not None:
            self._baton.close()

    def _loop(self) -> None:
        baton = self._baton
        assert baton is not None
        while not self._ends:
            signals = baton.signals
            if baton.error:
                raise ConfigError(baton.error)
            borrowed = self._borrowed
            if self._events or (borrowed is not None and borrowed.mailbox):
                baton.look_away()
            self._take_events()
            if not self._compute_for_borrower(baton):
                self._wait(baton, signals)

    def _wait(self, baton: Baton, signals: int) -> None:
        with self._wake:
            borrowed = self._borrowed
            if self._events or (borrowed is not None and borrowed.mailbox):
                return
            if baton.signals != signals:
                return
            self._activity.end()
            self._wake.wait(RETRY_S if self._has_work else OBSERVE_S)

    @property
    def _has_work(self) -> bool:
        if self._measuring is not None:
            return True
        borrowed = self._borrowed
        return borrowed is not None and self._admission is not None and borrowed.core.has_work

    def _compute_for_borrower(self, baton: Baton) -> bool:
        """Compute a rollout step, or one that measures the borrower's model, if it may
        run now. Return whether it did.
        """
        now, about = self._clock(), baton.about
        if about["server"] != self._server:
            self._server = about["server"]
            self._load.begin(chunk_tokens=about["chunk_tokens"])
            self._profile = self._load.profile
        if not self._has_work:
            self._progress.restart(now)
            baton.rest()
            if now - self._observed_at > OBSERVE_S:
                self._observed_at = now
                if (snapshot := baton.snapshot()) is not None:
                    self._observe(snapshot)
            return False
        snapshot = baton.take()
        if snapshot is None:
            if self._borrowed is not None and self._admission is not None:
                core = self._borrowed.core
                self._for_borrower(lambda: self._return_stalled(core))
            return False
        try:
            self._observe(snapshot)
            return self._for_borrower(self._roll if self._measuring is None else self._measure)
        finally:
            baton.release()

    # What the server has published

    def _observe(self, snapshot: Snapshot) -> None:
        self._load.observe(snapshot, self._admission)
        self._profile = self._load.profile

    def _slack(self, admission: Admission, now: float) -> float:
        return self._load.slack(admission, now)

    def _longest_s(self, admission: Admission) -> float:
        return self._load.longest_s(admission)

    @property
    def _serves(self) -> bool:
        return self._load.serves

    def stats(self) -> LendingStats:
        """Return what the loan has brought and cost. Rollouts may have no memory while
        the server is not there.
        """
        stats = super().stats()
        assert self._baton is not None
        snapshot = self._baton.snapshot()
        if snapshot is None:
            return msgspec.structs.replace(stats, budget_pages=0)
        return msgspec.structs.replace(stats, delay_s=snapshot.counts.waited / 1e9)

    def _engine_stats(self) -> EngineStats:
        """Return the state of the server: all of its memory counts as used while it is
        not there.
        """
        assert self._baton is not None
        snapshot = self._baton.snapshot()
        if snapshot is None:
            running = waiting = 0
            used = total = self._baton.about["kv_tokens"]
        else:
            running, waiting, used, total, _ = snapshot.counts
        return EngineStats(
            version=-1,
            running=running,
            waiting=waiting,
            kv_used_tokens=used,
            kv_total_tokens=total,
            busy_s=self._load.busy_s,
            lending=self.stats(),
        )
