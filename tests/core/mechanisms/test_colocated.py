"""The trainer and the engines take turns on the same devices: none has memory there
while another needs it, whatever fails.
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.core import weight_updates
from rollweave.core.core import Core
from rollweave.core.mechanisms.colocated import claims_devices
from rollweave.core.policy.waiting import Wait
from rollweave.core.run import Run
from rollweave.core.state import EngineStatus, Evaluation, TrainerStatus
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId
from rollweave.schema.config.root import RunConfig
from tests.support import core
from tests.support.properties import examples
from tests.support.random_world import World

E0 = EngineId("e0")


def colocated(**sections: Any) -> RunConfig:
    trainer = {"colocated": True, **sections.pop("trainer", {})}
    return core.config("sync", trainer=trainer, **sections)


def of(world: World, *kinds: type[c.Command]) -> list[c.Command]:
    return [one for commands in world.commands for one in commands if isinstance(one, kinds)]


@pytest.mark.timeout(900)
@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 10_000),
    failure=st.sampled_from([0.0, 0.02, 0.1]),
    hang=st.sampled_from([0.0, 0.0, 0.01]),
    restless=st.sampled_from([0.0, 0.03]),
    kills=st.lists(st.integers(5, 300), max_size=3),
    spare=st.integers(0, 2),
    every=st.sampled_from([0, 1, 2]),
    scheduling=st.sampled_from(sorted(core.SCHEDULINGS)),
    cut=st.floats(0, 1),
)
def test_any_colocated_world_ends_accounted_for_and_is_replayed(
    seed: int,
    failure: float,
    hang: float,
    restless: float,
    kills: list[int],
    spare: int,
    every: int,
    scheduling: str,
    cut: float,
) -> None:
    """`World` checks at every command that the devices are free for it."""
    settings_ = colocated(
        rollout={"spare_groups": spare, "spare_members": spare, **core.SCHEDULINGS[scheduling]},
        eval={"every": every},
        watchdog={"restarts": 100},
    )
    world = World(settings_, seed, failure=failure, hang=hang, restless=restless)
    core.run_with_lost_controllers(world, kills)
    account = world.core.account()
    assert account.in_flight == 0
    if world.finish.error:
        assert "checkpoint" in world.finish.error
    else:
        assert sorted(world.trained) == [0, 1, 2, 3]
        assert all(step == initiated for step, initiated in world.trained_versions)
    replayed = Core(settings_)
    middle = int(cut * len(world.journal))
    for place, (now, event) in enumerate(world.journal):
        if place == middle:
            replayed = Core.restore(replayed.snapshot(), settings_)
        assert replayed.handle(now, event) == world.commands[place], f"event {place}: {event}"


@pytest.mark.timeout(900)
@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 10_000),
    relays=st.integers(1, 4),
    failure=st.sampled_from([0.0, 0.02, 0.1]),
    restless=st.sampled_from([0.0, 0.03]),
    changing=st.sampled_from([0.0, 0.02]),
    own_machines=st.booleans(),
    every=st.sampled_from([0, 2]),
)
def test_any_colocated_run_on_several_hosts_ends_accounted_for(
    seed: int,
    relays: int,
    failure: float,
    restless: float,
    changing: float,
    own_machines: bool,
    every: int,
) -> None:
    """Hosts with a relay each come and go, one of them with the trainer."""
    settings_ = colocated(
        engines={"count": relays},
        weights={"relays": relays},
        eval={"every": every},
        watchdog={"restarts": 100},
    )
    world = World(settings_, seed, failure=failure, restless=restless)
    world.changing_hosts, world.own_machines = changing, own_machines
    world.start()
    world.run_on()
    account = world.core.account()
    assert account.balanced
    assert account.in_flight == 0
    if world.core.state.hosts.up:
        assert world.finish.error == "" or "checkpoint" in world.finish.error
    if not world.finish.error:
        assert sorted(world.trained) == [0, 1, 2, 3]
        assert all(step == initiated for step, initiated in world.trained_versions)


def test_an_engine_loads_what_the_trainer_has_published_last() -> None:
    """Its relay has the version before, too, until it has fetched the new one."""
    world = World(colocated(engines={"count": 3}, weights={"relays": 3}), seed=1)
    assert world.run().error == ""
    loads = [one.version for one in of(world, c.LoadWeights) if isinstance(one, c.LoadWeights)]
    assert loads == [version for version in range(5) for _ in range(3)]


def test_a_step_begins_when_the_engines_have_given_back_their_memory() -> None:
    """They load the next version once it is published, and stage none."""
    world = World(colocated(), seed=1)
    assert world.run().error == ""
    order = [
        type(one).__name__
        for one in of(world, c.SuspendEngine, c.TrainStep, c.PublishWeights, c.LoadWeights)
    ]
    step = ["SuspendEngine"] * 2 + ["TrainStep", "PublishWeights"] + ["LoadWeights"] * 2
    assert order == ["PublishWeights", "LoadWeights", "LoadWeights", *4 * step]
    assert not of(world, c.StageWeights)
    assert world.core.state.idle.engines["training"] > 0


def test_an_engine_that_does_not_give_back_its_memory_is_restarted() -> None:
    world = World(colocated(), seed=1)
    world.start()
    core.until(world, c.SuspendEngine)
    world.heap = [entry for entry in world.heap if not isinstance(entry[2], e.EngineSuspended)]
    shown = [wait.what for wait in world.core.waits({})]
    assert shown.count("giving its memory back for the trainer") == 2
    assert world.run_on().error == ""
    reasons = [one.reason for one in of(world, c.RestartEngine) if isinstance(one, c.RestartEngine)]
    assert reasons[0].startswith("stuck suspending for"), reasons
    assert sorted(world.trained) == [0, 1, 2, 3]


def test_a_trainer_that_is_lost_in_a_step_trains_it_before_the_engines_load() -> None:
    """They have no use for the weights that it publishes when it is back."""
    world = World(colocated(steps=2), seed=1)
    world.start()
    core.until(world, c.TrainStep)
    world.heap = [entry for entry in world.heap if not isinstance(entry[2], e.StepTrained)]
    world.trained.clear()
    world.later(e.TrainerLost(epoch=0, error="killed"), 0.0)
    before = len(of(world, c.LoadWeights))
    core.until(world, c.TrainStep)
    assert len(of(world, c.LoadWeights)) == before
    assert world.run_on().error == ""
    assert sorted(world.trained) == [0, 1]


def test_a_trainer_that_is_lost_between_steps_leaves_the_engines_their_memory() -> None:
    """It comes back in the host's memory, and its weights are those that they serve."""
    world = World(colocated(steps=2), seed=1)
    world.start()
    core.until(world, c.StartTurn)
    world.later(e.TrainerLost(epoch=0, error="killed"), 0.0)
    core.until(world, c.PublishWeights)
    assert not of(world, c.SuspendEngine)
    assert world.core.state.trainer.status is TrainerStatus.PUBLISHING
    assert all(
        engine.status is EngineStatus.SERVING for engine in world.core.state.engines.values()
    )


