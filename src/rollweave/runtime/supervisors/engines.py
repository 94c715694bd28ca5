"""The engines of the live world: executes the core's commands about engines and says
what came of them.

Invariant: an engine id has at most one living process, the one of its newest epoch;
what an earlier one still says is dropped here or carries its own epoch. Every started
epoch ends in exactly one `EngineLost`, unless we ended it ourselves.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rollweave.engine.clients.base import EngineBackend
from rollweave.record.trace import ENGINES, Trace
from rollweave.runtime.manifests import Manifests
from rollweave.runtime.tasks import Tasks
from rollweave.schema.base import EngineId
from rollweave.schema.commands import (
    LoadWeights,
    Migrate,
    RemoveEngine,
    RestartEngine,
    ResumeEngine,
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
    MigrationDone,
    WeightsLoaded,
    WeightsLoadFailed,
)
from rollweave.schema.serving import EngineStats, KvOver, LoadSaved
from rollweave.schema.weights import WeightManifest

MIGRATION_S = 10.0
"""Seconds that KV may take from engine to engine: computing it anew takes no longer.

Engines keep what they export for more.
"""


BEAT_S = 5.0
"""Seconds between two heartbeats."""
SILENCE_S = 10.0
"""Seconds that an engine has to answer one, which it does between two steps: far more
than any step takes.
"""
MISSED_BEATS = 2
"""After so many in a row it hangs.

