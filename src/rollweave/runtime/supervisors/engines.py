"""Execute the core's commands about engines, and report the results.

Invariants: those of `runtime/supervisors/supervisor.py`; an event about an engine
carries the epoch of the process that caused it; a manifest of weights is listed while
they are in memory, as far as reported, and an engine refuses weights that vanished
without a report.
"""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rollweave.engine.clients.base import Beats, Generates, MovesKv, TakesWeights
from rollweave.record.trace import ENGINES, Trace
from rollweave.runtime.hosts.hosts import Hosts, hosts_here
from rollweave.runtime.supervisors.supervisor import Supervised, TracedSupervisor
from rollweave.runtime.tasks import Tasks
from rollweave.schema.base import EngineId
from rollweave.schema.commands import (
    LoadWeights,
    Migrate,
    RemoveEngine,
    RestartEngine,
    ResumeEngine,
    StageWeights,
    StartEngine,
    SuspendEngine,
)
from rollweave.schema.errors import EngineError, KvError, WeightsError
from rollweave.schema.events import (
    EngineJoined,
    EngineLost,
    EngineSlot,
    EngineSuspended,
    Event,
    KvReported,
    MigrationDone,
    StagingFailed,
    WeightsLoaded,
    WeightsLoadFailed,
    WeightsStaged,
)
from rollweave.schema.serving import Beating, EngineStats, KvTransport, LoadCheckpoint, Ready
from rollweave.schema.weights import WeightManifest

MIGRATION_S = 10.0
"""Maximum duration of a KV migration, in seconds: recomputing the KV takes no longer.

Engines keep an export for longer than this.
"""

HEARTBEAT_S = 5.0
"""Seconds between two heartbeats."""

REPLY_S = 10.0
"""Maximum time to the reply to a heartbeat, in seconds.

A process replies whatever its engine computes, except while code holds its interpreter.
"""

SLOW_S = 30.0
"""Minimum of the seconds that one step of an engine, or its silence, may last: half as
long as a turn may take, so that an engine that hangs is lost with its turns.
"""

MISSED_HEARTBEATS = 2
"""Minimum number of unanswered heartbeats in a row after which an engine counts as
hung.

A single one may be missed because the whole machine stood still.
"""


class Manifests:
    """Locates weights for engines: in the trainer's memory or, if there are relays
    (`relayed`), in the memory of the relay on the engine's host (Laminar §4).
    """

    def __init__(self, *, relayed: bool = False) -> None:
        self._relayed = relayed
        self._trainer: dict[int, WeightManifest] = {}
        self._part_hosts: dict[int, tuple[int, ...]] = {}
        self._relays: dict[int, dict[int, WeightManifest]] = {}

    def published(
        self, manifest: WeightManifest, keep: Collection[int], part_hosts: Sequence[int] = ()
    ) -> None:
        """Record that the trainer has these weights in memory and, of its others, those
        in `keep`. If they are in parts, each is on one of `part_hosts`.
        """
        self._part_hosts[manifest.publication_id] = tuple(part_hosts)
        self._trainer = {
            publication_id: other
            for publication_id, other in self._trainer.items()
            if publication_id in keep
        }
        self._trainer[manifest.publication_id] = manifest
        self._part_hosts = {held: self._part_hosts[held] for held in self._trainer}

    def part_hosts(self, publication_id: int) -> tuple[int, ...]:
        """Return the host of each part of weights in the trainer's memory; empty if
        they are not in parts.
        """
        return self._part_hosts.get(publication_id, ())

    def of_trainer(self, publication_id: int) -> WeightManifest | None:
        """Return the manifest of weights in the trainer's memory."""
        return self._trainer.get(publication_id)

    def anywhere(self, publication_id: int) -> WeightManifest | None:
        """Return a manifest from any place: places differ in the location only."""
        places = (self._trainer, *self._relays.values())
        return next((place[publication_id] for place in places if publication_id in place), None)

    def add(self, host: int, manifest: WeightManifest) -> None:
        """Record that a host's relay has these weights in memory."""
        self._relays.setdefault(host, {})[manifest.publication_id] = manifest

    def keep(self, host: int, publication_ids: Collection[int]) -> None:
        """Record that a host's relay keeps only these of its weights."""
        self._relays[host] = {
            publication_id: manifest
            for publication_id, manifest in self._relays.get(host, {}).items()
            if publication_id in publication_ids
        }

    def on_host(self, host: int, publication_id: int) -> WeightManifest | None:
        """Return the manifest that an engine of this host reads; None if it cannot get
        these weights.
        """
        place = self._relays.get(host, {}) if self._relayed else self._trainer
        return place.get(publication_id)


