"""A core that serves: submitted rollouts, on engines that join and leave, each
delivered exactly once.
"""

import heapq
import random
import sys
from collections import Counter
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.core import serving
from rollweave.core.core import Core
from rollweave.core.policy.retry import MAX_WORLDS_LOST
from rollweave.core.state import EngineStatus, Phase, Stage
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId, GroupId, TaskId, TrajectoryId
from rollweave.schema.work import Limits, StopReason, Task
from tests.support.core import config
from tests.support.kinds import of
from tests.support.properties import examples
from tests.support.random_world import BEGIN_S, World

SCHEDULINGS = ("turn", "trajectory", "heddle")


class Service(World):
    """A world in which `submitted` groups are submitted at random times, some members
    are cancelled, and engines are registered and withdrawn.
    """

    def __init__(
        self,
        *,
        scheduling: str = "turn",
        seed: int = 0,
        submitted: int = 20,
        cancels: float = 0.0,
        **settings: float,
    ) -> None:
        rollout = {"scheduling": scheduling, "max_running": 8}
        super().__init__(
            config("sync", rollout=rollout, watchdog={"restarts": 100}), seed, **settings
        )
        self.delivered: dict[str, list[c.Deliver]] = {}
        self.acknowledged: set[str] = set()
        self.acknowledges = True
        self.expected: set[str] = set()
        for number in range(submitted):
            self.submit(f"r{number}", self.random.uniform(0, 30), cancels)

    def submit(self, group: str, at: float, cancels: float = 0.0) -> None:
        members = self.random.choice([1, 1, 4])
        task = Task(id=TaskId(group), env="elsewhere", seed=0, limits=Limits(step_s=5.0))
        name = self.random.choice(["a", "never heard of"])
        self.later(
            e.RolloutsSubmitted(group_id=GroupId(group), name=name, task=task, members=members), at
        )
        for member in range(members):
            self.expected.add(f"{group}.{member}")
            if self.random.random() < cancels:
                self.later(
                    e.RolloutCancelled(trajectory_id=TrajectoryId(f"{group}.{member}")),
                    self.random.uniform(0, 60),
                )

    def start(self) -> None:
        slots = tuple(
            e.EngineSlot(id=EngineId(name), degree=degree)
            for name, degree in self.engine_degrees.items()
        )
        self.feed(e.RunStarted(engines=slots, serving=True))
        for name in self.engine_epoch:
            self.join(name)

    def join(self, name: str) -> None:
        joined = e.EngineJoined(
            engine_id=EngineId(name),
            epoch=self.engine_epoch[name],
            max_slots=2,
            kv_total_tokens=9,
            version=0,
            moves_kv=self.moves_kv,
            preempts=self.preempts,
        )
        self.later(joined)

    def feed(self, event: e.Event) -> None:
        if isinstance(event, e.EngineJoined):
            self.engine_version[event.engine_id] = event.version
        super().feed(event)

    def register(self, name: str) -> None:
        self.engine_degrees[name], self.engine_epoch[name] = 1, 0
        self.feed(e.EngineRegistered(engine=e.EngineSlot(id=EngineId(name))))
        self.join(name)

    def execute(self, command: c.Command) -> None:
        match command:
            case c.Deliver():
                self.delivered.setdefault(command.trajectory_id, []).append(command)
                if self.acknowledges:
                    self.acknowledged.add(command.trajectory_id)
                    self.later(e.RolloutAcknowledged(trajectory_id=command.trajectory_id))
            case c.StartEngine():
                pass  # by `register`
            case (
                c.TrainStep()
                | c.PublishWeights()
                | c.SaveCheckpoint()
                | c.RestartTrainer()
                | c.LoadWeights()
                | c.DrawTask()
            ):
                raise AssertionError(f"a service trains nothing: {command}")
            case c.RestartEngine():
                self.engine_epoch[command.engine_id] = command.epoch
                self.join(command.engine_id)
            case c.RemoveEngine():
                self.engine_version.pop(command.engine_id, None)
            case _:
                super().execute(command)

    def until_delivered(self) -> None:
        while self.delivered.keys() != self.expected or self.core.state.trajectories:
            assert self.handled < 50_000, f"{len(self.delivered)} of {len(self.expected)} came"
            self.step()

    def close(self, *, drain: bool) -> None:
        self.feed(e.StopRequested(drain=drain))
        while self.finish is None:
            self.step()


