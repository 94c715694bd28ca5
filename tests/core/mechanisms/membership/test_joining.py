"""Engines that join and leave while a run trains: in every mode and phase, with relays,
and across restarts of the controller.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.core.core import Core
from rollweave.core.mechanisms.lengths.index import work_of
from rollweave.core.mechanisms.membership.members import engines_to_start, first_engines, next_id
from rollweave.core.state import EngineStatus, Phase
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId
from tests.support.core import ALLOCATION, MODES, SCHEDULINGS, config
from tests.support.hand import E0, E1, E2, Hand, decoupled_config, misassigned
from tests.support.kinds import of
from tests.support.properties import examples
from tests.support.random_world import World
from tests.support.relay_driver import Driver


def registered(name: EngineId | None, *, degree: int = 1, group: int = 0) -> e.EngineRegistered:
    assert name is not None
    return e.EngineRegistered(engine=e.EngineSlot(id=name, degree=degree, group=group))


def restart(world: World) -> None:
    """Lose the controller; its new world begins with the engines of
    `engines_to_start`.
    """
    world.heap.clear()
    world.timer, world.finish = None, None
    world.core = Core.restore(world.core.snapshot(), world.config)
    slots = engines_to_start(world.config, world.core.state)
    world.engine_degrees = {str(slot.id): slot.degree for slot in slots}
    world.engine_hosts = {str(slot.id): slot.host for slot in slots}
    world.engine_epoch = dict.fromkeys(world.engine_degrees, 0)
    world.engine_version.clear()
    world.feed(e.WorldLost(engines=slots, relays=world.begin_relays()))
    if world.finish is None:
        for name in world.engine_epoch:
            world.join(name)
        for name in world.relay_epoch:
            world.join_relay(name)


@settings(max_examples=examples(80))
@given(
    seed=st.integers(0, 2**16),
    mode=st.sampled_from([*MODES, "decoupled", "decoupled"]),
    scheduling=st.sampled_from(sorted(SCHEDULINGS)),
    failure=st.sampled_from([0.0, 0.0, 0.05]),
    relays=st.sampled_from([0, 0, 2]),
    kills=st.lists(st.integers(1, 300), max_size=2),
)
def test_any_run_whose_engines_join_and_leave_ends_accounted_for(
    seed: int, mode: str, scheduling: str, failure: float, relays: int, kills: list[int]
) -> None:
    """The world never starts an engine that the core has not requested, and `check`
    holds after each event.
    """
    run = {"rollout": SCHEDULINGS[scheduling], "eval": {"every": 2}, "weights": {"relays": relays}}
    world = World(
        config(mode, **run, watchdog={"restarts": 1000}), seed, failure=failure, restless=0.05
    )
    world.start()
    for kill in kills:
        for _ in range(kill):
            if world.finish is None:
                world.step()
        state = world.core.state
        joined = sum(engine.joined and not engine.leaving for engine in state.engines.values())
        removed = {
            *state.membership.withdrawn,
            *(
                engine.id
                for engine in state.engines.values()
                if engine.leaving and not engine.joined
            ),
        }
        restart(world)
        state = world.core.state
        assert len(state.engines) == (len(first_engines(world.config)) - len(removed) + joined or 2)
    world.run_on()
    assert world.finish.error == "" or failure
    account = world.core.account()
    assert account.balanced
    assert account.in_flight == 0
    everything = [member for ids in world.trained.values() for member in ids]
    assert len(everything) == len(set(everything))


def test_the_random_runs_do_have_engines_that_join_and_leave() -> None:
    """Otherwise the test above would show nothing."""
    world = World(config("decoupled", steps=8), seed=2, restless=0.05)
    world.run()
    counters = world.core.state.counters
    assert counters.engines_joined > 3
    assert counters.engines_left > 3
    turns = {turn.engine_id for turn in world.sent(c.StartTurn)}
    assert len(turns) > 2, "none that came was given a turn"


# Joining.


def test_an_engine_that_joins_is_stale_until_loaded_and_launches_a_batch() -> None:
    hand = Hand(decoupled_config(engines=1, rollout={"max_running": 8}))
    state = hand.core.state
    hand.feed(registered(next_id(state)))
    assert state.engines[E1].status is EngineStatus.STARTING
    assert hand.on(E1) == []
    hand.join(E1)
    assert (state.engines[E1].status, state.engines[E1].version) == (EngineStatus.SERVING, 0)
    assert hand.loads[-1].engine_id == E1
    assert len(hand.on(E1)) == 2, "its batch"
    hand.feed(registered(E1))  # reported twice
    assert [engine.id for engine in state.engines.values()] == [E0, E1]
    assert state.counters.engines_joined == 1


def test_an_engine_that_joins_is_on_a_host_that_is_up() -> None:
    driver = Driver(3, restarts=0).up()
    driver.publish()
    for relay in ("r0", "r1", "r2"):
        driver.hold(relay, 0)
    driver.engines_up()
    for engine in ("e0", "e1", "e2"):
        driver.send(
            e.WeightsLoaded(engine_id=EngineId(engine), epoch=0, version=0, publication_id=0)
        )
    driver.send(e.RelayLost(relay_id="r0", epoch=0, error="killed"))
    state = driver.core.state
    assert {engine.id: engine.seat.host for engine in state.engines.values()} == {
        "e1": 1,
        "e2": 2,
        "e3": 1,  # in place of that of the host that is given up
    }
    started = of(driver.send(registered(EngineId("e4"))), c.StartEngine)
    assert [(command.engine_id, command.host) for command in started] == [("e4", 2)]
    (load,) = driver.send(
        e.EngineJoined(engine_id=EngineId("e4"), epoch=0, max_slots=3, kv_total_tokens=9)
    )
    assert isinstance(load, c.LoadWeights)


def test_an_engine_of_another_group_has_its_settings() -> None:
    run_config = config("bounded").model_copy(update={"engines": config("bounded").engines * 2})
    core = Core(run_config)
    core.handle(0.0, e.RunStarted(engines=first_engines(run_config)))
    assert [engine.seat.group for engine in core.state.engines.values()] == [0, 0, 1, 1]
    started = core.handle(1.0, registered(EngineId("e4"), degree=2, group=1))
    assert started[0] == c.StartEngine(engine_id=EngineId("e4"), degree=2, group=1)
    assert not of(core.handle(1.0, registered(EngineId("e5"), group=2)), c.StartEngine)


def test_a_planned_fleet_refuses_joins_and_withdrawals() -> None:
    run_config = config("bounded", rollout={"scheduling": "trajectory"}, allocation=ALLOCATION)
    core = Core(run_config)
    core.handle(0.0, e.RunStarted(engines=first_engines(run_config)))
    before = list(core.state.engines)
    core.handle(0.0, registered(next_id(core.state)))
    core.handle(0.0, e.EngineWithdrawn(engine_id=E0, drain=True))
    assert list(core.state.engines) == before
    assert not core.state.engines[E0].draining


def test_an_engine_that_joins_while_the_trainer_is_down_loads_the_newest_checkpoint() -> None:
    hand = Hand(decoupled_config(run={"checkpoint_every": 1}, rollout={"max_running": 12}))
    state = hand.core.state
    misassigned(hand)
    assert (state.publication.version, max(state.publication.checkpointed.values())) == (1, 1)
    hand.lose_trainer()
    hand.feed(registered(E2))
    hand.join(E2)
    assert (hand.loads[-1].engine_id, hand.loads[-1].from_checkpoint) == (E2, 1)
    assert state.engines[E2].version == 1
    assert len(hand.on(E2)) == 2
    hand.restore_trainer(1)
    while state.engines[E2].publication_id != state.publication.id and hand.on(E2):
        hand.end(hand.on(E2)[0])  # it launches the rest of its batch first
    assert state.engines[E2].publication_id == state.publication.id, "it goes on with the trainer"


def test_an_engine_may_join_for_the_final_evaluation() -> None:
    world = World(config("sync", steps=1), seed=3)
    world.start()
    while world.core.state.phase is not Phase.EVALUATING:
        world.step()
    world.feed(registered(E2))
    world.run_on()
    assert world.finish.error == ""
    assert any(
        isinstance(command, c.LoadWeights) and command.engine_id == E2
        for out in world.commands
        for command in out
    )


# Leaving.


def test_a_draining_engine_finishes_only_its_own_trajectories() -> None:
    hand = Hand(decoupled_config())
    on_e1 = hand.on(E1)
    hand.feed(e.EngineWithdrawn(engine_id=E1, drain=True))
    state = hand.core.state
    assert set(hand.on(E1)) == set(on_e1)
    hand.end(on_e1[0])
    assert hand.on(E1) == [on_e1[1]], "it begins nothing"
    hand.done(on_e1[1])
    hand.feed(hand.requests(on_e1[1]))
    assert hand.on(E1) == [on_e1[1]], "its next turn is still there"
    hand.end(on_e1[1])
    assert list(state.engines) == [E0]
    assert (state.counters.engines_left, state.membership.withdrawn) == (1, [E1])
    assert state.trajectories[on_e1[0]].attempt == state.trajectories[on_e1[1]].attempt == 0


def test_an_engine_withdrawn_without_drain_gives_its_turns_to_others() -> None:
    hand = Hand(decoupled_config())
    on_e1 = hand.on(E1)
    hand.feed(e.EngineWithdrawn(engine_id=E1, drain=False))
    assert list(hand.core.state.engines) == [E0]
    for name in hand.on(E0):
        hand.end(name)
    assert set(on_e1) <= set(hand.on(E0))
    assert all(hand.core.state.trajectories[name].attempt == 0 for name in on_e1)


def test_a_withdrawal_is_no_failure_of_a_turn() -> None:
    hand = Hand(decoupled_config(rollout={"retries": 0}))
    on_e1 = hand.on(E1)
    hand.feed(e.EngineWithdrawn(engine_id=E1, drain=False))
    state = hand.core.state
    assert list(state.engines) == [E0]
    for name in hand.on(E0):
        hand.end(name)
    assert set(on_e1) <= set(hand.on(E0))
    assert all(state.trajectories[name].attempt == 0 for name in on_e1)
    assert state.counters.watchdog == {}


def test_trajectories_of_a_lost_engine_prefer_an_engine_that_stays() -> None:
    hand = Hand(decoupled_config(engines=3))
    orphans = hand.on(E2)
    hand.feed(e.EngineWithdrawn(engine_id=E1, drain=True))
    hand.lose(E2)
    homes = {
        work_of(hand.core._run, hand.core.state.trajectories[name]).assigned_engine
        for name in orphans
    }
    assert homes == {E0}


@pytest.mark.parametrize("drain", [True, False])
def test_the_last_engine_stays(drain: bool) -> None:
    hand = Hand(decoupled_config(engines=1))
    hand.feed(e.EngineWithdrawn(engine_id=E0, drain=drain))
    hand.feed(registered(E1))
    hand.feed(e.EngineWithdrawn(engine_id=E0, drain=drain))
    assert not hand.core.state.engines[E0].leaving, "the other one has no weights yet"
    hand.join(E1)
    hand.feed(e.EngineWithdrawn(engine_id=E0, drain=drain))
    engine = hand.core.state.engines.get(E0)
    assert engine is None or engine.leaving


def test_a_leaving_engine_stays_if_all_others_are_lost() -> None:
    hand = Hand(decoupled_config(watchdog={"restarts": 0}))
    hand.feed(e.EngineWithdrawn(engine_id=E1, drain=True))
    hand.lose(E0)  # its turns may be to blame
    hand.lose(E0)
    state = hand.core.state
    assert list(state.engines) == [E1]
    assert not state.engines[E1].leaving
    assert state.counters.watchdog["engine_stays"] == 1
    for name in hand.on(E1):
        hand.end(name)
    for _ in range(2):  # those of the lost engine, one after another
        (name,) = hand.on(E1)
        hand.end(name)
    assert len(hand.on(E1)) == 2, "it begins others again"


# Later lives.


def test_restarted_worlds_have_the_registered_engines() -> None:
    run_config = config("bounded", engines={"count": 3})
    core = Core(run_config)
    core.handle(0.0, e.RunStarted(engines=first_engines(run_config)))
    for name in ("e3", "e4", "e5"):
        core.handle(0.0, registered(EngineId(name)))
    for name in ("e1", "e4"):
        core.handle(0.0, e.EngineWithdrawn(engine_id=EngineId(name), drain=True))
    expected = ["e0", "e2", "e3", "e5"]
    assert [slot.id for slot in engines_to_start(run_config, core.state)] == expected
    core.handle(1.0, e.WorldLost(engines=engines_to_start(run_config, core.state)))
    core.check()
    assert next_id(core.state) == "e6"
    larger = config("bounded", engines={"count": 5})
    again = engines_to_start(larger, core.state)
    assert [slot.id for slot in again] == ["e0", "e2", "e3", "e4", "e6", "e5"], (
        "a number of the configuration is not taken"
    )


def test_an_engine_leaving_when_the_controller_was_lost_has_left_for_good() -> None:
    """It is gone also in the world after the next one, and it is counted."""
    run_config = config("decoupled", engines={"count": 3})
    core = Core(run_config)
    core.handle(0.0, e.RunStarted(engines=first_engines(run_config)))
    core.handle(0.0, registered(EngineId("e3")))
    for name in ("e1", "e3"):
        core.state.engines[EngineId(name)].leaving = True  # its trajectories continue
    for life in (1.0, 2.0, 3.0):
        slots = engines_to_start(run_config, core.state)
        assert [slot.id for slot in slots] == ["e0", "e2"]
        core.handle(life, e.WorldLost(engines=slots))
        core.check()
    assert core.state.counters.engines_left == 2