def ready(status: TrainerStatus = TrainerStatus.IDLE) -> Run:
    """The batch of step 1 is complete, and two engines serve."""
    world = World(colocated(steps=2), seed=1)
    world.start()
    while len(of(world, c.SuspendEngine)) < 1:
        before = world.core.snapshot()
        world.step()
    run = Core.restore(before, world.config)._run
    run.now, run.state.trainer.status = world.now, status
    run.state.buffer = dict(world.core.state.buffer)
    run.state.groups = world.core.state.groups
    return run


def test_an_evaluation_is_finished_before_the_next_step() -> None:
    run = ready()
    assert claims_devices(run)
    run.state.evaluations.current = Evaluation(version=0, final=False, to_draw=[], started=True)
    assert not claims_devices(run)


@pytest.mark.parametrize(
    ("status", "checkpoint", "claims"),
    [
        (TrainerStatus.STARTING, None, True),  # it warms up
        (TrainerStatus.STARTING, 0, False),
        (TrainerStatus.PUBLISHING, 0, True),
        (TrainerStatus.SAVING, 0, False),
    ],
)
def test_when_the_trainer_needs_the_devices(
    status: TrainerStatus, checkpoint: int | None, claims: bool
) -> None:
    run = ready(status)
    run.state.checkpoints.newest = checkpoint
    assert claims_devices(run) == claims
    run.out = []
    weight_updates.update(run)
    releases = [one.engine_id for one in run.out if isinstance(one, c.SuspendEngine)]
    assert bool(releases) == (status is TrainerStatus.STARTING and claims)


def test_what_a_released_engine_waits_for_is_the_trainer() -> None:
    world = World(colocated(), seed=1)
    world.start()
    core.until(world, c.TrainStep)
    shown = [Wait(component=one.component, what=one.what) for one in world.core.waits({})]
    assert shown == [Wait(component="the trainer", what="training step 0")]