@settings(max_examples=examples(30))
@given(
    seed=st.integers(0, 2**16),
    scheduling=st.sampled_from(SCHEDULINGS),
    failure=st.sampled_from([0.0, 0.05, 0.2]),
    cancels=st.sampled_from([0.0, 0.5]),
)
def test_every_submitted_rollout_is_delivered_once(
    seed: int, scheduling: str, failure: float, cancels: float
) -> None:
    world = Service(scheduling=scheduling, seed=seed, failure=failure, cancels=cancels)
    world.start()
    world.until_delivered()
    assert all(len(words) == 1 for words in world.delivered.values())
    counters = world.core.state.counters
    assert counters.submitted == len(world.expected) == sum(counters.delivered.values())
    if not failure and not cancels:
        assert counters.delivered == {StopReason.FINISHED: len(world.expected)}
    assert not world.core.state.groups
    world.close(drain=True)


@settings(max_examples=examples(30))
@given(seed=st.integers(0, 2**16), scheduling=st.sampled_from(SCHEDULINGS), cut=st.integers(1, 400))
def test_a_restarted_world_continues_the_submitted_rollouts(
    seed: int, scheduling: str, cut: int
) -> None:
    """Unacknowledged results are delivered again; rollouts under way start again;
    acknowledged ones are not delivered twice.
    """
    world = Service(scheduling=scheduling, seed=seed)
    world.start()
    world.acknowledges = bool(seed % 2)
    for _ in range(cut):
        if world.heap or world.timer is not None:
            world.step()
    submitted_ids = {
        event.group_id for _, event in world.journal if isinstance(event, e.RolloutsSubmitted)
    }
    untaken = {name for name in world.delivered if name in world.core.state.trajectories}
    later = [event for *_, event in world.heap if isinstance(event, e.RolloutsSubmitted)]
    world.core = Core.restore(world.core.snapshot(), world.config)
    world.heap.clear()
    world.acknowledges, before = (
        True,
        Counter({name: len(words) for name, words in world.delivered.items()}),
    )
    world.engine_version.clear()
    slots = tuple(e.EngineSlot(id=EngineId(name)) for name in world.engine_degrees)
    world.feed(e.WorldLost(engines=slots))
    for name in world.engine_degrees:
        world.engine_epoch[name] = 0
        world.join(name)
    for event in later:
        world.later(event)
    world.until_delivered()
    assert {name.rpartition(".")[0] for name in world.delivered} >= submitted_ids
    for name, words in world.delivered.items():
        assert (
            len(words) == before[name] + 1 if name in untaken or not before[name] else before[name]
        )


@pytest.mark.parametrize("drain", [True, False])
def test_stopping_drains_or_cancels(drain: bool) -> None:
    world = Service(submitted=6, spread=3.0)
    world.start()
    while len(world.core.state.pools.run) < 3 or len(world.core.state.groups) < 6:
        world.step()
    world.close(drain=drain)
    reasons = Counter(words[-1].stop_reason for words in world.delivered.values())
    assert world.delivered.keys() == world.expected
    assert (StopReason.CANCELLED in reasons) == (not drain)
    later = Task(id=TaskId("late"), env="a", seed=0)
    assert (
        world.core.handle(
            world.now, e.RolloutsSubmitted(group_id=GroupId("late"), name="a", task=later)
        )
        == []
    )


def test_no_rollout_is_lost_when_engines_join_and_leave() -> None:
    world = Service(submitted=30, spread=0.4, seed=3)
    world.start()
    rng, number = random.Random(5), 0
    while world.delivered.keys() != world.expected or world.core.state.trajectories:
        assert world.handled < 50_000
        world.step()
        if world.handled % 25 == 0:
            names = list(world.core.state.engines)
            for name in rng.sample(names, min(len(names), 1)):
                world.feed(e.EngineWithdrawn(engine_id=EngineId(name), drain=rng.random() < 0.5))
            world.register(f"x{number}")
            number += 1
    assert set(world.core.state.counters.delivered) == {StopReason.FINISHED}, (
        "withdrawing an engine is nobody's failure"
    )
    assert number > 5


