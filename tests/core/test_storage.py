"""Losses of disks and stores, and the trainer's reports about them: checkpoints that
fail while in use, tokens that are gone.
"""

import heapq

import pytest

from rollweave.core.state import GroupStatus
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId
from tests.support.core import config, restart_controller, until
from tests.support.kinds import of
from tests.support.random_world import World


def evaluating() -> World:
    """Every evaluation is as good as the one before it: the newest is the best."""
    world = World(config(steps=4, eval={"every": 2, "episodes": 1}), seed=3)
    world.random.choice = lambda options: options[-1]  # type: ignore[method-assign,assignment]
    world.start()
    return world


def saving(world: World, step: int) -> None:
    """Run until step `step` is to be saved, and lose that: the disk is full, and the
    failure has not been reported yet.
    """
    while True:
        command = until(world, c.SaveCheckpoint)
        if command.step == step:
            break
    world.heap = [entry for entry in world.heap if not isinstance(entry[2], e.CheckpointSaved)]
    heapq.heapify(world.heap)
    del world.checkpoints[step]
    world.checkpoints[0] = 0  # a save that fails removes nothing


def fail_save(world: World, step: int) -> None:
    world.feed(e.CheckpointFailed(epoch=world.trainer_epoch, step=step, error="disk full"))


@pytest.mark.parametrize("killed", [False, True])
def test_a_version_without_a_checkpoint_is_not_the_best(killed: bool) -> None:
    """The evaluation is over before its checkpoint fails, or is lost with its
    trainer.
    """
    world = evaluating()
    saving(world, 2)
    evaluation = world.core.state.evaluations.current
    while not evaluation.started or evaluation.pending or evaluation.to_draw:
        world.step()
    if killed:
        world.feed(e.TrainerLost(epoch=world.trainer_epoch, error="killed"))
    else:
        fail_save(world, 2)
    assert world.evaluations[-1].version == 2
    assert world.core.state.evaluations.best_step == 0
    while world.finish is None:
        world.step()  # the world objects to weights of a checkpoint that is not there
    assert world.finish.error == ""


def test_a_save_that_succeeds_on_retry_is_no_failure() -> None:
    """The last step's own checkpoint fails, the final one of the same step does not."""
    world = World(config(steps=2), seed=3)
    world.start()
    saving(world, 2)
    fail_save(world, 2)
    world.run_on()
    assert world.core.state.checkpoints.newest == 2
    assert world.finish.error == ""


def test_trajectories_that_the_store_lost_are_not_trained_on_again() -> None:
    """A trajectory of a trained step is gone when the controller comes back, and its
    step is trained again.
    """
    world = World(config(steps=4, run={"checkpoint_every": None}), seed=3)
    world.start()
    while world.core.state.trainer.step < 1:
        world.step()
    state = world.core.state
    group = state.groups[state.checkpoints.lineage[0][0]]
    assert group.status is GroupStatus.TRAINED
    lost = group.chosen[0]
    feed = world.feed
    engines = tuple(e.EngineSlot(id=EngineId(name)) for name in world.engine_epoch)
    world.feed = lambda event: feed(  # type: ignore[method-assign]
        e.WorldLost(engines=engines, missing=(lost,)) if isinstance(event, e.WorldLost) else event
    )
    restart_controller(world)
    world.run_on()
    assert world.finish.error == ""
    account = world.core.account()
    assert account.dropped["world_lost"] == len(group.chosen)
    assert account.trained == sum(len(ids) for ids in world.trained.values())
    assert lost not in [member for ids in world.trained.values() for member in ids]


@pytest.mark.parametrize("kind", [e.CheckpointSaved, e.WeightsPublished])
def test_a_duplicate_answer_of_the_trainer_does_not_answer_a_later_command(
    kind: type[e.Event],
) -> None:
    """The duplicate arrives while the trainer does the same for a later step."""
    world = World(config(steps=4, run={"checkpoint_every": 1}), seed=3)
    world.start()
    while not (first := [event for _, event in world.journal if isinstance(event, kind)]):
        world.step()
    command = c.SaveCheckpoint if kind is e.CheckpointSaved else c.PublishWeights
    until(world, command)
    before = world.core.state.trainer.status
    world.feed(first[0])
    assert world.core.state.trainer.status is before
    world.run_on()
    assert world.finish.error == ""


def test_a_late_score_is_evicted_from_the_store() -> None:
    """It was stored while the core was already cancelling the attempt, and will never
    be used.
    """
    world = World(config(rollout={"spare_members": 1}), seed=1)
    world.start()
    scoring: set[tuple[str, int]] = set()
    late_reward = None
    while late_reward is None:
        world.step()
        for command in world.commands[-1]:
            if isinstance(command, c.StartEval):
                scoring.add((command.trajectory_id, command.attempt))
            if (
                isinstance(command, c.CancelTrajectory)
                and (command.trajectory_id, command.attempt) in scoring
            ):
                late_reward = e.RewardReady(
                    trajectory_id=command.trajectory_id, attempt=command.attempt, reward=1.0
                )
    for _ in range(2):  # while it closes, and when it is forgotten
        world.feed(late_reward)
        evicted = [command.trajectory_ids for command in of(world.commands[-1], c.Evict)]
        assert (late_reward.trajectory_id,) in evicted
        while late_reward.trajectory_id in world.core.state.trajectories:
            world.step()
