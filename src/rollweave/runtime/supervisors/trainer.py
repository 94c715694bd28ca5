"""Execute the core's commands about training, and report the results.

Invariants: those of `runtime/supervisors/supervisor.py`; every event carries the epoch
of the trainer that caused it; a checkpoint gets its name only while the epoch that has
written it is the present one; older checkpoints are removed only once `CheckpointSaved`
is in the journal.
"""

import asyncio
import contextlib
import functools
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rollweave.record.store import StoredAttempt, StoreError, TrajectoryStore
from rollweave.record.trace import TRAINER, Trace
from rollweave.runtime.checkpoints import Checkpoints
from rollweave.runtime.pump import PostEvent
from rollweave.runtime.supervisors.stored_batches import (
    SEEN_S,
    StoredBatch,
    StoredGroup,
    member_of,
)
from rollweave.runtime.supervisors.supervisor import Supervised, TracedSupervisor
from rollweave.runtime.supervisors.trainer_link import (
    TrainerBackend,
    TrainerLostError,
    TrainerRefusedError,
)
from rollweave.runtime.tasks import Tasks
from rollweave.schema.commands import (
    GroupRef,
    MeasureGroups,
    PublishWeights,
    RestartTrainer,
    SaveCheckpoint,
    TrainStep,
)
from rollweave.schema.events import (
    CheckpointCopied,
    CheckpointFailed,
    CheckpointSaved,
    GroupMeasures,
    GroupsMeasured,
    StepTrained,
    TrainerLost,
    TrainerReady,
    TrainFailed,
    WeightsPublished,
)
from rollweave.schema.hosts import RankSlot
from rollweave.schema.training import (
    Copied,
    Measured,
    Publish,
    Published,
    Restore,
    Restored,
    Save,
    Saved,
    Trained,
    TrainMetrics,
)
from rollweave.schema.training import TrainFailed as Failed
from rollweave.schema.weights import WeightManifest
from rollweave.schema.work import Batch, ScoredGroup

TRAINER_NAME = "trainer"


MakeTrainer = Callable[[int, bool, Sequence[RankSlot]], TrainerBackend]
"""Start epoch `epoch` of the trainer, `fresh` or to be restored, with a rank at each
place. Raises OSError.
"""


class DamagedCheckpointError(TrainerLostError):
    """The trainer is alive but cannot read a checkpoint."""


@dataclass(slots=True, eq=False, kw_only=True)
class TrainerProcess(Supervised[TrainerBackend]):
    """One epoch of the trainer."""

    ranks: Sequence[RankSlot]
    steps: Sequence[int] = ()
    """Steps of the checkpoints to restore from, best first; none for a fresh start."""


