"""The trainer of the live world: executes the core's commands about training and says
what came of them.

Invariants: there is at most one trainer, of the newest epoch; everything it says
carries its epoch. Only after `CheckpointSaved` is in the journal are older checkpoints
removed.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from rollweave.record.store import Entry, StoreError, TrajectoryStore
from rollweave.record.trace import TRAINER, Trace
from rollweave.runtime.checkpoints import Checkpoints
from rollweave.runtime.links.trainer import TrainerBackend, TrainerLostError, TrainerRefusedError
from rollweave.runtime.tasks import Tasks
from rollweave.schema.commands import (
    GroupRef,
    MeasureRatios,
    PublishWeights,
    RestartTrainer,
    SaveCheckpoint,
    TrainStep,
)
from rollweave.schema.errors import RollweaveError
from rollweave.schema.events import (
    CheckpointCopied,
    CheckpointFailed,
    CheckpointSaved,
    Event,
    GroupRatio,
    RatiosMeasured,
    StepTrained,
    TrainerLost,
    TrainerReady,
    TrainFailed,
    WeightsPublished,
)
from rollweave.schema.training import (
    Copied,
    Measure,
    Measured,
    Publish,
    Published,
    Restore,
    Restored,
    Save,
    Saved,
    Trained,
    TrainMetrics,
    TrainOn,
)
from rollweave.schema.training import TrainFailed as Failed
from rollweave.schema.weights import WeightManifest
from rollweave.schema.work import Batch, ScoredGroup


class Post(Protocol):
    """The pump's inbox."""

    def __call__(self, event: Event, then: Callable[[], None] | None = None) -> None:
        """Queue an event; `then` follows once it is in the journal."""


class DamagedCheckpointError(TrainerLostError):
    """The trainer lives, and cannot read a checkpoint."""


