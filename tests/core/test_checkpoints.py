"""Checkpoints by time: when they are requested, that training continues beside them,
and the reported cost of a lost trainer.
"""

import itertools

import pytest

from rollweave.core.core import Core
from rollweave.core.policy.checkpoints import COST_SHARE
from rollweave.core.state import TrainerStatus
from rollweave.schema import commands as c
from rollweave.schema import events as e
from tests.core.test_core import config
from tests.core.world import World


class Timed(World):
    """A world in which each step takes 10 s, and a checkpoint is copied at once and
    written in `write_s`.
    """

    write_s = 1.0
    copies = True

    def execute(self, command: c.Command) -> None:
        if isinstance(command, c.TrainStep):
            self.trainer_step += 1
            self.numbers += 1
            self.later(
                e.StepTrained(epoch=self.trainer_epoch, step=command.step, part=command.part), 10.0
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
    made = Timed(
        config(
            "sync",
            steps=steps,
            run={"checkpoint_every": 0, **run},
            eval={"every": 0, "final_episodes": 0},
        ),
        seed=3,
    )
    made.saves = []
    made.write_s = write_s
    made.start()
    return made


def test_by_default_at_most_half_a_minute_and_a_step_are_lost() -> None:
    found = world()
    found.to_the_end()
    times = [at for at, _ in found.saves]
    assert len(times) >= 8
    gaps = [after - before for before, after in itertools.pairwise(times[:-1])]
    assert all(30.0 <= gap <= 60.0 for gap in gaps), gaps


def test_an_expensive_checkpoint_is_rare() -> None:
    found = world(write_s=5.0, steps=60)
    found.to_the_end()
    times = [at for at, _ in found.saves]
    gaps = [after - before for before, after in itertools.pairwise(times[1:-1])]
    assert gaps
    assert all(gap >= 5.0 / COST_SHARE for gap in gaps), gaps


def test_no_checkpoint_by_time_if_it_is_disabled() -> None:
    found = world(checkpoint_s=0)
    found.to_the_end()
    assert [step for _, step in found.saves] == [0, 30]


def test_training_continues_while_a_checkpoint_is_written() -> None:
    found = world(write_s=60.0, steps=10)
    beside = set()
    while found.finish is None:
        found.step()
        trainer = found.core.state.trainer
        if trainer.saving is not None and trainer.status is TrainerStatus.TRAINING:
            beside.add(trainer.saving)
    assert beside >= {0}
    assert found.core.state.checkpoint == 10
    assert found.core.state.exported == 10


def test_a_required_checkpoint_waits_for_the_one_being_written() -> None:
    found = world(write_s=25.0, steps=6, checkpoint_every=1)
    found.to_the_end()
    assert [step for _, step in found.saves] == list(range(7))
    times = [at for at, _ in found.saves]
    assert all(after - before >= 25.0 for before, after in itertools.pairwise(times)), times


def test_a_checkpoint_that_is_never_written_times_out_and_is_named() -> None:
    found = world(steps=4)
    while found.core.state.trainer.saving is None:
        found.step()
    found.heap = [entry for entry in found.heap if not isinstance(entry[2], e.CheckpointSaved)]
    while not found.warnings:
        found.step()
    assert "stuck writing checkpoint 0 for" in found.warnings[0].message


def test_the_loss_of_the_trainer_is_reported_with_its_cost() -> None:
    found = world(steps=12)
    while found.core.state.trainer.step < 8:
        found.step()
    kept = found.core.state.checkpoint
    assert kept is not None
    assert 0 < kept < 8
    found.feed(e.TrainerLost(epoch=found.trainer_epoch, error="killed"))
    while found.core.state.trainer.status is TrainerStatus.STARTING:
        found.step()
    (told,) = [warning.message for warning in found.warnings if "trained again" in warning.message]
    assert told.startswith(
        f"continues from step {kept}: {8 - kept} later steps are trained again, "
    )
    assert "rollouts do not fit its weights and are dropped" in told
    found.to_the_end()


@pytest.mark.parametrize("copies", [True, False])
def test_a_stop_writes_the_export_that_a_checkpoint_by_time_lacks(copies: bool) -> None:
    found = world(steps=100)
    found.copies = copies
    while found.core.state.checkpoint in (None, 0):
        found.step()
    assert found.core.state.exported == -1
    found.feed(e.StopRequested())
    found.to_the_end()
    assert found.core.state.exported == found.core.state.checkpoint == found.core.state.trainer.step
    assert (
        Core.restore(found.core.snapshot(), found.config).state.exported
        == found.core.state.exported
    )


def test_an_error_ends_the_run_only_after_the_checkpoint_is_written() -> None:
    found = world(write_s=90.0, checkpoint_every=3)
    trainer = found.core.state.trainer
    while not (trainer.saving and trainer.status is TrainerStatus.TRAINING):
        found.step()
    written = trainer.saving
    found.feed(
        e.TrainFailed(epoch=trainer.epoch, step=trainer.step, error="not a number", nonfinite=True)
    )
    assert found.finish is None
    before = len(found.commands)
    while found.finish is None:
        found.step()
    assert "not a number" in found.finish.error
    assert found.core.state.checkpoint == written
    assert not [
        one
        for commands in found.commands[before:]
        for one in commands
        if isinstance(one, c.TrainStep | c.DrawTask)
    ]
    assert found.core.account().balanced


def test_an_error_waits_no_longer_than_the_watchdog_for_a_checkpoint() -> None:
    found = world(write_s=1e9)
    trainer = found.core.state.trainer
    while not (trainer.saving is not None and trainer.status is TrainerStatus.TRAINING):
        found.step()
    found.feed(
        e.TrainFailed(epoch=trainer.epoch, step=trainer.step, error="not a number", nonfinite=True)
    )
    began = found.now
    while found.finish is None:
        found.step()
    assert found.now - began <= 2 * found.config.watchdog.train_s


@pytest.mark.parametrize("hopeless", [True, False])
def test_the_run_does_not_wait_for_a_trainer_lost_for_good(hopeless: bool) -> None:
    """Even if a checkpoint was being written."""
    found = world(write_s=1e9)
    trainer = found.core.state.trainer
    while not (trainer.saving is not None and trainer.status is TrainerStatus.TRAINING):
        found.step()
    trainer.restarts = found.config.watchdog.restarts
    found.feed(e.TrainerLost(epoch=trainer.epoch, error="killed", hopeless=hopeless))
    assert found.finish is not None
    assert "killed" in found.finish.error
