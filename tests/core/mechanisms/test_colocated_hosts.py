"""Colocated placement on several hosts: engines and ranks have the same GPUs in turn,
and whatever hosts are lost, no GPU has more of either than the memory estimate counted.
"""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.core.core import Core
from rollweave.core.mechanisms.membership.bindings import bind_all, engines_in_the_way
from rollweave.core.mechanisms.membership.members import first_engines, next_id
from rollweave.core.state import EngineStatus, TrainerStatus
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId
from rollweave.schema.config.root import RunConfig
from rollweave.schema.hosts import HostSlot
from tests.support.core import config
from tests.support.kinds import of
from tests.support.properties import examples
from tests.support.relay_driver import Driver


def host(number: int, gpus: int, *pools: str) -> HostSlot:
    return HostSlot(
        number=number, name=f"h{number}", machine=f"m{number}", devices=(*range(gpus),), pools=pools
    )


def settings_of(ranks: int, engines: int, *, device: str = "cuda") -> RunConfig:
    return RunConfig.model_validate(
        config("sync").model_dump()
        | {
            "trainer": {"colocated": True, "ranks": ranks},
            "engines": [{"count": engines, "max_slots": 3}],
            "cluster": {"address": "127.0.0.1:1", "hosts": 1},
            "model": {"path": "m", "device": device},
        }
    )


