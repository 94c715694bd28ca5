"""A checkpoint counts only if the present epoch of the trainer has written it."""

import asyncio
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from rollweave.record.store import TrajectoryStore
from rollweave.record.trace import Trace
from rollweave.runtime.checkpoints import Checkpoints
from rollweave.runtime.supervisors.stored_batches import RankCommand, StoredBatch, executed
from rollweave.runtime.supervisors.trainer import TrainerSupervisor
from rollweave.runtime.tasks import Tasks
from rollweave.schema.base import GroupId
from rollweave.schema.commands import GroupRef, MeasureGroups, SaveCheckpoint
from rollweave.schema.errors import CorruptJournalError
from rollweave.schema.events import CheckpointCopied, CheckpointSaved, Event, TrainerReady
from rollweave.schema.training import Copied, Restored, Save, Saved, TrainerReply, TrainFailed
from tests.runtime.supervisors.stored import fill, ids


class Link:
    """A trainer that is ready at once, and finishes a checkpoint when it is let."""

    def __init__(self) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.finished: asyncio.Future[Saved] = asyncio.get_running_loop().create_future()
        self.staged = Path()

    async def ready(self) -> None: ...

    async def ask(self, command: RankCommand) -> TrainerReply:
        if isinstance(command, StoredBatch):
            reply = executed(command)
            assert isinstance(reply, TrainFailed)
            return reply
        if isinstance(command, Save):
            self.staged = Path(command.path)
            return Copied(path=command.path, copy_s=0.0)
        return Restored(step=0)

    async def written(self) -> Saved:
        return await self.finished

    def finish(self, text: str) -> None:
        self.staged.mkdir()
        (self.staged / "model").write_text(text)
        self.finished.set_result(Saved(path=str(self.staged), save_s=0.0))

    def kill(self) -> None:
        if not self.lost.done():
            self.lost.set_result("its host is lost")

    async def close(self) -> None:
        self.kill()


class NoStore:
    def sync(self) -> None: ...


class Supervised:
    """A supervisor, the trainers that it has started, and what it has posted."""

    def __init__(self, directory: Path, tasks: Tasks, store: TrajectoryStore | None = None) -> None:
        (directory / "checkpoints").mkdir()
        self.checkpoints = Checkpoints(directory / "checkpoints")
        self.links: list[Link] = []
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.journaled = 0
        self.supervisor = TrainerSupervisor(
            make=self._make,
            tasks=tasks,
            post=self._post,
            clock=lambda: 0.0,
            trace=Trace(directory / "trace.json"),
            store=cast(TrajectoryStore, NoStore()) if store is None else store,
            checkpoints=self.checkpoints,
            on_published=lambda *_: None,
            on_trained=lambda *_: None,
            on_saved=self._on_saved,
        )

    def _make(self, *_: object) -> Any:
        self.links.append(Link())
        return self.links[-1]

    def _post(self, event: Event, then: Callable[[], None] | None = None) -> None:
        self.events.put_nowait(event)
        if then is not None:
            then()

    def _on_saved(self) -> None:
        self.journaled += 1

    async def saving(self, epoch: int) -> Link:
        """Start a trainer that copies its checkpoint of step 6."""
        self.supervisor.start(epoch)
        assert await self.events.get() == TrainerReady(epoch=epoch, step=0)
        self.supervisor.save(SaveCheckpoint(step=6, keep=(), export=False))
        assert await self.events.get() == CheckpointCopied(epoch=epoch, step=6)
        return self.links[-1]

    def model(self) -> str:
        """Return what the only directory has, which is the checkpoint of step 6."""
        (only,) = self.checkpoints.directory.iterdir()
        assert only == self.checkpoints.path(6)
        return (only / "model").read_text()


async def test_a_trainer_that_was_given_up_finishes_its_checkpoint_late(tmp_path: Path) -> None:
    async with Tasks() as tasks:
        run = Supervised(tmp_path, tasks)
        old, new = await run.saving(0), await run.saving(1)
        old.finish("old")  # its reply was on its way when its host was given up
        new.finish("new")
        assert await run.events.get() == CheckpointSaved(epoch=1, step=6)
        await run.supervisor.close()
        tasks.cancel_all()
    assert run.events.empty()
    assert run.model() == "new"


async def test_a_trainer_begins_once_the_checkpoint_of_the_former_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Tasks() as tasks:
        run = Supervised(tmp_path, tasks)
        begun, may_end = threading.Event(), threading.Event()
        accept = run.checkpoints.accept

        def slow(step: int, epoch: int) -> None:
            begun.set()
            may_end.wait(60)
            accept(step, epoch)

        monkeypatch.setattr(run.checkpoints, "accept", slow)
        (await run.saving(0)).finish("old")
        await asyncio.to_thread(begun.wait, 60)
        run.supervisor.start(1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(run.links) == 1, "what it restores may still change"
        may_end.set()
        assert await run.events.get() == TrainerReady(epoch=1, step=0)
        await run.supervisor.close()
        tasks.cancel_all()
    assert run.events.empty(), "the checkpoint of a former epoch is not saved"
    assert run.journaled == 0, "and no older one is removed"


async def test_a_damaged_store_ends_the_run_also_if_it_is_only_measured(tmp_path: Path) -> None:
    """Every restarted trainer would fail at the same record."""

    async def measure(store: TrajectoryStore) -> None:
        refs = GroupRef(id=GroupId("g0"), name="lake", trajectory_ids=tuple(ids()))
        async with Tasks() as tasks:
            run = Supervised(tmp_path, tasks, store)
            run.supervisor.start(0)
            assert await run.events.get() == TrainerReady(epoch=0, step=0)
            shutil.rmtree(tmp_path / "store")
            run.supervisor.measure(MeasureGroups(step=1, part=0, groups=(refs,)))
            await run.events.get()
            tasks.cancel_all()

    with TrajectoryStore(tmp_path / "store") as store:
        fill(store)
        with pytest.raises(CorruptJournalError, match="was deleted"):
            await measure(store)