def test_rollouts_start_once_there_is_an_engine() -> None:
    world = Service(submitted=4)
    world.engine_degrees.clear()
    world.engine_epoch.clear()
    world.start()
    while len(world.core.state.groups) < 4:
        world.step()
    assert all(
        trajectory.stage is Stage.QUEUED for trajectory in world.core.state.trajectories.values()
    )
    world.register("x")
    world.until_delivered()
    assert world.core.state.phase is Phase.SERVING


@pytest.mark.parametrize("engine", ["none", "never ready", "lost for ever"])
def test_an_orderly_end_keeps_rollouts_that_need_an_engine(engine: str) -> None:
    """Finished rollouts are delivered; the next world does the rest, once."""
    world = Service(submitted=12, seed=7)
    if engine != "lost for ever":
        world.engine_degrees.clear()
        world.engine_epoch.clear()
    world.start()
    while len(world.core.state.groups) < 4 or (
        engine == "lost for ever" and not world.core.state.pools.eval
    ):
        world.step()
    if engine == "never ready":
        world.feed(e.EngineRegistered(engine=e.EngineSlot(id=EngineId("x"))))
    world.heap = [entry for entry in world.heap if not isinstance(entry[2], e.RolloutsSubmitted)]
    heapq.heapify(world.heap)
    if engine == "lost for ever":
        for name in world.engine_degrees:
            world.feed(e.EngineWithdrawn(engine_id=EngineId(name), drain=False))
    world.close(drain=True)
    assert (world.now - BEGIN_S > world.config.watchdog.start_s) == (engine == "never ready"), (
        "it may become ready until then"
    )
    state = world.core.state
    assert state.phase is Phase.FINISHED
    carried_over = [
        name
        for name, one in state.trajectories.items()
        if one.stage in (Stage.QUEUED, Stage.INIT, Stage.RUN)
    ]
    assert carried_over
    assert len(carried_over) == len(state.trajectories), "the rest was delivered"
    assert f"{len(carried_over)} rollouts are kept for the next start" in world.warnings[-1].message
    world.expected = {*world.delivered, *carried_over}
    assert all(len(words) == 1 for words in world.delivered.values())
    world.core, world.finish = Core.restore(world.core.snapshot(), world.config), None
    world.heap.clear()
    world.engine_version.clear()
    world.feed(e.WorldLost(engines=()))
    world.register("y")
    world.until_delivered()
    assert all(len(words) == 1 for words in world.delivered.values())
    assert {words[0].stop_reason for words in world.delivered.values()} == {StopReason.FINISHED}


def test_a_rollout_under_way_in_too_many_lost_worlds_is_given_up() -> None:
    world = Service(submitted=1)
    world.start()
    for life in range(MAX_WORLDS_LOST):
        while not world.core.state.pools.run:
            world.step()
        under_way = set(world.core.state.pools.run)
        assert not world.delivered
        world.core, before = Core.restore(world.core.snapshot(), world.config), len(world.warnings)
        world.heap.clear()
        world.feed(
            e.WorldLost(
                engines=tuple(e.EngineSlot(id=EngineId(name)) for name in world.engine_degrees)
            )
        )
        for name in world.engine_degrees:
            world.engine_epoch[name] = 0
            world.join(name)
        abandoned = [
            warning for warning in world.warnings[before:] if "is given up" in warning.message
        ]
        assert len(abandoned) == (len(under_way) if life == MAX_WORLDS_LOST - 1 else 0)
    world.until_delivered()
    assert {world.delivered[name][0].stop_reason for name in under_way} == {StopReason.WORLD_LOST}


class NeverWalked(dict[Any, Any]):
    """A table that may be queried, and must never be iterated over."""

    def __iter__(self) -> NoReturn:
        raise AssertionError("walked through")

    values = items = keys = __iter__