class Turns(Driver):
    """Hosts with these numbers of GPUs, on which engines and ranks take turns."""

    device = "cuda"

    def __init__(self, gpus: list[int], *, ranks: int, engines: int, **more: Any) -> None:
        self.gpus, self.wanted = gpus, (ranks, engines)
        super().__init__(len(gpus), **more)

    def begin(self) -> e.RunStarted:
        self.config = settings_of(*self.wanted, device=self.device)
        self.core = Core(self.config)
        hosts = tuple(host(number, gpus) for number, gpus in enumerate(self.gpus))
        engines, ranks, unbound = bind_all(self.config, first_engines(self.config), hosts)
        assert not unbound
        self.counted = Counter((one.host, gpu) for one in engines for gpu in one.devices)
        return e.RunStarted(engines=engines, hosts=hosts, ranks=ranks, relays=len(hosts))

    def lose_host(self, number: int) -> list[c.Command]:
        return self.send(e.HostLost(host=number, error="silent"))

    def join_host(self, number: int, gpus: int) -> list[c.Command]:
        return self.send(e.HostJoined(host=host(number, gpus)))

    def places(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        return {
            one.id: (one.seat.host, one.seat.devices) for one in self.core.state.engines.values()
        }

    def ranks(self) -> list[tuple[int, tuple[int, ...]]]:
        return [(one.host, one.devices) for one in self.core.state.hosts.ranks]


@given(
    gpus=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    engines=st.integers(1, 12),
    ranks=st.integers(1, 12),
)
def test_engines_and_ranks_begin_on_the_same_gpus(
    gpus: list[int], engines: int, ranks: int
) -> None:
    """All GPUs of the fewer processes are among those of the more, and each process is
    where it would be without the others.
    """
    settings_ = settings_of(ranks, engines)
    hosts = [host(number, count) for number, count in enumerate(gpus)]
    slots, placed, unbound = bind_all(settings_, first_engines(settings_), hosts)
    assert not unbound
    of_engines = Counter((one.host, one.devices[0]) for one in slots)
    of_ranks = Counter((one.host, one.devices[0]) for one in placed)
    assert of_engines.keys() <= of_ranks.keys() or of_ranks.keys() <= of_engines.keys()
    for used, count in ((of_engines, engines), (of_ranks, ranks)):
        # a slow, obvious reference: shared evenly, and only where there are too few
        assert max(used.values()) - min(used.values()) <= 1
        assert len(used) == min(count, sum(gpus))
    alone, _, _ = bind_all(settings_, first_engines(settings_), hosts, ranks=0)
    assert alone == slots


def test_the_trainer_starts_again_beside_the_engines_of_the_hosts_that_are_left() -> None:
    """The engines of the lost host come back when a host does."""
    driver = Turns([2, 2, 2], ranks=4, engines=6).up()
    assert {place for place, _ in driver.ranks()} == {0, 1}
    commands = driver.lose_host(0)
    (restart,) = of(commands, c.RestartTrainer)
    expected = [(1, (0,)), (1, (1,)), (2, (0,)), (2, (1,))]
    assert [(rank.host, rank.devices) for rank in restart.ranks] == expected
    assert of(commands, c.StartEngine) == []
    assert [*driver.places()] == ["e2", "e3", "e4", "e5"]
    started = of(driver.join_host(3, 2), c.StartEngine)
    wanted = [("e6", 3, (0,)), ("e7", 3, (1,))]
    assert [(one.engine_id, one.host, one.devices) for one in started] == wanted
    assert {place for place, _ in driver.ranks()} == {1, 2}, "the trainer stays"


def test_a_gpu_that_was_free_takes_an_engine_of_a_lost_host() -> None:
    """It moves to the next host that joins."""
    driver = Turns([2, 2], ranks=1, engines=3).up()
    assert driver.places()["e2"] == (1, (0,))
    commands = driver.lose_host(0)
    started = of(commands, c.StartEngine)
    assert [(one.host, one.devices) for one in started] == [(1, (1,))], "one of the two"
    (restart,) = of(commands, c.RestartTrainer)
    assert [(rank.host, rank.devices) for rank in restart.ranks] == [(1, (0,))]
    joined = of(driver.join_host(2, 1), c.StartEngine)
    assert [(one.host, one.devices) for one in joined] == [(2, (0,))]


def test_the_trainer_waits_for_a_host_if_too_few_gpus_are_left() -> None:
    """NCCL refuses two ranks on one GPU, and one rank does not take the memory of
    two.
    """
    driver = Turns([2, 2], ranks=4, engines=4).up()
    assert of(driver.lose_host(1), c.RestartTrainer) == []
    assert driver.core.state.error == ""
    waiting = {wait.component: wait.what for wait in driver.core.waits({})}
    assert waiting["the trainer on host h0"] == "no host has room for it"
    commands = driver.join_host(2, 1)
    assert of(commands, c.RestartTrainer) == []
    assert [(one.host, one.devices) for one in of(commands, c.StartEngine)] == [(2, (0,))]
    commands = driver.join_host(3, 1)
    (restart,) = of(commands, c.RestartTrainer)
    assert len({(rank.host, rank.devices) for rank in restart.ranks}) == 4
    assert [(one.host, one.devices) for one in of(commands, c.StartEngine)] == [(3, (0,))]


def test_engines_that_began_on_one_gpu_share_one_again() -> None:
    """No other GPU is shared, though engines wait."""
    driver = Turns([2, 1], ranks=1, engines=5).up()
    assert sorted(driver.counted.values()) == [1, 2, 2]
    (once,) = [place for place, count in driver.counted.items() if count == 1]
    lost = 1 - once[0]
    assert of(driver.lose_host(lost), c.StartEngine) == []
    assert len(of(driver.join_host(2, 1), c.StartEngine)) == 2


CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("lost"), st.integers(0, 5)),
        st.tuples(st.just("joined"), st.integers(1, 4)),
        st.tuples(st.just("engine"), st.just(0)),
        st.tuples(st.just("trainer"), st.just(0)),
    ),
    max_size=12,
)


@settings(max_examples=examples(200))
@given(
    gpus=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    ranks=st.integers(1, 6),
    engines=st.integers(1, 9),
    changes=CHANGES,
)
def test_whatever_hosts_are_lost_no_gpu_has_more_than_was_counted(
    gpus: list[int], ranks: int, engines: int, changes: list[tuple[str, int]]
) -> None:
    """Nothing waits for a place if there is one, found by looking at all of them."""
    driver = Turns(gpus, ranks=min(ranks, sum(gpus)), engines=engines).up()
    most = max(1, *driver.counted.values())
    number = len(gpus)
    for kind, value in changes:
        state = driver.core.state
        if kind == "lost" and len(state.hosts.up) > 1:
            driver.lose_host([*state.hosts.up][value % len(state.hosts.up)])
        elif kind == "joined":
            driver.join_host(number, value)
            number += 1
        elif kind == "engine":
            driver.send(e.EngineRegistered(engine=e.EngineSlot(id=next_id(state))))
        elif kind == "trainer" and state.trainer.status is TrainerStatus.STARTING:
            driver.send(e.TrainerReady(epoch=state.trainer.epoch, step=0))
        state = driver.core.state
        if state.error:
            return
        up = state.hosts.up
        used = Counter(
            (one.seat.host, gpu) for one in state.engines.values() for gpu in one.seat.devices
        )
        limits = {
            (place, gpu): max(1, driver.counted[place, gpu]) if place < len(gpus) else most
            for place in up
            for gpu in up[place].devices
        }
        assert all(used[place] <= limits[place] for place in used)
        for waiting in state.hosts.unplaced:
            for place in up:
                full = [used[place, gpu] >= limits[place, gpu] for gpu in up[place].devices]
                assert all(full), f"{waiting} has room on host {place}"
        if state.trainer.unplaced:
            assert sum(len(one.devices) for one in up.values()) < len(state.hosts.ranks)
        else:
            assert len({*driver.ranks()}) == len(driver.ranks()), "no two ranks share a GPU"
            assert all(place in up for place, _ in driver.ranks())