class TrainerSeat:
    """`make(epoch, fresh)` starts a trainer, or raises OSError. `on_saved` follows when
    a checkpoint is in the journal.

    `on_published` is told which weights there are now, and which others the trainer
    still holds.
    """

    def __init__(
        self,
        *,
        make: Callable[[int, bool], TrainerBackend],
        tasks: Tasks,
        post: Post,
        clock: Callable[[], float],
        trace: Trace,
        store: TrajectoryStore,
        checkpoints: Checkpoints,
        on_published: Callable[[WeightManifest, Collection[int]], None],
        on_trained: Callable[[TrainStep, Batch, TrainMetrics], None],
        on_saved: Callable[[], None],
    ) -> None:
        self._make, self._tasks, self._post, self._clock, self._trace = (
            make,
            tasks,
            post,
            clock,
            trace,
        )
        self._store, self._checkpoints = store, checkpoints
        self._on_published, self._on_trained, self._on_saved = on_published, on_trained, on_saved
        self._epoch = 0
        self._backend: TrainerBackend | None = None
        self._life: asyncio.Task[None] | None = None

    def start(self, epoch: int, steps: Sequence[int] = ()) -> None:
        """Start a trainer process; from the first of these checkpoints that is good, or
        afresh. The one before it is killed.
        """
        former, self._life = self._life, None
        if self._backend is not None:
            self._backend.kill()
        self._backend, self._epoch = None, epoch
        self._life = self._tasks.spawn(self._live(epoch, steps, former), f"trainer {epoch}")

    def restart(self, command: RestartTrainer) -> None:
        self.start(
            command.epoch, [step for step in (command.step, command.fallback) if step is not None]
        )

    def train(self, command: TrainStep) -> None:
        self._tasks.spawn(self._train(self._epoch, command), f"train {command.step}.{command.part}")

    def measure(self, command: MeasureRatios) -> None:
        try:
            # now: what is in the buffer may be evicted before the task begins
            places = self._places(command.groups)
        except StoreError as error:
            self._post(
                TrainFailed(epoch=self._epoch, step=command.step, error=str(error), nonfinite=False)
            )
            return
        self._tasks.spawn(
            self._measure(self._epoch, command, places), f"measure {command.step}.{command.part}"
        )

    def publish(self, command: PublishWeights) -> None:
        self._tasks.spawn(self._publish(self._epoch, command), f"publish {command.version}")

    def save(self, command: SaveCheckpoint) -> None:
        self._tasks.spawn(self._save(self._epoch, command), f"save {command.step}")

    async def close(self) -> None:
        """End the trainer, in order if it can."""
        backend, self._backend = self._backend, None
        self._epoch = -1
        if backend is not None:
            await backend.close()

    async def _live(
        self, epoch: int, steps: Sequence[int], former: asyncio.Task[None] | None
    ) -> None:
        """One trainer from its start to its loss."""
        if former is not None:
            await asyncio.wait([former])
        started, backend = self._clock(), None
        try:
            if epoch != self._epoch:
                return
            try:
                backend = self._backend = self._make(epoch, not steps)
                await backend.ready()
                step, note = await self._restore_first(backend, steps)
            except (RollweaveError, OSError) as error:
                self._lost(
                    epoch,
                    str(error),
                    hopeless=isinstance(error, DamagedCheckpointError | TrainerRefusedError),
                )
                return
            self._trace.span(TRAINER, "trainer", "start", started, self._clock(), epoch=epoch)
            self._post(TrainerReady(epoch=epoch, step=step, note=note))
            self._lost(epoch, await asyncio.shield(backend.lost))
        finally:
            if backend is not None:
                backend.kill()

    def _lost(self, epoch: int, error: str, *, hopeless: bool = False) -> None:
        if epoch == self._epoch:
            self._post(TrainerLost(epoch=epoch, error=error, hopeless=hopeless))

    async def _restore_first(
        self, backend: TrainerBackend, steps: Sequence[int]
    ) -> tuple[int, str]:
        """Restore the first of these checkpoints that is good: its step, and what is
        wrong with those before it.
        """
        wrong: list[str] = []
        for step in steps:
            try:
                await self._restore(backend, step)
            except DamagedCheckpointError as error:
                wrong.append(str(error))
            else:
                return step, "; ".join(wrong)
        if wrong:
            raise DamagedCheckpointError("; ".join(wrong))
        return 0, ""

    async def _restore(self, backend: TrainerBackend, step: int) -> None:
        reply = await backend.ask(Restore(path=str(self._checkpoints.path(step))))
        if not isinstance(reply, Restored):
            raise DamagedCheckpointError(
                f"checkpoint of step {step} cannot be restored: {_error(reply)}"
            )

    async def _train(self, epoch: int, command: TrainStep) -> None:
        backend = self._backend
        if backend is None:
            return
        step, part = command.step, command.part
        try:
            batch = await self._batch(command)
            started = self._clock()
            reply = await backend.ask(TrainOn(batch=batch))
        except TrainerLostError:
            return  # its loss is an event of its own
        except StoreError as error:
            self._post(TrainFailed(epoch=epoch, step=step, error=str(error), nonfinite=False))
            return
        self._trace.span(
            TRAINER,
            "trainer",
            f"train {step}.{part}",
            started,
            self._clock(),
            groups=len(batch.groups),
        )
        if isinstance(reply, Trained):
            self._on_trained(command, batch, reply.metrics)
            self._post(StepTrained(epoch=epoch, step=step, part=part))
        else:
            self._failed(epoch, step, reply)

    async def _measure(self, epoch: int, command: MeasureRatios, places: Sequence[Entry]) -> None:
        backend = self._backend
        if backend is None:
            return
        step, part = command.step, command.part
        try:
            groups = await self._groups(command.groups, places)
            started = self._clock()
            reply = await backend.ask(Measure(step=step, part=part, groups=groups))
        except TrainerLostError:
            return
        self._trace.span(
            TRAINER, "trainer", f"measure {step}.{part}", started, self._clock(), groups=len(groups)
        )
        if isinstance(reply, Measured):
            ratios = [
                GroupRatio(id=group.id, ratio=ratio)
                for group, ratio in zip(groups, reply.ratios, strict=True)
            ]
            self._post(RatiosMeasured(epoch=epoch, step=step, part=part, ratios=tuple(ratios)))
        else:
            self._failed(epoch, step, reply)

    def _failed(self, epoch: int, step: int, reply: object) -> None:
        nonfinite = isinstance(reply, Failed) and reply.nonfinite
        self._post(TrainFailed(epoch=epoch, step=step, error=_error(reply), nonfinite=nonfinite))

    async def _batch(self, command: TrainStep) -> Batch:
        """The batch with its tokens."""
        groups = await self._groups(command.groups, self._places(command.groups))
        return Batch(
            step=command.step,
            version=command.step,
            part=command.part,
            parts=command.parts,
            groups=groups,
        )

    def _places(self, groups: Sequence[GroupRef]) -> list[Entry]:
        return self._store.find([member for group in groups for member in group.trajectory_ids])

    async def _groups(
        self, groups: Sequence[GroupRef], places: Sequence[Entry]
    ) -> tuple[ScoredGroup, ...]:
        """Read off the loop."""
        trajectories = iter(await asyncio.to_thread(self._store.read, places))
        return tuple(
            ScoredGroup(
                id=group.id,
                env=group.name,
                trajectories=tuple(next(trajectories) for _ in group.trajectory_ids),
            )
            for group in groups
        )

    async def _publish(self, epoch: int, command: PublishWeights) -> None:
        backend = self._backend
        if backend is None:
            return
        started = self._clock()
        try:
            if command.from_checkpoint is not None:
                await self._restore(backend, command.from_checkpoint)
            reply = await backend.ask(
                Publish(version=command.version, weights_id=command.weights_id, keep=command.keep)
            )
            if not isinstance(reply, Published):
                raise TrainerLostError(
                    f"weights version {command.version} cannot be published: {_error(reply)}"
                )
        except TrainerLostError as error:
            self._lost(epoch, str(error))
            backend.kill()
            return
        self._trace.span(TRAINER, "trainer", f"publish v{command.version}", started, self._clock())
        self._on_published(reply.manifest, command.keep)
        self._post(
            WeightsPublished(epoch=epoch, version=command.version, weights_id=command.weights_id)
        )

    async def _save(self, epoch: int, command: SaveCheckpoint) -> None:
        backend, step = self._backend, command.step
        if backend is None:
            return
        started = self._clock()
        try:
            reply = await backend.ask(
                Save(path=str(self._checkpoints.path(step)), export=command.export, background=True)
            )
        except TrainerLostError:
            return
        if isinstance(reply, Copied):
            self._trace.span(TRAINER, "trainer", f"copy {step}", started, self._clock())
            self._post(CheckpointCopied(epoch=epoch, step=step))
            try:
                reply = await backend.written()
            except TrainerLostError:
                return
        if not isinstance(reply, Saved):
            self._post(CheckpointFailed(epoch=epoch, step=step, error=_error(reply)))
            return
        self._trace.span(TRAINER, "checkpoint", f"save {step}", started, self._clock())
        self._store.sync()
        self._post(CheckpointSaved(epoch=epoch, step=step), lambda: self._saved(command))

    def _saved(self, command: SaveCheckpoint) -> None:
        """The checkpoint is in the journal: what only earlier ones needed may go."""
        self._on_saved()
        keep = {*command.keep, command.step}
        self._tasks.spawn(asyncio.to_thread(self._checkpoints.prune, keep), "prune checkpoints")


def _error(reply: object) -> str:
    return str(getattr(reply, "error", f"unexpected answer {type(reply).__name__}"))