def test_checking_deadlines_does_not_walk_the_waiting_rollouts() -> None:
    """Otherwise a night of waiting for an engine, journaled as a check a second, would
    replay for minutes.
    """
    world = Service(submitted=4)
    world.engine_degrees.clear()
    world.engine_epoch.clear()
    world.start()
    while len(world.core.state.groups) < 4:
        world.step()
    state = world.core.state
    state.groups, state.trajectories = NeverWalked(state.groups), NeverWalked(state.trajectories)
    state.pools.queued = NeverWalked(state.pools.queued)
    (timer,) = world.core.handle(world.now + 1, e.TimerFired())
    assert isinstance(timer, c.SetTimer)


@pytest.mark.parametrize("scheduling", SCHEDULINGS)
def test_lengths_of_rollouts_are_predicted_where_a_policy_needs_them(
    scheduling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt is harvested, and the predictor is fitted from time to time."""
    monkeypatch.setattr(serving, "FIT_ROLLOUTS", 8)
    world = Service(scheduling=scheduling, cancels=0.1)
    world.start()
    world.until_delivered()
    commands = [command for commands in world.commands for command in commands]
    asked = {(command.trajectory_id, command.attempt) for command in of(commands, c.Predict)}
    harvested = [(command.trajectory_id, command.attempt) for command in of(commands, c.Harvest)]
    fits = sum(isinstance(command, c.FitPredictor) for command in commands)
    if scheduling == "turn":
        assert (asked, harvested, fits) == (set(), [], 0)
        return
    assert asked == set(harvested)
    assert len(asked) == len(harvested) > 10
    assert fits == len(world.delivered) // 8 > 1
    state = world.core.state
    # ours ranks a trajectory once it has had a turn, and these are short
    assert (state.counters.scheduling.plans > 0) == (scheduling == "heddle")
    assert all(stats.lengths for stats in state.mechanisms["lengths"].domains.values())


def calls_with_busy_engines(engines: int) -> int:
    """The number of function calls for an event that frees no slot, while turns wait
    for busy engines.
    """
    core = Core(config("sync", rollout={"scheduling": "turn", "max_running": 200}))
    names = [EngineId(f"e{number}") for number in range(engines)]
    core.handle(
        0.0, e.RunStarted(engines=tuple(e.EngineSlot(id=name) for name in names), serving=True)
    )
    for name in names:
        core.handle(
            0.0, e.EngineJoined(engine_id=name, epoch=0, max_slots=1, kv_total_tokens=9, version=0)
        )
    for number in range(engines + 4):
        task = Task(id=TaskId("t"), env="a", seed=0)
        core.handle(0.0, e.RolloutsSubmitted(group_id=GroupId(f"r{number}"), name="a", task=task))
        key = {"trajectory_id": TrajectoryId(f"r{number}.0"), "attempt": 0}
        core.handle(0.0, e.EnvReady(**key, prompt_tokens=1))
        core.handle(0.0, e.TurnRequested(**key, turn=0, context_tokens=1))
    assert len(core.state.turns.queue) == 4
    calls = 0

    def count(_frame: object, kind: str, _argument: object) -> None:
        nonlocal calls
        calls += kind == "call"

    sys.setprofile(count)
    core.handle(1.0, e.RolloutAcknowledged(trajectory_id=TrajectoryId("none")))
    sys.setprofile(None)
    return calls


def test_turns_waiting_for_busy_engines_cost_nothing_for_each_engine() -> None:
    assert calls_with_busy_engines(50) == calls_with_busy_engines(1)


def test_a_silent_engine_is_removed_and_rollouts_wait_for_another() -> None:
    world = Service(submitted=3)
    world.start()
    while not world.engine_version:
        world.step()
    for name in world.engine_degrees:
        while name in world.core.state.engines:
            engine = world.core.state.engines[EngineId(name)]
            if engine.status is EngineStatus.SERVING:
                world.feed(
                    e.EngineLost(engine_id=engine.id, epoch=engine.epoch, error="dies at each turn")
                )
            else:
                joined = e.EngineJoined(
                    engine_id=engine.id,
                    epoch=engine.epoch,
                    max_slots=2,
                    kv_total_tokens=9,
                    version=0,
                )
                world.feed(joined)
            assert world.handled < 5000, "it is started again for ever"
    assert world.core.state.phase is Phase.SERVING
    world.register("x")
    world.until_delivered()