def serving(gpus: list[int], ranks: int, engines: int) -> Turns:
    """Return a run whose engines serve the first version."""
    driver = Turns(gpus, ranks=ranks, engines=engines).up()
    driver.publish()
    driver.engines_up()
    for relay in list(driver.core.state.mechanisms["relays"].order):
        load(driver, driver.hold(relay, driver.core.state.publication.id))
    assert all(
        engine.status is EngineStatus.SERVING for engine in driver.core.state.engines.values()
    )
    return driver


def load(driver: Turns, commands: list[c.Command]) -> None:
    for one in of(commands, c.LoadWeights):
        driver.send(
            e.WeightsLoaded(
                engine_id=one.engine_id,
                epoch=driver.core.state.engines[one.engine_id].epoch,
                version=one.version,
                publication_id=one.publication_id,
            )
        )


def released(driver: Turns) -> None:
    """Let all engines give their memory back, as for a step."""
    for engine in driver.core.state.engines.values():
        engine.released = True
        engine.publication_id = -1
        engine.status = EngineStatus.STALE
    driver.core._run.fleet_changed()


def test_engines_that_gave_their_memory_back_wait_for_a_trainer_whose_host_is_lost() -> None:
    """Their relays have the version before, which they have no use for: the batch is
    complete.
    """
    driver = serving([1, 1], 1, 2)
    driver.core.state.checkpoints.newest = 0
    released(driver)
    driver.core.state.trainer.status = TrainerStatus.TRAINING
    commands = driver.lose_host(0)
    (restart,) = of(commands, c.RestartTrainer)
    assert [(rank.host, rank.devices) for rank in restart.ranks] == [(1, (0,))]
    commands += driver.wait(1.0)
    assert of(commands, c.LoadWeights) == []
    commands = driver.send(e.TrainerReady(epoch=restart.epoch, step=0))
    commands += driver.publish()
    assert of(commands, c.LoadWeights) == []
    loads = of(driver.hold("r1", driver.core.state.publication.id), c.LoadWeights)
    assert [one.publication_id for one in loads] == [driver.core.state.publication.id]


def test_an_engine_whose_load_fails_without_its_relay_does_not_serve_what_it_gave_back() -> None:
    driver = serving([1, 1], 1, 2)
    released(driver)
    (name,) = [one for one, (place, _) in driver.places().items() if place == 1]
    (command,) = [one for one in of(driver.wait(1.0), c.LoadWeights) if one.engine_id == name]
    driver.lose("r1")
    commands = driver.send(
        e.WeightsLoadFailed(
            engine_id=EngineId(name),
            epoch=0,
            publication_id=command.publication_id,
            error="its relay is gone",
        )
    )
    assert of(commands, c.ResumeEngine) == []
    assert driver.core.state.engines[EngineId(name)].status is EngineStatus.STALE


class OnCpus(Turns):
    """The same hosts, whose GPUs the run does not use."""

    device = "cpu"


@pytest.mark.parametrize("lost", [0, 1])
def test_processes_on_the_cpu_start_on_the_other_host(lost: int) -> None:
    driver = OnCpus([1, 1], ranks=2, engines=2).up()
    commands = driver.lose_host(lost)
    assert [one.host for one in of(commands, c.StartEngine)] == [1 - lost]
    assert bool(of(commands, c.RestartTrainer)) == (lost == 0)


def test_engines_are_never_in_the_way_of_ranks_that_have_the_gpus_in_turn() -> None:
    driver = Turns([1], ranks=1, engines=1)
    state = driver.core.state
    state.hosts.shares_gpus = False
    assert engines_in_the_way(driver.config, state) == []
