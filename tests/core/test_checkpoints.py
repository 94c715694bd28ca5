"""Checkpoints by time: when they are requested, that training continues beside them,
and the reported cost of a lost trainer.
"""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.core import training
from rollweave.core.core import Core
from rollweave.core.state import TrainerStatus
from rollweave.core.training import COST_SHARE, checkpoint_is_due
from rollweave.schema import commands as c
from rollweave.schema import events as e
from tests.support.core import config
from tests.support.kinds import of
from tests.support.random_world import World


class Timed(World):
    """A world in which each step takes 10 s, and a checkpoint is copied at once and
    written in `write_s`.
    """

    write_s = 1.0
    waits = False
    """Whether the trainer's update waits until the checkpoint is written."""
    copies = True

    def execute(self, command: c.Command) -> None:
        if isinstance(command, c.TrainStep):
            self.trainer_step += 1
            self.weights.trained()
            self.numbers += 1
            saving = self.core.state.trainer.saving is not None
            self.later(
                e.StepTrained(epoch=self.trainer_epoch, step=command.step, part=command.part),
                10.0 + self.write_s * (self.waits and saving),
            )
        elif isinstance(command, c.SaveCheckpoint):
            self.checkpoints = dict.fromkeys((*command.keep, command.step), 0)
            self.saves.append((self.now, command.step))
            if self.copies:
                self.later(e.CheckpointCopied(epoch=self.trainer_epoch, step=command.step), 0.0)
            self.later(e.CheckpointSaved(epoch=self.trainer_epoch, step=command.step), self.write_s)
        else:
            super().execute(command)

    def to_the_end(self) -> None:
        while self.finish is None:
            self.step()
        assert self.finish.error == ""


def world(*, write_s: float = 1.0, steps: int = 30, **run: object) -> Timed:
    timed = Timed(
        config(
            "sync",
            steps=steps,
            run={"checkpoint_every": None, **run},
            eval={"every": 0, "final_episodes": 0},
        ),
        seed=3,
    )
    timed.saves = []
    timed.write_s = write_s
    timed.start()
    return timed


def test_by_default_at_most_half_a_minute_and_a_step_are_lost() -> None:
    timed = world()
    timed.to_the_end()
    times = [at for at, _ in timed.saves]
    assert len(times) >= 8
    gaps = [after - before for before, after in itertools.pairwise(times[:-1])]
    assert all(30.0 <= gap <= 60.0 for gap in gaps), gaps


def test_an_expensive_checkpoint_is_rare() -> None:
    timed = world(write_s=5.0, steps=60)
    timed.to_the_end()
    times = [at for at, _ in timed.saves]
    gaps = [after - before for before, after in itertools.pairwise(times[1:-1])]
    assert gaps
    assert all(gap >= 5.0 / COST_SHARE for gap in gaps), gaps


def test_no_checkpoint_by_time_if_it_is_disabled() -> None:
    timed = world(checkpoint_every=0)
    timed.to_the_end()
    assert [step for _, step in timed.saves] == [0, 30]


def test_training_continues_while_a_checkpoint_is_written() -> None:
    timed = world(write_s=60.0, steps=10)
    beside = set()
    while timed.finish is None:
        timed.step()
        trainer = timed.core.state.trainer
        if trainer.saving is not None and trainer.status is TrainerStatus.TRAINING:
            beside.add(trainer.saving)
    assert beside >= {0}
    assert timed.core.state.checkpoints.newest == 10
    assert timed.core.state.checkpoints.exported == 10


def test_a_required_checkpoint_waits_for_the_one_being_written() -> None:
    timed = world(write_s=25.0, steps=6, checkpoint_every=1)
    timed.to_the_end()
    assert [step for _, step in timed.saves] == list(range(7))
    times = [at for at, _ in timed.saves]
    assert all(after - before >= 25.0 for before, after in itertools.pairwise(times)), times


def test_a_checkpoint_that_is_never_written_times_out_and_is_named() -> None:
    timed = world(steps=4)
    while timed.core.state.trainer.saving is None:
        timed.step()
    timed.heap = [entry for entry in timed.heap if not isinstance(entry[2], e.CheckpointSaved)]
    while not timed.warnings:
        timed.step()
    assert "stuck writing checkpoint 0 for" in timed.warnings[0].message


def test_a_step_is_not_stuck_while_its_update_waits_for_a_checkpoint() -> None:
    timed = world(write_s=595.0, steps=3, checkpoint_every=1)
    timed.waits = True
    timed.to_the_end()
    assert not timed.warnings
    assert timed.core.state.checkpoints.newest == 3