One may be due to the whole machine having stood still.
"""


@dataclass(slots=True)
class Seat:
    """One epoch of one engine. `backend` is None until its process is started."""

    epoch: int
    degree: int
    group: int = 0
    backend: EngineBackend | None = None
    ours: bool = False  # we are ending it, so its loss is no news
    loading: bool = False  # which has a limit of its own
    closed: asyncio.Event = field(default_factory=asyncio.Event)


class Fleet:
    """All engines. `make` starts a process: (engine, epoch) → backend; it may raise
    OSError. `manifests` has their weights.

    `saved(version, weights_id)` says where a checkpoint has some: on a file system that
    all machines share.

    KV moves through memory of this host, where all engines are today, or through TCP
    (`kv_over`), within `migration_s`.
    """

    def __init__(
        self,
        *,
        make: Callable[[EngineSlot, int], EngineBackend],
        tasks: Tasks,
        post: Callable[[Event], None],
        clock: Callable[[], float],
        trace: Trace,
        manifests: Manifests | None = None,
        saved: Callable[[int, int], LoadSaved] | None = None,
        kv_over: KvOver = "shm",
        migration_s: float = MIGRATION_S,
        silence_s: float | None = None,
        beat_s: float = BEAT_S,
    ) -> None:
        """`silence_s` bounds each answer to a heartbeat; None for engines that somebody
        else watches.
        """
        self._kv_over, self._migration_s, self._silence_s, self._beat_s = (
            kv_over,
            migration_s,
            silence_s,
            beat_s,
        )
        self._make, self._tasks, self._post, self._clock, self._trace = (
            make,
            tasks,
            post,
            clock,
            trace,
        )
        self._seats: dict[EngineId, Seat] = {}
        self._manifests, self._saved = manifests or Manifests(), saved

    def start(self, seats: Iterable[EngineSlot]) -> None:
        """Start epoch 0 of each: a world begins."""
        for seat in seats:
            self._begin(seat.id, Seat(epoch=0, degree=seat.degree, group=seat.group), None)

    def add(self, command: StartEngine) -> None:
        self._begin(
            command.engine_id, Seat(epoch=0, degree=command.degree, group=command.group), None
        )

    def backend(self, engine_id: EngineId) -> EngineBackend | None:
        """The engine's living process, if it has one."""
        seat = self._seats.get(engine_id)
        return seat.backend if seat is not None else None

    def suspend(self, command: SuspendEngine) -> None:
        self._tasks.spawn(self._suspend(command.engine_id), f"suspend {command.engine_id}")

    def load(self, command: LoadWeights) -> None:
        self._tasks.spawn(self._load(command), f"load {command.engine_id}")

    def resume(self, command: ResumeEngine) -> None:
        backend = self.backend(command.engine_id)
        if backend is not None:
            backend.resume()

    def migrate(self, command: Migrate, tokens: Sequence[int] | None) -> None:
        """Copy the KV of `tokens`, all that the attempt's engine has seen; None where
        there is no such attempt.
        """
        self._tasks.spawn(self._migrate(command, tokens or ()), f"migrate {command.number}")

    def restart(self, command: RestartEngine) -> None:
        former = self._seats.get(command.engine_id)
        seat = Seat(epoch=command.epoch, degree=command.degree, group=command.group)
        self._begin(command.engine_id, seat, former)

    def remove(self, command: RemoveEngine) -> None:
        seat = self._seats.pop(command.engine_id, None)
        if seat is not None:
            seat.ours = True
            if seat.backend is not None:
                seat.backend.kill()
            self._trace.instant(ENGINES, command.engine_id, "removed", self._clock())

    async def sample(self) -> dict[EngineId, EngineStats]:
        """The state of every engine that answers."""
        found: dict[EngineId, EngineStats] = {}
        for engine_id, seat in list(self._seats.items()):
            if seat.backend is None:
                continue
            try:
                found[engine_id] = await seat.backend.stats()
            except EngineError:
                continue  # its loss is an event of its own
        return found

    async def close(self) -> None:
        """End every engine, in order if they can."""
        seats = list(self._seats.values())
        self._seats.clear()
        for seat in seats:
            seat.ours = True
        await asyncio.gather(*(seat.backend.close() for seat in seats if seat.backend is not None))

    def _begin(self, engine_id: EngineId, seat: Seat, former: Seat | None) -> None:
        self._seats[engine_id] = seat
        if former is not None:
            former.ours = True
            if former.backend is not None:
                former.backend.kill()
        self._tasks.spawn(self._live(engine_id, seat, former), f"engine {engine_id}.{seat.epoch}")

    async def _live(self, engine_id: EngineId, seat: Seat, former: Seat | None) -> None:
        """One epoch from its start to its loss."""
        try:
            if former is not None:
                await former.closed.wait()
            if seat.ours:
                return
            started = self._clock()
            try:
                seat.backend = self._make(
                    EngineSlot(id=engine_id, degree=seat.degree, group=seat.group), seat.epoch
                )
                ready = await seat.backend.ready()
            except (EngineError, OSError) as error:
                self._lost(engine_id, seat, str(error))
                return
            self._trace.span(ENGINES, engine_id, "start", started, self._clock(), epoch=seat.epoch)
            joined = EngineJoined(
                engine_id=engine_id,
                epoch=seat.epoch,
                max_slots=ready.max_slots,
                kv_total_tokens=ready.kv_total_tokens,
                version=ready.version,
                profile=ready.profile,
            )
            self._post(joined)
            self._lost(engine_id, seat, await self._hear(seat, seat.backend))
        finally:
            if seat.backend is not None:
                seat.backend.kill()
            seat.closed.set()

    async def _hear(self, seat: Seat, backend: EngineBackend) -> str:
        """Why the engine is gone, once it is.

        One that hangs may have no turn that would tell.
        """
        missed = 0
        while missed < MISSED_BEATS:
            await asyncio.wait([backend.lost], timeout=self._beat_s)
            if backend.lost.done():
                return backend.lost.result()
            if self._silence_s is None or seat.loading or await _answers(backend, self._silence_s):
                missed = 0
            else:
                missed += 1
        return f"no answer to {MISSED_BEATS} heartbeats in a row"

    def _lost(self, engine_id: EngineId, seat: Seat, error: str) -> None:
        if not seat.ours:
            self._trace.instant(ENGINES, engine_id, "lost", self._clock())
            self._post(EngineLost(engine_id=engine_id, epoch=seat.epoch, error=error))

    async def _suspend(self, engine_id: EngineId) -> None:
        seat = self._seats.get(engine_id)
        if seat is None or seat.backend is None:
            return  # its loss is on its way
        try:
            await seat.backend.suspend()
        except EngineError:
            return  # so too
        self._post(EngineSuspended(engine_id=engine_id, epoch=seat.epoch))

    async def _load(self, command: LoadWeights) -> None:
        engine_id, weights_id = command.engine_id, command.weights_id
        seat = self._seats.get(engine_id)
        if seat is None or seat.backend is None:
            return
        source: WeightManifest | LoadSaved | None
        if command.from_checkpoint is None:
            source = self._manifests.of_engine(engine_id, weights_id)
        else:
            assert self._saved is not None, "whoever has no trainer has no checkpoints"
            source = self._saved(command.from_checkpoint, weights_id)
        started = self._clock()
        seat.loading = True
        try:
            if source is None:
                raise WeightsError(f"weights {weights_id} are not there any more")
            await seat.backend.load(source)
        except WeightsError as error:
            self._post(
                WeightsLoadFailed(
                    engine_id=engine_id, epoch=seat.epoch, weights_id=weights_id, error=str(error)
                )
            )
            return
        except EngineError:
            return
        finally:
            seat.loading = False
        where = "" if command.from_checkpoint is None else " from its checkpoint"
        self._trace.span(
            ENGINES, engine_id, f"load v{command.version}{where}", started, self._clock()
        )
        self._post(
            WeightsLoaded(
                engine_id=engine_id,
                epoch=seat.epoch,
                version=command.version,
                weights_id=weights_id,
            )
        )

    async def _migrate(self, command: Migrate, tokens: Sequence[int]) -> None:
        """One migration, to its one end."""
        started, moved, error = self._clock(), 0, ""
        try:
            async with asyncio.timeout(self._migration_s):
                moved = await self._move(command, tokens)
        except TimeoutError:
            error = f"not done within {self._migration_s:g} s"
        except (EngineError, KvError) as raised:
            error = str(raised)
        name = (
            f"{moved} tokens from {command.source}"
            if not error
            else f"nothing from {command.source}"
        )
        lane, key = f"{command.target} kv", f"{command.trajectory_id}/{command.attempt}"
        self._trace.span(ENGINES, lane, name, started, self._clock(), trajectory=key, error=error)
        self._post(
            MigrationDone(
                number=command.number,
                trajectory_id=command.trajectory_id,
                attempt=command.attempt,
                moved_tokens=moved,
                error=error,
            )
        )

    async def _move(self, command: Migrate, tokens: Sequence[int]) -> int:
        """How many tokens' KV the target has now. Raises KvError, EngineError."""
        if not tokens:
            raise KvError("the attempt is over, or has not spoken yet")
        source, target = self.backend(command.source), self.backend(command.target)
        if source is None or target is None:
            raise KvError(f"{command.source if source is None else command.target} is not there")
        manifest = await source.export_kv(tokens, self._kv_over)
        try:
            moved = await target.import_kv(tokens, manifest)
        finally:
            source.release_kv(manifest.id)
        if self.backend(command.target) is not target or target.lost.done():
            raise KvError(f"{command.target} has ended meanwhile")
        return moved


async def _answers(backend: EngineBackend, silence_s: float) -> bool:
    """False where it is silent. What is gone says so by itself."""
    try:
        async with asyncio.timeout(silence_s):
            await backend.stats()
    except TimeoutError:
        return False
    except EngineError:
        pass
    return True