class TrainerSupervisor(TracedSupervisor[TrainerProcess, tuple[int, str]]):
    """The trainer of a world.

    `make(epoch, fresh, ranks)` starts its ranks, and may raise OSError. `on_published`
    receives new weights, the ids of the older ones that the trainer keeps, and the host
    of each of their parts; `on_saved` is called once a checkpoint is in the journal.
    """

    category = TRAINER

    def __init__(
        self,
        *,
        make: MakeTrainer,
        tasks: Tasks,
        post: PostEvent,
        clock: Callable[[], float],
        trace: Trace,
        store: TrajectoryStore,
        checkpoints: Checkpoints,
        on_published: Callable[[WeightManifest, Collection[int], Sequence[int]], None],
        on_trained: Callable[[TrainStep, Batch, TrainMetrics], None],
        on_saved: Callable[[], None],
        warn: Callable[[str], None] = lambda line: None,
        shared: bool = False,
    ) -> None:
        """With `shared`, ranks on other hosts read the store: its records must be on
        the disk before they do. `warn` shows a line to the user.
        """
        super().__init__(tasks=tasks, post=post, clock=clock, trace=trace)
        self._shared = shared
        self._make, self._post_then = make, post
        self._store, self._checkpoints = store, checkpoints
        self._on_published, self._on_trained, self._on_saved = on_published, on_trained, on_saved
        self._warn = warn
        self._accepting = asyncio.Lock()
        """Held while a checkpoint gets its name. No epoch begins meanwhile, so that
        none finds what it restores changed by an earlier one.
        """

    def start(
        self, epoch: int, steps: Sequence[int] = (), *, ranks: Sequence[RankSlot] = (RankSlot(),)
    ) -> None:
        """Start a trainer from the first of these checkpoints that can be read, or
        afresh without any.

        The former process is killed.
        """
        self._begin(TrainerProcess(name=TRAINER_NAME, epoch=epoch, steps=steps, ranks=ranks))

    def restart(self, command: RestartTrainer) -> None:
        self.start(
            command.epoch,
            [step for step in (command.step, command.fallback) if step is not None],
            ranks=command.ranks or (RankSlot(),),
        )

    def train(self, command: TrainStep) -> None:
        self._spawn(self._train, command, f"train {command.step}.{command.part}")

    def measure(self, command: MeasureGroups) -> None:
        trainer = self._processes.get(TRAINER_NAME)
        if trainer is None:
            return
        try:
            # now: groups may be evicted from the buffer before the task begins
            entries = self._entries(command.groups)
        except StoreError as error:
            self._post_failure(trainer, command.step, error)
            return
        measure = functools.partial(self._measure, entries=entries)
        self._spawn(measure, command, f"measure {command.step}.{command.part}")

    def publish(self, command: PublishWeights) -> None:
        self._spawn(self._publish, command, f"publish {command.version}")

    def save(self, command: SaveCheckpoint) -> None:
        self._spawn(self._save, command, f"save {command.step}")

    def _spawn(
        self, handle: Callable[..., Coroutine[Any, Any, None]], command: object, name: str
    ) -> None:
        """Let the present trainer, if it runs, execute a command by
        `handle(trainer, backend, command)`, unless it is lost meanwhile.
        """
        trainer = self._processes.get(TRAINER_NAME)

        async def execute() -> None:
            if trainer is None or trainer.link is None or trainer.retired:
                return
            with contextlib.suppress(TrainerLostError):  # its loss is an event by itself
                await handle(trainer, trainer.link, command)

        self._tasks.spawn(execute(), name)

    async def _open(self, trainer: TrainerProcess) -> tuple[int, str]:
        async with self._accepting:
            pass  # a checkpoint of an earlier epoch may be getting its name
        trainer.link = self._make(trainer.epoch, not trainer.steps, trainer.ranks)
        await trainer.link.ready()
        return await self._restore_first(trainer.link, trainer.steps)

    def _on_ready(self, trainer: TrainerProcess, restored: tuple[int, str]) -> None:
        super()._on_ready(trainer, restored)
        step, note = restored
        self._post(TrainerReady(epoch=trainer.epoch, step=step, note=note))

    def _on_lost(self, trainer: TrainerProcess, error: Exception | str) -> None:
        hopeless = isinstance(error, DamagedCheckpointError | TrainerRefusedError)
        self._post(TrainerLost(epoch=trainer.epoch, error=str(error), hopeless=hopeless))

    async def _restore_first(
        self, backend: TrainerBackend, steps: Sequence[int]
    ) -> tuple[int, str]:
        """Restore the first of these checkpoints that can be read. Return its step, and
        the errors of those before it.
        """
        errors: list[str] = []
        for step in steps:
            try:
                await self._restore(backend, step)
            except DamagedCheckpointError as error:
                errors.append(str(error))
            else:
                return step, "; ".join(errors)
        if errors:
            raise DamagedCheckpointError("; ".join(errors))
        return 0, ""

    async def _restore(self, backend: TrainerBackend, step: int) -> None:
        reply = await backend.ask(Restore(path=str(self._checkpoints.path(step))))
        if not isinstance(reply, Restored):
            raise DamagedCheckpointError(
                f"checkpoint of step {step} cannot be restored: {_error(reply)}"
            )

    async def _train(
        self, trainer: TrainerProcess, backend: TrainerBackend, command: TrainStep
    ) -> None:
        step, part = command.step, command.part
        try:
            entries = self._entries(command.groups)
        except StoreError as error:
            self._post_failure(trainer, step, error)
            return
        stored = self._stored(command, entries, parts=command.parts)
        started = self._clock()
        # the controller reads the batch for metrics; a damaged store ends the run here
        reply, batch = await asyncio.gather(backend.ask(stored), self._read(command, entries))
        self._span("trainer", f"train {step}.{part}", started, groups=len(stored.groups))
        if isinstance(reply, Trained):
            sizes = {"batch_bytes": stored.nbytes, "sent_bytes": backend.bytes_of(stored)}
            metrics = msgspec.structs.replace(reply.metrics, values=reply.metrics.values | sizes)
            self._on_trained(command, batch, metrics)
            self._post(StepTrained(epoch=trainer.epoch, step=step, part=part))
        else:
            self._post_failure(trainer, step, reply)

    async def _measure(
        self,
        trainer: TrainerProcess,
        backend: TrainerBackend,
        command: MeasureGroups,
        *,
        entries: Sequence[StoredAttempt],
    ) -> None:
        step, part, groups = command.step, command.part, command.groups
        started = self._clock()
        stored = self._stored(command, entries, parts=part + 1, measure=True)
        reply = await backend.ask(stored)
        self._span("trainer", f"measure {step}.{part}", started, groups=len(groups))
        if isinstance(reply, Measured):
            measured = tuple(
                GroupMeasures(id=group.id, measures=measures)
                for group, measures in zip(groups, reply.groups, strict=True)
            )
            self._post(GroupsMeasured(epoch=trainer.epoch, step=step, part=part, groups=measured))
        else:
            # a damaged store ends the run here: no other trainer could read it
            await asyncio.to_thread(self._store.read, entries)
            self._post_failure(trainer, step, reply)

    def _post_failure(self, trainer: TrainerProcess, step: int, reply: object) -> None:
        nonfinite = isinstance(reply, Failed) and reply.nonfinite
        self._post(
            TrainFailed(epoch=trainer.epoch, step=step, error=_error(reply), nonfinite=nonfinite)
        )

    def _entries(self, groups: Sequence[GroupRef]) -> list[StoredAttempt]:
        """Look the trajectories up in the store. Raises StoreError."""
        return self._store.find([member for group in groups for member in group.trajectory_ids])

    async def _read(self, command: TrainStep, entries: Sequence[StoredAttempt]) -> Batch:
        """Read the batch with its tokens, off the event loop."""
        trajectories = iter(await asyncio.to_thread(self._store.read, entries))
        return Batch(
            step=command.step,
            version=command.step,
            part=command.part,
            parts=command.parts,
            groups=tuple(
                ScoredGroup(
                    id=group.id,
                    env=group.name,
                    trajectories=tuple(next(trajectories) for _ in group.trajectory_ids),
                    restored_to=group.restored_to,
                )
                for group in command.groups
            ),
        )

    def _stored(
        self,
        command: TrainStep | MeasureGroups,
        entries: Sequence[StoredAttempt],
        *,
        parts: int,
        measure: bool = False,
    ) -> StoredBatch:
        """Return the references by which the ranks read the groups' trajectories.

        Raises DiskError.
        """
        if self._shared:
            self._store.sync()
        attempts = iter(entries)
        return StoredBatch(
            directory=str(self._store.directory.absolute()),
            step=command.step,
            part=command.part,
            parts=parts,
            groups=tuple(
                StoredGroup(
                    id=group.id,
                    env=group.name,
                    members=tuple(member_of(next(attempts)) for _ in group.trajectory_ids),
                    restored_to=group.restored_to,
                )
                for group in command.groups
            ),
            measure=measure,
            seen_s=SEEN_S if self._shared else 0.0,
        )

    async def _publish(
        self, trainer: TrainerProcess, backend: TrainerBackend, command: PublishWeights
    ) -> None:
        started = self._clock()
        try:
            if command.from_checkpoint is not None:
                await self._restore(backend, command.from_checkpoint)
            reply = await backend.ask(
                Publish(
                    version=command.version,
                    publication_id=command.publication_id,
                    keep=command.keep,
                    release=command.release,
                )
            )
            if not isinstance(reply, Published):
                raise TrainerLostError(
                    f"weights version {command.version} cannot be published: {_error(reply)}"
                )
        except TrainerLostError as error:
            self._lose(trainer, str(error))
            backend.kill()
            return
        nbytes = reply.manifest.nbytes
        self._span("trainer", f"publish v{command.version}", started, nbytes=nbytes)
        hosts = [trainer.ranks[part.rank].host for part in reply.manifest.parts]
        self._on_published(reply.manifest, command.keep, hosts)
        for doubt in reply.doubts:
            self._warn(doubt)
        self._post(
            WeightsPublished(
                epoch=trainer.epoch, version=command.version, publication_id=command.publication_id
            )
        )

    async def _save(
        self, trainer: TrainerProcess, backend: TrainerBackend, command: SaveCheckpoint
    ) -> None:
        epoch, step, started = trainer.epoch, command.step, self._clock()
        path = str(self._checkpoints.staged(step, epoch))
        reply = await backend.ask(Save(path=path, export=command.export, background=True))
        if isinstance(reply, Copied):
            self._span("trainer", f"copy {step}", started)
            self._post(CheckpointCopied(epoch=epoch, step=step))
            reply = await backend.written()
        if not isinstance(reply, Saved):
            self._post(CheckpointFailed(epoch=epoch, step=step, error=_error(reply)))
            return
        async with self._accepting:
            if trainer.retired:
                return
            try:
                await asyncio.to_thread(self._checkpoints.accept, step, epoch)
            except OSError as error:
                self._post(CheckpointFailed(epoch=epoch, step=step, error=str(error)))
                return
        if trainer.retired:
            return
        self._span("checkpoint", f"save {step}", started)
        self._store.sync()
        saved = CheckpointSaved(epoch=epoch, step=step)
        self._post_then(saved, lambda: self._journaled(trainer, command))

    def _journaled(self, trainer: TrainerProcess, command: SaveCheckpoint) -> None:
        """Remove older checkpoints, now that this one is in the journal. If the trainer
        is retired, its successor may restore one of them.
        """
        if trainer.retired:
            return
        self._on_saved()
        pruning = asyncio.to_thread(self._checkpoints.prune, command.step, command.keep)
        self._tasks.spawn(pruning, "prune checkpoints")


def _error(reply: object) -> str:
    if isinstance(reply, StoreError):
        return str(reply)
    return str(getattr(reply, "error", f"unexpected answer {type(reply).__name__}"))
