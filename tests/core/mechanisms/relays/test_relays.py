"""Relays: which relay fetches weights from which, what follows the loss of one, and
what engines may load.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.core.mechanisms.relays.state import RelayStatus
from rollweave.core.state import EngineStatus
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId
from tests.support import core
from tests.support.kinds import of
from tests.support.properties import examples
from tests.support.random_world import World
from tests.support.relay_driver import Driver


def ways(commands: list[c.Command]) -> dict[str, str | None]:
    """Return the relays that are commanded to fetch, with their sources."""
    return {command.relay_id: command.source for command in of(commands, c.FetchWeights)}


def bases(commands: list[c.Command]) -> dict[str, int | None]:
    return {command.relay_id: command.base_id for command in of(commands, c.FetchWeights)}


def loads(commands: list[c.Command]) -> list[tuple[str, int]]:
    return [(command.engine_id, command.publication_id) for command in of(commands, c.LoadWeights)]


@pytest.mark.parametrize("relays", [1, 2, 5])
def test_published_weights_go_along_the_chain_at_once(relays: int) -> None:
    driver = Driver(relays).up()
    commands = driver.publish()
    assert ways(commands) == {
        f"r{number}": f"r{number - 1}" if number else None for number in range(relays)
    }
    assert set(bases(commands).values()) == {None}, "no relay has a base"


def test_the_next_weights_are_sent_as_changes_if_both_ends_have_the_last() -> None:
    driver = Driver(3).up()
    driver.publish()
    for relay in ("r0", "r1", "r2"):
        driver.hold(relay, 0)
    assert bases(driver.publish_again()) == {"r0": 0, "r1": 0, "r2": 0}, (
        "the master makes the changes"
    )
    for relay in ("r0", "r1", "r2"):
        driver.hold(relay, 1)
    driver.lose("r1")
    driver.join("r1")
    driver.hold("r1", 1)
    assert bases(driver.publish_again()) == {"r0": 1, "r2": 1, "r1": 1}


def test_a_relay_without_others_makes_no_changes() -> None:
    driver = Driver(1).up()
    driver.publish()
    driver.hold("r0", 0)
    assert bases(driver.publish_again()) == {"r0": None}


def test_without_delta_every_fetch_is_whole() -> None:
    driver = Driver(2, delta=False).up()
    driver.publish()
    driver.hold("r0", 0)
    driver.hold("r1", 0)
    assert bases(driver.publish_again()) == {"r0": None, "r1": None}


def test_the_faster_form_of_broadcast_is_used() -> None:
    """Whole first, since there is no base; then changes; then the form that was
    faster.
    """
    driver = Driver(2).up()
    forms = []
    for seconds in (1.0, 3.0, 1.0, 1.0):
        commands = driver.publish() if not forms else driver.publish_again()
        forms.append("whole" if bases(commands)["r1"] is None else "changes")
        publication_id = driver.core.state.publication.id
        driver.hold("r0", publication_id)
        driver.wait(seconds)
        driver.hold("r1", publication_id)
    assert forms == ["whole", "changes", "whole", "whole"]
    assert driver.chain.broadcast_s == {"whole": 1.0, "changes": 3.0}


@settings(max_examples=examples(60))
@given(relays=st.integers(2, 6), data=st.data())
def test_only_the_successor_of_a_lost_relay_gets_another_source(
    relays: int, data: st.DataObject
) -> None:
    driver = Driver(relays).up()
    driver.publish()
    chain = [f"r{number}" for number in range(relays)]
    for relay in chain[: data.draw(st.integers(0, relays - 1))]:
        driver.hold(relay, 0)
    lost = data.draw(st.sampled_from(chain))
    at, left = chain.index(lost), [relay for relay in chain if relay != lost]
    source = left[at - 1] if at else None
    waits = left[at:][:1] if driver.relay((*left, lost)[at]).status is RelayStatus.FETCHING else []
    assert ways(driver.lose(lost)) == dict.fromkeys(waits, source)
    assert driver.chain.order == left


def test_a_restarted_relay_is_last_and_fetches_the_newest() -> None:
    driver = Driver(3).up()
    driver.publish()
    for relay in ("r0", "r1", "r2"):
        driver.hold(relay, 0)
    driver.lose("r0")
    assert ways(driver.join("r0")) == {"r0": "r2"}
    assert driver.chain.order == ["r1", "r2", "r0"]
    assert ways(driver.publish_again()) == {"r1": None, "r2": "r1"}, (
        "r0 is still busy with the weights before"
    )
    assert ways(driver.hold("r0", 0)) == {"r0": "r2"}


def test_an_engine_loads_versions_of_its_own_machine() -> None:
    driver = Driver(2).up()
    driver.publish()
    assert loads(driver.engines_up()) == []
    assert loads(driver.hold("r0", 0)) == [("e0", 0)]
    assert loads(driver.hold("r1", 0)) == [("e1", 0)]


def test_an_engine_serves_its_weights_while_its_relay_is_down() -> None:
    driver = Driver(1).up()
    driver.publish()
    driver.engines_up()
    driver.hold("r0", 0)
    driver.send(e.WeightsLoaded(engine_id=EngineId("e0"), epoch=0, version=0, publication_id=0))
    driver.publish_again()
    suspended = driver.hold("r0", 1)
    assert of(suspended, c.SuspendEngine)
    driver.lose("r0")
    commands = driver.send(e.EngineSuspended(engine_id=EngineId("e0"), epoch=0))
    assert [type(command) for command in commands if not isinstance(command, c.DrawTask)] == [
        c.ResumeEngine
    ]
    engine = driver.core.state.engines[EngineId("e0")]
    assert (engine.status, engine.publication_id) == (EngineStatus.SERVING, 0)
    driver.join("r0")
    assert of(driver.hold("r0", 1), c.SuspendEngine)


def test_a_change_that_does_not_fit_is_followed_by_the_whole_version() -> None:
    driver = Driver(2).up()
    driver.publish()
    driver.hold("r0", 0)
    driver.hold("r1", 0)
    driver.publish_again()
    commands = driver.refuse("r1", "base")
    assert (ways(commands), bases(commands)) == ({"r1": "r0"}, {"r1": None})


def test_a_broken_change_is_fetched_whole_from_a_relay_that_has_it() -> None:
    driver = Driver(3).up()
    driver.publish()
    for relay in ("r0", "r1", "r2"):
        driver.hold(relay, 0)
    driver.publish_again()
    driver.hold("r0", 1)
    commands = driver.refuse("r2", "broken")  # r1, before it, is still taking
    assert (ways(commands), bases(commands)) == ({"r2": "r0"}, {"r2": None})


def test_a_failed_source_is_retried_only_after_the_watchdogs_check() -> None:
    driver = Driver(2).up()
    driver.publish()
    assert ways(driver.refuse("r1", "source")) == {}
    assert ways(driver.wait(1.0)) == {"r1": "r0"}


def test_the_loss_of_the_trainer_is_blamed_on_no_relay() -> None:
    driver = Driver(2).up()
    driver.publish()
    for _ in range(300):
        if driver.relay("r0").fetch is not None:
            driver.refuse("r0", "source")
        assert not of(driver.wait(1.0), c.RestartRelay)
    expected = [0, 0]
    assert [relay.restarts for relay in driver.chain.relays.values()] == expected


def test_a_relay_that_always_refuses_is_restarted() -> None:
    driver = Driver(2).up()
    driver.publish()
    driver.hold("r0", 0)
    restarted: list[c.Command] = []
    for _ in range(70):
        if driver.relay("r1").fetch is not None:
            driver.refuse("r1", "room")
        restarted += of(driver.wait(1.0), c.RestartRelay)
    assert [command.relay_id for command in restarted] == ["r1"]  # type: ignore[union-attr]


def test_of_relays_that_wait_for_each_other_only_the_first_is_late() -> None:
    driver = Driver(3).up()
    driver.publish()
    driver.hold("r0", 0)
    commands = driver.wait(61.0)
    assert [command.relay_id for command in of(commands, c.RestartRelay)] == ["r1"]
    assert ways(commands) == {"r2": "r0"}


def test_the_failure_of_an_outdated_fetch_is_ignored() -> None:
    driver = Driver(3).up()
    driver.publish()
    old = driver.relay("r2").fetches
    driver.lose("r1")
    assert driver.source("r2") == "r0"
    stale = e.FetchFailed(
        relay_id="r2",
        epoch=0,
        publication_id=0,
        fetch_number=old,
        reason="source",
        error="r1 is gone",
    )
    assert ways(driver.send(stale)) == {}
    assert driver.source("r2") == "r0"


def test_the_failure_of_a_fetch_that_is_over_is_ignored() -> None:
    driver = Driver(2).up()
    over = e.FetchFailed(
        relay_id="r1",
        epoch=0,
        publication_id=0,
        fetch_number=0,
        reason="source",
        error="r0 is gone",
    )
    assert driver.send(over) == []


def serving(driver: Driver, *relays: str) -> None:
    for relay in relays:
        for command in driver.hold(relay, 0):
            if isinstance(command, c.LoadWeights):
                driver.send(
                    e.WeightsLoaded(
                        engine_id=command.engine_id, epoch=0, version=0, publication_id=0
                    )
                )


def test_a_relay_that_fails_repeatedly_has_its_machine_evicted() -> None:
    driver = Driver(2, restarts=1).up()
    driver.publish()
    driver.engines_up()
    serving(driver, "r0", "r1")
    assert [type(command) for command in driver.lose("r1")] == [c.Warn, c.RestartRelay]
    commands = driver.lose("r1")
    assert [command.relay_id for command in of(commands, c.RemoveRelay)] == ["r1"]
    assert [command.engine_id for command in of(commands, c.RemoveEngine)] == ["e1"]
    assert [(command.engine_id, command.host) for command in of(commands, c.StartEngine)] == [
        ("e2", 0)
    ]
    assert not of(commands, c.Finish)
    # an error would wait for it
    driver.send(e.CheckpointSaved(epoch=driver.core.state.trainer.epoch, step=0))
    last = [*driver.lose("r0"), *driver.lose("r0")]
    assert of(last, c.Finish)[0].error.startswith("no engine is left")


@pytest.mark.parametrize("elsewhere", [True, False])
def test_an_engine_that_fails_repeatedly_has_its_machine_evicted_if_others_serve(
    elsewhere: bool,
) -> None:
    driver = Driver(2, restarts=1).up()
    driver.publish()
    driver.engines_up()
    serving(driver, "r0", *(["r1"] if elsewhere else []))
    commands = [
        command
        for epoch in (0, 1)
        for command in driver.send(
            e.EngineLost(engine_id=EngineId("e0"), epoch=epoch, error="killed")
        )
    ]
    assert [command.engine_id for command in of(commands, c.RemoveEngine)] == ["e0"]
    assert [command.relay_id for command in of(commands, c.RemoveRelay)] == (
        ["r0"] if elsewhere else []
    )


def test_versions_that_engines_have_are_retained() -> None:
    driver = Driver(2).up()
    driver.publish()
    driver.engines_up()
    serving(driver, "r0", "r1")
    commands = driver.publish_again()
    expected = [(0,), (0,)]
    assert [command.keep for command in of(commands, c.FetchWeights)] == expected
    retried = driver.send(e.TrainerLost(epoch=1, error="killed")) + driver.send(
        e.TrainerReady(epoch=2, step=0)
    )
    assert [command.keep for command in of(retried, c.PublishWeights)] == [(0, 1)]


@pytest.mark.timeout(900)
@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 10_000),
    mode=st.sampled_from(core.MODES),
    relays=st.integers(1, 5),
    failure=st.sampled_from([0.0, 0.02, 0.1]),
    hang=st.sampled_from([0.0, 0.0, 0.01]),
    scheduling=st.sampled_from(sorted(core.SCHEDULINGS)),
    allocation=st.booleans(),
    delta=st.booleans(),
    restarts=st.sampled_from([1, 100]),
)
def test_any_world_with_relays_ends_accounted_for(
    seed: int,
    mode: str,
    relays: int,
    failure: float,
    hang: float,
    scheduling: str,
    allocation: bool,
    delta: bool,
    restarts: int,
) -> None:
    plans = allocation and mode != "decoupled"
    run_config = core.config(
        mode,
        rollout=core.SCHEDULINGS[scheduling],
        engines={} if plans else {"count": 5},
        allocation=core.ALLOCATION if plans else None,
        weights={"relays": relays},
        ablation={"changes": [] if delta else ["no_deltas"]},
        eval={"every": 2},
        watchdog={"restarts": restarts},
    )
    world = World(run_config, seed, failure=failure, hang=hang)
    finish = world.run()
    account = world.core.account()
    assert account.balanced
    assert account.in_flight == 0
    if restarts > 1:
        assert finish.error == "" or "checkpoint" in finish.error
    if not finish.error:
        assert sorted(world.trained) == [0, 1, 2, 3]
        assert world.all_fetches


@settings(max_examples=examples(25))
@given(
    seed=st.integers(0, 10_000),
    sick=st.sets(st.sampled_from(["r0", "r1", "r2"]), min_size=1, max_size=2),
)
def test_machines_whose_relays_never_start_are_evicted(seed: int, sick: set[str]) -> None:
    world = World(core.config("bounded", engines={"count": 4}, weights={"relays": 3}), seed)
    world.dying_relays = sick
    finish = world.run()
    assert finish.error == ""
    removed = {command.relay_id for command in world.sent(c.RemoveRelay)}
    assert removed <= sick  # all of them, unless the run was over before
    assert sorted(world.trained) == [0, 1, 2, 3]


@settings(max_examples=examples(20))
@given(
    seed=st.integers(0, 10_000),
    mode=st.sampled_from(core.MODES),
    kills=st.lists(st.integers(5, 300), min_size=1, max_size=3),
    relays=st.integers(1, 3),
)
def test_the_controller_may_be_lost_with_its_relays(
    seed: int, mode: str, kills: list[int], relays: int
) -> None:
    world = World(
        core.config(mode, engines={"count": 3}, weights={"relays": relays}), seed, failure=0.01
    )
    core.run_with_lost_controllers(world, kills)


def test_a_relays_timeout_starts_when_its_source_is_done() -> None:
    driver = Driver(2).up()
    driver.publish()
    driver.now += 50.0
    driver.hold("r0", 0)
    assert not of(driver.wait(50.0), c.RestartRelay)
    assert of(driver.wait(11.0), c.RestartRelay)


def test_failures_of_a_relay_that_survives_a_version_are_forgiven() -> None:
    driver = Driver(2, restarts=1).up()
    driver.publish()
    driver.lose("r1")
    driver.join("r1")
    driver.hold("r0", 0)
    driver.hold("r1", 0)
    assert driver.relay("r1").restarts == 1, "the first may be the last"
    driver.publish_again()
    driver.hold("r0", 1)
    driver.hold("r1", 1)
    assert [type(command) for command in driver.lose("r1")] == [c.Warn, c.RestartRelay]


def test_a_relays_newest_version_is_the_base_of_changes_even_if_no_engine_has_it() -> None:
    driver = Driver(2).up()
    driver.publish()
    driver.hold("r0", 0)
    driver.hold("r1", 0)
    commands = of(driver.publish_again(), c.FetchWeights)
    assert [command.keep for command in commands] == [(0,), (0,)]
    retried = driver.send(e.TrainerLost(epoch=1, error="killed")) + driver.send(
        e.TrainerReady(epoch=2, step=0)
    )
    published = of(retried, c.PublishWeights)[0]
    assert set(published.keep) >= {0, 1}, (
        "a relay that takes 1 from the trainer, and changes of 0, still need them"
    )


def test_a_relay_from_which_an_engine_cannot_load_is_restarted_with_it() -> None:
    driver = Driver(1).up()
    driver.publish()
    driver.engines_up()
    assert loads(driver.hold("r0", 0)) == [("e0", 0)]
    failed = e.WeightsLoadFailed(
        engine_id=EngineId("e0"), epoch=0, publication_id=0, error="not there"
    )
    assert loads(driver.send(failed)) == [("e0", 0)]
    kinds = {type(command) for command in driver.send(failed)}
    assert {c.RestartEngine, c.RestartRelay} <= kinds


def test_a_source_that_should_have_the_version_and_fails_is_restarted_too() -> None:
    driver = Driver(2).up()
    driver.publish()
    driver.hold("r0", 0)
    restarted: list[str] = []
    for _ in range(70):
        if driver.relay("r1").fetch is not None:
            driver.refuse("r1", "source")
        restarted += [command.relay_id for command in of(driver.wait(1.0), c.RestartRelay)]
    assert sorted(restarted) == ["r0", "r1"]


# Relays that are silent for a moment.


def test_a_relay_whose_source_hangs_switches_to_the_one_before_it_and_stays_there() -> None:
    driver = Driver(4).up()
    driver.publish()
    assert ways(driver.suspect("r1")) == {"r2": "r0"}
    assert (driver.chain.order, driver.source("r1")) == (
        ["r0", "r1", "r2", "r3"],
        "r0",
    ), "it keeps its place"
    assert ways(driver.recover("r1")) == {}
    assert ways(driver.lose("r0")) == {"r1": None, "r2": "r1"}, "it is a source as any other"


def test_the_relay_behind_a_hanging_master_fetches_from_the_trainer() -> None:
    driver = Driver(3).up()
    driver.publish()
    assert ways(driver.suspect("r0")) == {"r1": None}
    assert ways(driver.recover("r0")) == {}
    expected = [None, None, "r1"]
    assert [driver.source(relay) for relay in driver.chain.order] == expected
    for relay in driver.chain.order:
        driver.hold(relay, 0)
    assert ways(driver.publish_again()) == {"r0": None, "r1": "r0", "r2": "r1"}, (
        "the master is what it was"
    )


def test_two_hanging_neighbors_are_both_skipped() -> None:
    driver = Driver(5).up()
    driver.publish()
    assert ways(driver.suspect("r2")) == {"r3": "r1"}
    assert ways(driver.suspect("r1")) == {"r3": "r0"}, "r2 is silent itself and keeps its source"
    assert ways(driver.recover("r2")) == {"r2": "r0"}
    assert ways(driver.lose("r1")) == {}


def test_if_all_relays_hang_all_wait() -> None:
    driver = Driver(3).up()
    driver.publish()
    driver.hold("r0", 0)
    for relay in ("r2", "r1", "r0"):
        assert ways(driver.suspect(relay)) == {}
    assert ways(driver.wait(1.0)) == {}
    assert ways(driver.recover("r2")) == {"r2": None}
    assert ways(driver.recover("r1")) == {"r1": None}
    assert ways(driver.recover("r0")) == {}


def test_a_relay_without_another_source_waits_for_the_hanging_one() -> None:
    driver = Driver(3).up()
    driver.publish()
    driver.hold("r0", 0)
    driver.hold("r1", 0)
    driver.publish_again()
    driver.refuse("r0", "source")  # the trainer is gone
    assert driver.relay("r1").fetch is None
    driver.wait(1.0)
    assert (driver.source("r0"), driver.source("r1")) == (None, "r0")
    driver.suspect("r0")
    assert driver.source("r1") is None
    driver.refuse("r1", "source")
    assert ways(driver.recover("r0")) == {"r1": "r0"}


def test_a_relay_restarted_while_others_hang_fetches_from_a_responsive_one() -> None:
    driver = Driver(3).up()
    driver.publish()
    for relay in ("r0", "r1", "r2"):
        driver.hold(relay, 0)
    driver.lose("r0")
    driver.suspect("r2")
    assert ways(driver.join("r0")) == {"r0": "r1"}


def test_a_relay_that_stays_suspected_is_restarted() -> None:
    driver = Driver(2).up()
    driver.suspect("r1")
    driver.suspect("r1")
    assert not of(driver.wait(60.0), c.RestartRelay)
    commands = driver.wait(0.1)
    assert [command.relay_id for command in of(commands, c.RestartRelay)] == ["r1"]
    assert not driver.relay("r1").suspected
    driver.send(e.RelaySuspected(relay_id="r1", epoch=0))
    assert not driver.relay("r1").suspected, "that report was about its former process"


def test_engines_load_from_the_memory_of_a_hanging_relay() -> None:
    driver = Driver(1).up()
    driver.publish()
    driver.hold("r0", 0)
    driver.suspect("r0")
    assert loads(driver.engines_up()) == [("e0", 0)]


def test_a_stalled_relay_tries_each_other_source_once() -> None:
    driver = Driver(4).up()
    driver.publish()
    assert ways(driver.stall("r1")) == {}, "the trainer is not for it, and all others stand behind"
    assert ways(driver.stall("r3")) == {"r3": "r1"}
    assert ways(driver.stall("r3")) == {"r3": "r0"}
    assert ways(driver.stall("r3")) == {}, "a slow link is better than none"
    stale = e.FetchStalled(relay_id="r3", epoch=0, publication_id=0, source="r2")
    assert ways(driver.send(stale)) == {}, "it has left r2 before"
    for relay in ("r0", "r1", "r2", "r3"):
        driver.hold(relay, 0)
    driver.publish_again()
    assert ways(driver.stall("r3")) == {"r3": "r1"}, "these weights are others"


def test_a_relay_returns_to_a_stalled_source_if_there_is_no_other() -> None:
    driver = Driver(3).up()
    driver.publish()
    assert ways(driver.stall("r2")) == {"r2": "r0"}
    assert ways(driver.lose("r0")) == {"r1": None, "r2": "r1"}


def may_give(driver: Driver, relay: str, version: int) -> list[str | None]:
    """The rule, slowly: a responsive relay that holds these weights, or stands before
    it and is fetching them; the trainer, if all relays before it are silent.
    """
    chain = driver.chain.order
    ahead = chain[: chain.index(relay)]
    givers: list[str | None] = [
        other
        for other in chain
        if other != relay
        and not driver.relay(other).suspected
        and (
            version in driver.relay(other).versions
            or (other in ahead and driver.relay(other).fetching == version)
        )
    ]
    return [*givers, None] if all(driver.relay(other).suspected for other in ahead) else givers


def step(driver: Driver, data: st.DataObject) -> list[c.Command]:
    """Any event that may happen to relays."""
    name = data.draw(st.sampled_from(sorted(driver.chain.relays)))
    relay = driver.relay(name)
    if relay.status is RelayStatus.STARTING:
        return driver.join(name)
    deeds = ["lose", "recover" if relay.suspected else "suspect", "publish", "wait"]
    if relay.fetch is not None and not relay.suspected:
        source = relay.fetch.source
        has = source is None or relay.fetch.publication_id in driver.relay(source).versions
        deeds += [
            "refuse",
            *(["stall"] if source is not None else []),
            *(["hold"] * 3 if has else []),
        ]
    match data.draw(st.sampled_from(deeds)):
        case "lose":
            return driver.lose(name)
        case "recover":
            return driver.recover(name)
        case "suspect":
            return driver.suspect(name)
        case "publish":
            return driver.publish_again()
        case "hold":
            return driver.hold(name, driver.fetch(name).publication_id)
        case "stall":
            return driver.stall(name)
        case "refuse":
            return driver.refuse(
                name, data.draw(st.sampled_from(["source", "base", "broken", "room"]))
            )
        case _:
            return driver.wait(1.0)


@settings(max_examples=examples(150))
@given(relays=st.integers(1, 6), data=st.data())
def test_every_relay_that_can_fetches_from_a_responsive_one(
    relays: int, data: st.DataObject
) -> None:
    driver = Driver(relays, restarts=1000).up()
    driver.publish()
    for _ in range(data.draw(st.integers(1, 30))):
        before = {name: (relay.fetch, relay.epoch) for name, relay in driver.chain.relays.items()}
        commands = of(step(driver, data), c.FetchWeights)
        state = driver.core.state
        for command in commands:
            assert command.source in may_give(driver, command.relay_id, command.publication_id), (
                command
            )
            former, epoch = before[command.relay_id]
            relay = driver.relay(command.relay_id)
            if (
                former is not None
                and (former.publication_id, epoch) == (command.publication_id, relay.epoch)
                and former.source != command.source
            ):
                assert former.source not in may_give(
                    driver, relay.id, former.publication_id
                ) or former.source in [*relay.refused_sources, *relay.stalled_sources]
        for name in driver.chain.order:
            relay = driver.relay(name)
            fetch = relay.fetch
            version = fetch.publication_id if fetch is not None else state.publication.id
            better = [
                other
                for other in may_give(driver, name, version)
                if other not in relay.refused_sources
            ]
            if fetch is None and version not in relay.versions:
                assert not better, f"{name} could take from {better}"
            elif (
                fetch is not None
                and fetch.source is not None
                and driver.relay(fetch.source).suspected
            ):
                assert relay.suspected or not better, f"{name} could take from {better}"
        for name in driver.chain.order:
            seen = [name]
            while (
                (last := driver.relay(seen[-1]).fetch) is not None
                and last.source is not None
                and last.source not in seen
            ):
                if last.publication_id in driver.relay(last.source).versions:
                    break
                seen.append(last.source)
            assert last is None or last.source not in seen, f"they wait for each other: {seen}"


@settings(max_examples=examples(25))
@given(relays=st.integers(2, 6), data=st.data())
def test_all_relays_get_the_weights_once_all_respond(relays: int, data: st.DataObject) -> None:
    driver = Driver(relays, restarts=1000).up()
    driver.publish()
    for _ in range(data.draw(st.integers(1, 20))):
        step(driver, data)
    for name in sorted(driver.chain.relays):
        if driver.relay(name).status is RelayStatus.STARTING:
            driver.join(name)
        driver.recover(name)
    state = driver.core.state
    for _ in range(3 * relays):
        driver.wait(1.0)
        for name in driver.chain.order:
            fetch = driver.relay(name).fetch
            if fetch is not None and (
                fetch.source is None or fetch.publication_id in driver.relay(fetch.source).versions
            ):
                driver.hold(name, fetch.publication_id)
    assert all(state.publication.id in driver.relay(name).versions for name in driver.chain.order)
