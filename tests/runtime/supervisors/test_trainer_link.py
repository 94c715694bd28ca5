"""The trainer in a thread and as processes: rank 0 replies for all ranks, and the death
of any rank is the trainer's.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from rollweave.io.child import child_of
from rollweave.io.wire import encode
from rollweave.runtime.roles.group import WorkerPlace
from rollweave.runtime.supervisors import trainer_link
from rollweave.schema import training
from rollweave.schema.work import Batch
from tests.runtime.fake_trainer import CRASH, FAIL, NAN, RANK_1_DIES, build

ROOT = Path(__file__).parents[3]
KINDS = ("thread", "process", "two ranks")
Connect = Callable[..., trainer_link.TrainerBackend]


@pytest.fixture
async def connect(tmp_path: Path) -> AsyncIterator[Connect]:
    backends: list[trainer_link.TrainerBackend] = []

    def start(kind: str, *faults: str) -> trainer_link.TrainerBackend:
        for name in faults:
            (tmp_path / name).touch()
        spec = trainer_link.TrainerSpec(config="{}", model=str(tmp_path))
        if kind == "thread":
            backends.append(trainer_link.ThreadTrainer(spec, build, start_s=20.0))
        else:
            env = {"PYTHONPATH": f"{ROOT}:{':'.join(path for path in sys.path if path)}"}
            backends.append(
                trainer_link.ProcessTrainer(
                    spec,
                    places=[WorkerPlace(spawn=child_of("tests.runtime.fake_trainer", env=env))]
                    * (2 if kind == "two ranks" else 1),
                    logs=tmp_path / "logs",
                    start_s=20.0,
                )
            )
        return backends[-1]

    yield start
    for trainer in backends:
        await trainer.close()


def train_on(step: int) -> training.TrainOn:
    return training.TrainOn(batch=Batch(step=step, version=step, part=0, parts=1, groups=()))


@pytest.mark.parametrize("kind", KINDS)
async def test_replies_come_in_the_order_of_commands(
    connect: Connect, kind: str, tmp_path: Path
) -> None:
    trainer = connect(kind)
    assert await trainer.ready() == training.TrainerReady(parameters=7)
    reply = await trainer.ask(train_on(3))
    assert isinstance(reply, training.Trained)
    assert (reply.step, reply.metrics.values["rank"]) == (3, 0.0)
    if kind != "two ranks":  # the fake's ranks do not agree on which of them writes
        assert isinstance(
            await trainer.ask(training.Save(path=str(tmp_path / "saved"))), training.Saved
        )
        assert await trainer.ask(
            training.Restore(path=str(tmp_path / "saved"))
        ) == training.Restored(step=4)
    assert isinstance(
        await trainer.ask(training.Publish(version=4, publication_id=9)), training.Published
    )


@pytest.mark.parametrize("kind", KINDS)
async def test_a_checkpoint_is_written_during_the_next_commands(
    connect: Connect, kind: str
) -> None:
    trainer = connect(kind)
    await trainer.ready()
    for step in range(3):
        assert await trainer.ask(training.Save(path="beside", background=True)) == training.Copied(
            path="beside", copy_s=0.0
        )
        assert isinstance(await trainer.ask(train_on(step)), training.Trained)
        async with asyncio.timeout(20):
            assert await trainer.written() == training.Saved(path="beside", save_s=0.0)
    assert isinstance(
        await trainer.ask(training.Save(path="beside", background=True)), training.Copied
    )
    trainer.kill()
    async with asyncio.timeout(20):
        with pytest.raises(trainer_link.TrainerLostError):
            await trainer.written()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_failed_step_is_a_reply(connect: Connect, kind: str) -> None:
    trainer = connect(kind)
    await trainer.ready()
    assert await trainer.ask(train_on(FAIL)) == training.TrainFailed(error="no luck")
    assert await trainer.ask(train_on(NAN)) == training.TrainFailed(error="no luck", nonfinite=True)
    assert isinstance(await trainer.ask(train_on(0)), training.Trained)


@pytest.mark.parametrize(
    ("kind", "step"), [("process", CRASH), ("two ranks", CRASH), ("two ranks", RANK_1_DIES)]
)
async def test_the_death_of_any_rank_loses_the_trainer(
    connect: Connect, kind: str, step: int
) -> None:
    trainer = connect(kind)
    await trainer.ready()
    with pytest.raises(trainer_link.TrainerLostError, match=r"rank [01]: ended \(signal SIGKILL\)"):
        await trainer.ask(train_on(step))
    assert "SIGKILL" in await trainer.lost
    with pytest.raises(trainer_link.TrainerLostError):
        await trainer.ask(train_on(0))


@pytest.mark.parametrize("kind", KINDS)
async def test_reports_why_a_trainer_cannot_start(connect: Connect, kind: str) -> None:
    trainer = connect(kind, "no-trainer")
    with pytest.raises(trainer_link.TrainerLostError, match="the fake trainer cannot start"):
        await trainer.ready()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_trainer_that_can_never_start_is_refused(connect: Connect, kind: str) -> None:
    trainer = connect(kind, "refused")
    with pytest.raises(trainer_link.TrainerRefusedError, match=r"^the fake warm-up is not finite$"):
        await trainer.ready()


@pytest.mark.parametrize("kind", KINDS)
async def test_kill_fails_pending_commands(connect: Connect, kind: str) -> None:
    trainer = connect(kind)
    await trainer.ready()
    trainer.kill()
    await trainer.lost
    with pytest.raises(trainer_link.TrainerLostError):
        await trainer.ask(train_on(0))
    await asyncio.gather(trainer.close(), trainer.close())


async def test_the_bytes_of_a_command_are_those_that_all_ranks_receive(connect: Connect) -> None:
    command = train_on(3)
    threads, one, two = (connect(kind) for kind in KINDS)
    await asyncio.gather(*(trainer.ready() for trainer in (threads, one, two)))
    assert threads.bytes_of(command) == 0, "nothing leaves this process"
    assert one.bytes_of(command) == len(encode(command))
    before = two.bytes_of(command)
    await two.ask(training.Publish(version=4, publication_id=9))
    assert two.bytes_of(command) == before == 2 * one.bytes_of(command)