def test_the_loss_of_the_trainer_is_reported_with_its_cost() -> None:
    timed = world(steps=12)
    while timed.core.state.trainer.step < 8:
        timed.step()
    checkpoint = timed.core.state.checkpoints.newest
    assert checkpoint is not None
    assert 0 < checkpoint < 8
    timed.feed(e.TrainerLost(epoch=timed.trainer_epoch, error="killed"))
    while timed.core.state.trainer.status is TrainerStatus.STARTING:
        before = training._discarded(timed.core._run)
        timed.step()
    dropped = training._discarded(timed.core._run) - before
    (message,) = [
        warning.message for warning in timed.warnings if "trained again" in warning.message
    ]
    assert message.startswith(
        f"continues from step {checkpoint}: {8 - checkpoint} later steps are trained again, "
    )
    assert f"{dropped} rollouts do not fit its weights and are dropped" in message
    timed.to_the_end()


@pytest.mark.parametrize("copies", [True, False])
def test_a_stop_writes_the_export_that_a_checkpoint_by_time_lacks(copies: bool) -> None:
    timed = world(steps=100)
    timed.copies = copies
    while timed.core.state.checkpoints.newest in (None, 0):
        timed.step()
    assert timed.core.state.checkpoints.exported == -1
    timed.feed(e.StopRequested())
    timed.to_the_end()
    assert (
        timed.core.state.checkpoints.exported
        == timed.core.state.checkpoints.newest
        == timed.core.state.trainer.step
    )
    assert (
        Core.restore(timed.core.snapshot(), timed.config).state.checkpoints.exported
        == timed.core.state.checkpoints.exported
    )


def test_an_error_ends_the_run_only_after_the_checkpoint_is_written() -> None:
    timed = world(write_s=90.0, checkpoint_every=3)
    trainer = timed.core.state.trainer
    while not (trainer.saving and trainer.status is TrainerStatus.TRAINING):
        timed.step()
    written = trainer.saving
    timed.feed(
        e.TrainFailed(epoch=trainer.epoch, step=trainer.step, error="not a number", nonfinite=True)
    )
    assert timed.finish is None
    before = len(timed.commands)
    while timed.finish is None:
        timed.step()
    assert "not a number" in timed.finish.error
    assert timed.core.state.checkpoints.newest == written
    assert not [
        one
        for commands in timed.commands[before:]
        for one in of(commands, c.TrainStep | c.DrawTask)
    ]
    assert timed.core.account().balanced


def test_an_error_waits_no_longer_than_the_watchdog_for_a_checkpoint() -> None:
    timed = world(write_s=1e9)
    trainer = timed.core.state.trainer
    while not (trainer.saving is not None and trainer.status is TrainerStatus.TRAINING):
        timed.step()
    timed.feed(
        e.TrainFailed(epoch=trainer.epoch, step=trainer.step, error="not a number", nonfinite=True)
    )
    began = timed.now
    while timed.finish is None:
        timed.step()
    assert timed.now - began <= 2 * timed.config.watchdog.train_s


@pytest.mark.parametrize("hopeless", [True, False])
def test_the_run_does_not_wait_for_a_trainer_lost_for_good(hopeless: bool) -> None:
    """Even if a checkpoint was being written."""
    timed = world(write_s=1e9)
    trainer = timed.core.state.trainer
    while not (trainer.saving is not None and trainer.status is TrainerStatus.TRAINING):
        timed.step()
    trainer.restarts = timed.config.watchdog.restarts
    timed.feed(e.TrainerLost(epoch=trainer.epoch, error="killed", hopeless=hopeless))
    assert "killed" in timed.finish.error


def test_the_first_error_of_a_run_is_its_error() -> None:
    run = world().core._run
    run.state.error = "the disk is full"
    training.on_lost(
        run, e.TrainerLost(epoch=run.state.trainer.epoch, error="killed", hopeless=True)
    )
    assert run.state.error == "the disk is full"


seconds = st.floats(0, 1e6)

PROMISED_SHARE = 1 / 20
"""Restate the promise of the setting's description."""


@given(every_s=st.floats(0.001, 1e6), last_s=seconds, since_s=seconds)
def test_writing_keeps_its_share_and_waits_no_longer_than_necessary(
    every_s: float, last_s: float, since_s: float
) -> None:
    if checkpoint_is_due(since_s, every_s=every_s, last_s=last_s):
        assert since_s >= every_s
        assert last_s <= PROMISED_SHARE * since_s * (1 + 1e-9)
    else:
        assert since_s < every_s or last_s > PROMISED_SHARE * since_s * (1 - 1e-9)


@given(last_s=seconds, since_s=seconds)
def test_none_is_due_if_disabled(last_s: float, since_s: float) -> None:
    assert not checkpoint_is_due(since_s, every_s=0.0, last_s=last_s)


def test_a_checkpoint_may_be_due_several_times_a_second() -> None:
    assert checkpoint_is_due(0.5, every_s=0.5, last_s=0.025)
    assert not checkpoint_is_due(0.4, every_s=0.5, last_s=0.0)
    assert not checkpoint_is_due(0.5, every_s=0.5, last_s=0.026)


@pytest.mark.parametrize(
    "wrong", [{"every_s": -1.0, "last_s": 0.0}, {"every_s": 1.0, "last_s": -1.0}]
)
def test_negative_seconds(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be at least 0, got -1"):
        checkpoint_is_due(1.0, **wrong)