@dataclass(slots=True, eq=False, kw_only=True)
class EngineProcess(Supervised[Generates]):
    """One epoch of one engine."""

    slot: EngineSlot
    loading: bool = False
    """True while weights are loaded, which has its own time limit in the core."""


class EngineSupervisor(TracedSupervisor[EngineProcess, Ready]):
    """All engines of a world.

    `make(slot, epoch)` starts a process, and may raise OSError. `manifests` locates
    weights in memory; `checkpoint(version, publication_id)` locates those of a
    checkpoint, on a file system that all hosts share. KV migrates through shared memory
    between engines on one machine and through TCP between others, unless `kv_over` is
    given; a migration takes at most `migration_s` seconds.
    """

    category = ENGINES

    def __init__(
        self,
        *,
        make: Callable[[EngineSlot, int], Generates],
        tasks: Tasks,
        post: Callable[[Event], None],
        clock: Callable[[], float],
        trace: Trace,
        manifests: Manifests | None = None,
        checkpoint: Callable[[int, int], LoadCheckpoint] | None = None,
        hosts: Hosts | None = None,
        kv_over: KvTransport | None = None,
        migration_s: float = MIGRATION_S,
        reply_s: float | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        slow_s: float = SLOW_S,
        reports_kv: bool = False,
    ) -> None:
        """`reply_s` limits the reply to a heartbeat; None if another component monitors
        the engines. `slow_s` limits one step of an engine, and its silence. With
        `reports_kv`, the KV that engines have in use is posted.
        """
        super().__init__(tasks=tasks, post=post, clock=clock, trace=trace)
        self._make = make
        self._manifests, self._checkpoint = manifests or Manifests(), checkpoint
        self._hosts = hosts if hosts is not None else hosts_here(0)
        self._kv_over, self._migration_s = kv_over, migration_s
        self._reply_s, self._heartbeat_s, self._slow_s = reply_s, heartbeat_s, slow_s
        self._reports_kv = reports_kv

    def start(self, slots: Iterable[EngineSlot]) -> None:
        """Start epoch 0 of each engine, at the beginning of a life."""
        for slot in slots:
            self._begin_at(slot)

    def add(self, command: StartEngine) -> None:
        self._begin_at(_slot(command))

    def restart(self, command: RestartEngine) -> None:
        self._begin_at(_slot(command), epoch=command.epoch)

    def remove(self, command: RemoveEngine) -> None:
        if self._remove(command.engine_id) is not None:
            self._mark(command.engine_id, "removed")

    def backend(self, engine_id: EngineId) -> Generates | None:
        """Return the engine's living process, if it has one."""
        engine = self._processes.get(engine_id)
        return engine.link if engine is not None else None

    def suspend(self, command: SuspendEngine) -> None:
        self._give(self._suspend, command, f"suspend {command.engine_id}")

    def stage(self, command: StageWeights) -> None:
        self._give(self._stage, command, f"stage {command.engine_id}")

    def load(self, command: LoadWeights) -> None:
        self._give(self._load, command, f"load {command.engine_id}")

    def resume(self, command: ResumeEngine) -> None:
        if (link := self.backend(command.engine_id)) is not None:
            assert isinstance(link, TakesWeights), f"{command.engine_id} takes no weights"
            link.resume()

    def _give(
        self,
        handle: Callable[..., Coroutine[Any, Any, None]],
        command: SuspendEngine | StageWeights | LoadWeights,
        name: str,
    ) -> None:
        """Let an engine, if it lives, execute a command about its weights by
        `handle(engine, link, command)`. If it is lost meanwhile, its loss is posted
        separately.
        """

        async def execute() -> None:
            engine = self._processes.get(command.engine_id)
            if engine is None or engine.link is None:
                return
            assert isinstance(engine.link, TakesWeights), f"{engine.name} takes no weights"
            with contextlib.suppress(EngineError):
                await handle(engine, engine.link, command)

        self._tasks.spawn(execute(), name)

    def migrate(self, command: Migrate, tokens: Sequence[int] | None) -> None:
        """Copy the KV of `tokens`, the attempt's whole context; None if the attempt is
        over.
        """
        self._tasks.spawn(self._migrate(command, tokens or ()), f"migrate {command.number}")

    async def sample(self) -> dict[EngineId, EngineStats]:
        """Return the statistics of every engine that replies."""
        stats: dict[EngineId, EngineStats] = {}
        for engine in list(self._processes.values()):
            if engine.link is None:
                continue
            try:
                stats[engine.slot.id] = await engine.link.stats()
            except EngineError:
                continue  # its loss is an event by itself
        return stats

    def _begin_at(self, slot: EngineSlot, epoch: int = 0) -> None:
        self._begin(EngineProcess(name=slot.id, epoch=epoch, slot=slot))

    async def _open(self, engine: EngineProcess) -> Ready:
        engine.link = self._make(engine.slot, engine.epoch)
        return await engine.link.ready()

    def _on_ready(self, engine: EngineProcess, ready: Ready) -> None:
        super()._on_ready(engine, ready)
        joined = EngineJoined(
            engine_id=engine.slot.id,
            epoch=engine.epoch,
            max_slots=ready.max_slots,
            kv_total_tokens=ready.kv_total_tokens,
            version=ready.version,
            profile=ready.profile,
            stages=ready.stages,
            moves_kv=ready.moves_kv,
            preempts=ready.preempts,
            lent=ready.lent,
        )
        self._post(joined)

    async def _until_lost(self, engine: EngineProcess) -> str:
        """Send heartbeats until the engine is lost or hangs, and return the reason.

        The loss of a process is known at once. One that lives is slow until it has been
        silent, or in one step, for `slow_s`: an engine may hang while it has no turn
        whose timeout would show it.
        """
        backend, reply_s = engine.link, self._reply_s
        if reply_s is None or not isinstance(backend, Beats):
            return await super()._until_lost(engine)
        most = max(MISSED_HEARTBEATS, math.ceil(self._slow_s / (reply_s + self._heartbeat_s)))
        missed, known = 0, None
        while missed < most:
            await asyncio.wait([backend.lost], timeout=self._heartbeat_s)
            if backend.lost.done():
                return backend.lost.result()
            beating = Beating() if engine.loading else await _beating(backend, reply_s)
            missed = missed + 1 if beating is None else 0
            used = beating.kv_used if beating is not None and self._reports_kv else None
            if used is not None and (used or known):  # an idle engine is journaled once
                self._post(KvReported(engine_id=engine.slot.id, epoch=engine.epoch, used=used))
            known = used
            if beating is not None and beating.for_s > self._slow_s:
                return f"{beating.doing} takes more than {self._slow_s:g} s"
        return f"no answer to {most} heartbeats in a row"

    def _on_lost(self, engine: EngineProcess, error: Exception | str) -> None:
        super()._on_lost(engine, error)
        self._post(EngineLost(engine_id=engine.slot.id, epoch=engine.epoch, error=str(error)))

    async def _suspend(
        self, engine: EngineProcess, link: TakesWeights, command: SuspendEngine
    ) -> None:
        await link.suspend(release=command.release)
        self._post(EngineSuspended(engine_id=engine.slot.id, epoch=engine.epoch))

    async def _stage(
        self, engine: EngineProcess, link: TakesWeights, command: StageWeights
    ) -> None:
        engine_id, publication_id = command.engine_id, command.publication_id
        manifest = self._manifests.on_host(engine.slot.host, publication_id)
        started = self._clock()
        staging = None if manifest is None else link.stage(manifest)
        if not await self._finish(staging, engine, publication_id, StagingFailed):
            return
        self._span(f"{engine_id} weights", f"v{command.version}", started)
        self._post(
            WeightsStaged(engine_id=engine_id, epoch=engine.epoch, publication_id=publication_id)
        )

    async def _load(self, engine: EngineProcess, link: TakesWeights, command: LoadWeights) -> None:
        engine_id, publication_id = command.engine_id, command.publication_id
        source = self._source(engine.slot.host, command)
        started = self._clock()
        engine.loading = True
        try:
            loading = None if source is None else link.load(source)
            if not await self._finish(loading, engine, publication_id, WeightsLoadFailed):
                return
        finally:
            engine.loading = False
        where = "" if command.from_checkpoint is None else " from its checkpoint"
        self._span(engine_id, f"load v{command.version}{where}", started)
        self._post(
            WeightsLoaded(
                engine_id=engine_id,
                epoch=engine.epoch,
                version=command.version,
                publication_id=publication_id,
            )
        )

    def _source(self, host: int, command: LoadWeights) -> WeightManifest | LoadCheckpoint | None:
        """Return where an engine on `host` reads the weights, or None if they are
        gone.
        """
        if command.from_checkpoint is None:
            return self._manifests.on_host(host, command.publication_id)
        assert self._checkpoint is not None, "a world without a trainer has no checkpoints"
        return self._checkpoint(command.from_checkpoint, command.publication_id)

    async def _finish(
        self,
        giving: Awaitable[None] | None,
        engine: EngineProcess,
        publication_id: int,
        failed: type[StagingFailed] | type[WeightsLoadFailed],
    ) -> bool:
        """Wait until an engine has received weights; return False if it has not.

        `giving` is None if the weights are gone. Post `failed` in this case, and if the
        engine refuses them. Raises EngineError if the engine is lost.
        """
        try:
            if giving is None:
                raise WeightsError(f"weights {publication_id} are no longer available")
            await giving
        except WeightsError as error:
            self._post(
                failed(
                    engine_id=engine.slot.id,
                    epoch=engine.epoch,
                    publication_id=publication_id,
                    error=str(error),
                )
            )
            return False
        return True

    async def _migrate(self, command: Migrate, tokens: Sequence[int]) -> None:
        """Run one migration, and report its one result."""
        started, moved, error = self._clock(), 0, ""
        try:
            async with asyncio.timeout(self._migration_s):
                moved = await self._copy_kv(command, tokens)
        except TimeoutError:
            error = f"not done within {self._migration_s:g} s"
        except (EngineError, KvError) as raised:
            error = str(raised)
        name = (
            f"{moved} tokens from {command.source}"
            if not error
            else f"nothing from {command.source}"
        )
        key = f"{command.trajectory_id}/{command.attempt}"
        self._span(f"{command.target} kv", name, started, trajectory=key, error=error)
        self._post(
            MigrationDone(
                number=command.number,
                trajectory_id=command.trajectory_id,
                attempt=command.attempt,
                moved_tokens=moved,
                error=error,
            )
        )

    def _kv_between(self, source: EngineId, target: EngineId) -> KvTransport:
        first, second = self._processes.get(source), self._processes.get(target)
        near = (
            first is not None
            and second is not None
            and self._hosts.share_memory(first.slot.host, second.slot.host)
        )
        return "shm" if near else "tcp"

    async def _copy_kv(self, command: Migrate, tokens: Sequence[int]) -> int:
        """Return the number of tokens whose KV the target now has.

        Raises KvError, EngineError.
        """
        if not tokens:
            raise KvError("the attempt is over, or has sampled nothing yet")
        source, target = self.backend(command.source), self.backend(command.target)
        if source is None or target is None:
            raise KvError(f"{command.source if source is None else command.target} is not running")
        assert isinstance(source, MovesKv), f"{command.source} moves no KV"
        assert isinstance(target, MovesKv), f"{command.target} moves no KV"
        over = self._kv_over or self._kv_between(command.source, command.target)
        manifest = await source.export_kv(tokens, over)
        try:
            moved = await target.import_kv(tokens, manifest)
        except BaseException as error:
            source.release_kv(manifest.id, abandoned=not isinstance(error, KvError))
            raise
        source.release_kv(manifest.id)
        if self.backend(command.target) is not target or target.lost.done():
            raise KvError(f"{command.target} ended during the migration")
        return moved


def _slot(command: StartEngine | RestartEngine) -> EngineSlot:
    return EngineSlot(
        id=command.engine_id,
        degree=command.degree,
        group=command.group,
        host=command.host,
        devices=command.devices,
    )


async def _beating(backend: Beats, reply_s: float) -> Beating | None:
    """Return what the engine is doing, None if it does not reply in time.

    A lost engine counts as replying: its loss is reported by itself.
    """
    try:
        async with asyncio.timeout(reply_s):
            return await backend.beat()
    except TimeoutError:
        return None
    except EngineError:
        return Beating()
