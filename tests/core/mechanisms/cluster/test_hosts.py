"""Hosts that are lost and that join, and the places of engines and trainer ranks."""

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollweave.core.core import Core
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId
from rollweave.schema.config.root import RunConfig
from rollweave.schema.hosts import HostSlot, RankSlot
from tests.support.core import MODES, config
from tests.support.kinds import of
from tests.support.properties import examples
from tests.support.random_world import World
from tests.support.relay_driver import Driver


def started(commands: list[c.Command]) -> list[tuple[str, int, tuple[int, ...]]]:
    return [
        (command.engine_id, command.host, command.devices)
        for command in of(commands, c.StartEngine)
    ]


def test_engines_of_a_lost_host_start_elsewhere_under_new_names() -> None:
    driver = Driver(3).up()
    commands = driver.send(e.HostLost(host=1, error="silent"))
    assert started(commands) == [("e3", 0, ())]
    (removed,) = of(commands, c.RemoveRelay)
    assert removed.relay_id == "r1"
    assert list(driver.core.state.engines) == ["e0", "e2", "e3"]
    assert driver.chain.order == ["r0", "r2"]


def test_reports_of_what_was_on_a_lost_host_come_too_late() -> None:
    driver = Driver(2).up()
    driver.send(e.HostLost(host=1, error="silent"))
    for event in (
        e.HostLost(host=1, error="silent"),
        e.EngineLost(engine_id=EngineId("e1"), epoch=0, error="gone"),
        e.RelayLost(relay_id="r1", epoch=0, error="gone"),
    ):
        assert of(driver.send(event), c.StartEngine) == []


def test_an_engine_that_stands_in_for_another_moves_to_a_host_that_joins() -> None:
    driver = Driver(2).up()
    driver.engines_up()
    driver.send(e.HostLost(host=1, error="silent"))
    expected = {"e0": 0, "e2": 0}
    assert {one.id: one.seat.host for one in driver.core.state.engines.values()} == expected
    commands = driver.send(e.HostJoined(host=HostSlot(number=2, name="c")))
    assert started(commands) == [("e3", 2, ())]
    removed = [command.engine_id for command in of(commands, c.RemoveEngine)]  # type: ignore[attr-defined]
    assert removed == ["e2"]
    assert started(driver.send(e.HostJoined(host=HostSlot(number=3)))) == []


def fail(driver: Driver, engine: str, times: int) -> list[c.Command]:
    """Lose the engine this often in a row."""
    commands: list[c.Command] = []
    for _ in range(times):
        epoch = driver.core.state.engines[EngineId(engine)].epoch
        lost = e.EngineLost(engine_id=EngineId(engine), epoch=epoch, error="killed")
        commands += driver.send(lost)
    return commands


def serve(driver: Driver) -> None:
    """Let all engines load the published weights."""
    driver.engines_up()
    for relay in list(driver.chain.relays):
        for command in driver.hold(relay, 0):
            if isinstance(command, c.LoadWeights):
                loaded = e.WeightsLoaded(
                    engine_id=command.engine_id, epoch=0, version=0, publication_id=0
                )
                driver.send(loaded)


class TwoOfTwo(Driver):
    """Two hosts of two engines each: e0 and e2 on host 0, e1 and e3 on host 1."""

    def begin(self) -> e.RunStarted:
        slots = (e.EngineSlot(id=EngineId(f"e{one}"), host=one % 2) for one in range(4))
        return e.RunStarted(engines=tuple(slots), relays=2)


def test_engines_of_a_host_that_is_given_up_start_elsewhere() -> None:
    driver = TwoOfTwo(2, restarts=1).up()
    driver.publish()
    serve(driver)
    assert started(fail(driver, "e1", 2)) == [("e4", 0, ()), ("e5", 0, ())]
    engines = driver.core.state.engines
    assert {engine.id: engine.seat.host for engine in engines.values()} == dict.fromkeys(
        ["e0", "e2", "e4", "e5"], 0
    )
    joined = driver.send(e.HostJoined(host=HostSlot(number=2, cpus=8)))
    assert started(joined) == [("e6", 2, ()), ("e7", 2, ())], "in place of both"


def test_a_fault_that_follows_an_engine_costs_no_second_host() -> None:
    driver = TwoOfTwo(2, restarts=1).up()
    driver.send(e.HostJoined(host=HostSlot(number=2, cpus=1)))
    driver.join("r2")
    driver.publish()
    serve(driver)
    ((follower, host, _), _) = started(fail(driver, "e1", 2))
    assert host == 2
    commands = fail(driver, follower, 2)
    assert [*driver.core.state.hosts.up] == [0, 2]
    assert started(commands) == []
    assert follower not in driver.core.state.engines
    assert driver.core.state.error == ""


def test_the_run_ends_if_engines_of_a_host_that_is_given_up_have_no_place() -> None:
    """Otherwise it would wait for ever: such a host does not come back."""
    driver = InPools(2, restarts=0).up()
    driver.lose("r0")
    assert driver.core.state.error.startswith("no engine is left; the last one (e0)")


def test_engines_of_a_lost_host_without_a_place_wait_for_it() -> None:
    driver = InPools(2, restarts=0).up()
    driver.send(e.HostLost(host=0, error="silent"))
    assert driver.core.state.error == ""
    back = HostSlot(number=2, machine="m0", pools=("near",))
    assert started(driver.send(e.HostJoined(host=back))) == [("e1", 2, ())]


def test_a_host_that_joins_gets_a_relay_at_the_end_of_the_chain() -> None:
    driver = Driver(2).up()
    commands = driver.send(e.HostJoined(host=HostSlot(number=2, name="c")))
    (relay,) = of(commands, c.RestartRelay)
    assert relay == c.RestartRelay(relay_id="r2", host=2, epoch=0, reason="its host has joined")
    driver.join("r2")
    assert driver.chain.order == ["r0", "r1", "r2"]
    assert driver.send(e.HostJoined(host=HostSlot(number=2, name="c"))) == []


def test_the_loss_of_the_last_host_ends_the_run() -> None:
    driver = Driver(1).up()
    driver.send(e.HostLost(host=0, error="its connection ended"))
    assert "host 0 is lost: its connection ended" in driver.core.state.error


class OnGpus(Driver):
    """Two hosts of two GPUs each, on machines of their own: the trainer on the first
    GPU of host 0, and engines on all others.
    """

    device = "cuda"

    def begin(self) -> e.RunStarted:
        hosts = tuple(
            HostSlot(number=number, machine=f"m{number}", devices=(0, 1)) for number in range(2)
        )
        places = {"e0": (0, (1,)), "e1": (1, (0,)), "e2": (1, (1,))}
        return e.RunStarted(
            engines=tuple(
                e.EngineSlot(id=EngineId(name), host=host, devices=devices)
                for name, (host, devices) in places.items()
            ),
            hosts=hosts,
            ranks=(RankSlot(host=0, devices=(0,)),),
            relays=2,
        )


def test_a_restarted_engine_keeps_its_devices() -> None:
    driver = OnGpus(2).up()
    commands = driver.send(e.EngineLost(engine_id=EngineId("e2"), epoch=0, error="killed"))
    (restart,) = of(commands, c.RestartEngine)
    assert (restart.host, restart.devices) == (1, (1,))


def test_engines_wait_for_gpus_that_no_process_has() -> None:
    """Their memory was found to suffice for one process."""
    driver = OnGpus(2).up()
    assert started(driver.send(e.HostLost(host=1, error="silent"))) == []
    commands = driver.send(e.HostJoined(host=HostSlot(number=2, machine="m2", devices=(0, 1))))
    assert started(commands) == [("e3", 2, (0,)), ("e4", 2, (1,))]


class OnOneGpu(Driver):
    """Two hosts of one GPU each: the trainer and e0 share that of host 0."""

    device = "cuda"

    def begin(self) -> e.RunStarted:
        return e.RunStarted(
            engines=tuple(
                e.EngineSlot(id=EngineId(f"e{host}"), host=host, devices=(0,)) for host in (0, 1)
            ),
            hosts=tuple(
                HostSlot(number=number, machine=f"m{number}", devices=(0,)) for number in (0, 1)
            ),
            ranks=(RankSlot(host=0, devices=(0,)),),
            relays=2,
        )


def test_engines_share_gpus_if_some_did_from_the_beginning() -> None:
    driver = OnOneGpu(2).up()
    commands = driver.send(e.HostLost(host=1, error="silent"))
    assert started(commands) == [("e2", 0, (0,))]


def test_the_trainer_takes_the_place_of_an_engine() -> None:
    """The engine starts again on a host that joins; the one on the other GPU stays."""
    driver = OnGpus(2).up()
    commands = driver.send(e.HostLost(host=0, error="silent"))
    (restart,) = of(commands, c.RestartTrainer)
    assert restart.ranks == (RankSlot(host=1, devices=(0,)),)
    removed = [one.engine_id for one in of(commands, c.RemoveEngine)]  # type: ignore[attr-defined]
    assert removed == ["e0", "e1"]
    assert [*driver.core.state.engines] == ["e2"]
    assert started(commands) == []
    commands = driver.send(e.HostJoined(host=HostSlot(number=2, machine="m2", devices=(0, 1))))
    assert started(commands) == [("e3", 2, (0,)), ("e4", 2, (1,))]


class OnTooFewGpus(Driver):
    """Three ranks on two hosts of two GPUs each."""

    device = "cuda"

    def begin(self) -> e.RunStarted:
        hosts = tuple(
            HostSlot(number=number, machine=f"m{number}", devices=(0, 1)) for number in range(2)
        )
        ranks = [(0, (0,)), (0, (1,)), (1, (0,))]
        return e.RunStarted(
            engines=(e.EngineSlot(id=EngineId("e0"), host=1, devices=(1,)),),
            hosts=hosts,
            ranks=tuple(RankSlot(host=host, devices=devices) for host, devices in ranks),
            relays=2,
        )


def without_room() -> Driver:
    """Lose a host of the trainer, whose ranks have too few GPUs then: NCCL refuses to
    share one.
    """
    driver = OnTooFewGpus(2).up()
    commands = driver.send(e.HostLost(host=1, error="silent"))
    assert of(commands, c.RestartTrainer) == []
    assert driver.core.state.error == ""
    waiting = [(wait.component, wait.what) for wait in driver.core.waits({})]
    assert ("the trainer", "no host has room for it") in waiting
    return driver


def test_a_trainer_without_room_waits_for_a_host() -> None:
    driver = without_room()
    small = HostSlot(number=2, name="c", machine="m2")
    assert of(driver.send(e.HostJoined(host=small)), c.RestartTrainer) == []
    large = HostSlot(number=3, name="d", machine="m3", devices=(0, 1))
    (restart,) = of(driver.send(e.HostJoined(host=large)), c.RestartTrainer)
    assert len({(rank.host, rank.devices) for rank in restart.ranks}) == 3
    epoch = driver.core.state.trainer.epoch
    assert restart.epoch == epoch
    driver.send(e.TrainerReady(epoch=epoch, step=0))
    assert driver.core.state.trainer.unplaced == ""


def test_a_trainer_waits_for_a_host_no_longer_than_for_a_step() -> None:
    driver = without_room()
    limit = driver.config.watchdog.train_s
    driver.wait(limit - 1)
    assert driver.core.state.error == ""
    driver.wait(2)
    assert driver.core.state.error.startswith(
        f"no host has room for the trainer, and none has joined within {limit:g} s; last: "
    )


def test_a_run_that_is_stopped_does_not_wait_for_a_host() -> None:
    driver = without_room()
    (finish,) = of(driver.send(e.StopRequested()), c.Finish)
    assert finish.error.startswith("no host has room for the trainer, and the run was stopped")


class OnCpus(OnGpus):
    """The same hosts, whose GPUs the run does not use."""

    device = "cpu"


def test_a_run_on_the_cpu_takes_no_devices() -> None:
    driver = OnCpus(2).up()
    commands = driver.send(e.HostLost(host=1, error="silent"))
    assert started(commands) == [("e3", 0, ()), ("e4", 0, ())]


def test_a_trainer_whose_host_is_lost_restarts_elsewhere() -> None:
    driver = OnGpus(2).up()
    (restart,) = of(driver.send(e.HostLost(host=0, error="silent")), c.RestartTrainer)
    assert [slot.host for slot in restart.ranks] == [1]
    assert driver.core.state.hosts.ranks == list(restart.ranks)
    assert driver.send(e.TrainerLost(epoch=0, error="gone")) == [], "it is known"


def test_a_trainer_whose_host_is_given_up_restarts_elsewhere() -> None:
    """No relay could fetch from a host that is no longer used."""
    driver = OnGpus(2, restarts=0).up()
    (restart,) = of(driver.lose("r0"), c.RestartTrainer)
    assert [slot.host for slot in restart.ranks] == [1]


def test_a_trainer_that_fails_on_its_host_stays_there() -> None:
    driver = OnGpus(2).up()
    (restart,) = of(driver.send(e.TrainerLost(epoch=0, error="killed")), c.RestartTrainer)
    assert restart.ranks == (RankSlot(host=0, devices=(0,)),)


def test_losses_of_hosts_do_not_use_up_the_restarts_of_the_trainer() -> None:
    driver = OnGpus(2, restarts=1).up()
    for number in range(4):
        present = driver.core.state.hosts.ranks[0].host
        driver.send(e.HostJoined(host=HostSlot(number=10 + number, devices=(0, 1))))
        driver.send(e.HostLost(host=present, error="silent"))
    assert driver.core.state.error == ""
    for _ in range(2):
        driver.send(e.TrainerLost(epoch=driver.core.state.trainer.epoch, error="killed"))
    assert driver.core.state.error == "the trainer failed 2 times; last: lost: killed"


def test_only_the_relay_beside_the_trainer_reads_its_memory() -> None:
    """Whichever relay joins first: the one on the trainer's machine heads the chain."""
    driver = OnGpus(2)
    driver.join("r1")
    driver.join("r0")
    assert driver.chain.order == ["r0", "r1"]
    driver.send(e.TrainerReady(epoch=0, step=0))
    driver.publish()
    assert driver.source("r0") is None
    assert driver.source("r1") == "r0"
    driver.suspect("r0")
    assert driver.relay("r1").fetch is None or driver.source("r1") == "r0"


class OnThreeMachines(Driver):
    """Three hosts on machines of their own, the trainer on host 0, an engine on each
    and another one on the last.
    """

    def begin(self) -> e.RunStarted:
        hosts = tuple(HostSlot(number=number, machine=f"m{number}") for number in range(3))
        engines = tuple(
            e.EngineSlot(id=EngineId(f"e{number}"), host=min(number, 2)) for number in range(4)
        )
        return e.RunStarted(engines=engines, hosts=hosts, ranks=(RankSlot(host=0),), relays=3)


def test_the_relay_beside_a_trainer_that_has_moved_heads_the_chain() -> None:
    """Otherwise no relay could fetch what the trainer publishes from then on."""
    driver = OnThreeMachines(3).up()
    driver.publish()
    driver.send(e.HostJoined(host=HostSlot(number=3, machine="m3", cpus=64)))
    driver.join("r3")
    assert driver.relay("r3").fetch is None, "there is no engine on its host"
    driver.core.state.engines[EngineId("e3")].seat.host = 3
    driver.core._run.fleet_changed()
    driver.wait(1.0)
    assert driver.source("r3") == "r2"
    (restart,) = of(driver.send(e.HostLost(host=0, error="silent")), c.RestartTrainer)
    assert [slot.host for slot in restart.ranks] == [3]
    driver.wait(1.0)
    assert driver.chain.order == ["r3", "r1", "r2"]
    driver.send(e.TrainerReady(epoch=1, step=0))
    driver.publish()
    assert [driver.source(name) for name in ("r3", "r1", "r2")] == [None, "r3", "r1"]


def test_places_survive_a_snapshot() -> None:
    driver = OnGpus(2).up()
    restored = type(driver.core).restore(driver.core.snapshot(), config("partial"))
    assert restored.state.hosts == driver.core.state.hosts


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 2**16),
    mode=st.sampled_from([*MODES, "decoupled"]),
    relays=st.integers(1, 4),
    restless=st.sampled_from([0.0, 0.05]),
    own_machines=st.booleans(),
)
def test_any_run_whose_hosts_come_and_go_ends_accounted_for(
    seed: int, mode: str, relays: int, restless: float, own_machines: bool
) -> None:
    """The run ends early only if its last host is lost."""
    run_config = config(
        mode,
        engines={"count": relays},
        weights={"relays": relays},
        watchdog={"restarts": 1000},
    )
    world = World(run_config, seed, restless=restless)
    world.changing_hosts, world.own_machines = 0.02, own_machines
    world.start()
    world.run_on()
    if world.core.state.hosts.up:
        assert world.finish.error == ""
    account = world.core.account()
    assert account.balanced
    assert account.in_flight == 0


@settings(max_examples=examples(40))
@example(  # the trainer is lost after it began to publish, and publishes again
    seed=13332, mode="decoupled", failure=0.1, changing=0.02, own_machines=True
)
@given(
    seed=st.integers(0, 2**16),
    mode=st.sampled_from([*MODES, "decoupled"]),
    failure=st.sampled_from([0.02, 0.1]),
    changing=st.sampled_from([0.0, 0.02]),
    own_machines=st.booleans(),
)
def test_any_run_that_gives_up_hosts_ends_accounted_for(
    seed: int, mode: str, failure: float, changing: float, own_machines: bool
) -> None:
    run_config = config(mode, engines={"count": 3}, weights={"relays": 3}, watchdog={"restarts": 0})
    world = World(run_config, seed, failure=failure)
    world.changing_hosts, world.own_machines = changing, own_machines
    finish = world.run()
    account = world.core.account()
    assert account.balanced
    assert account.in_flight == 0
    if not finish.error:
        assert sorted(world.trained) == [0, 1, 2, 3]


def test_the_random_runs_do_lose_hosts_and_gain_some() -> None:
    """Otherwise the test above would show nothing."""
    world = World(config("bounded", steps=8, engines={"count": 3}, weights={"relays": 3}), seed=1)
    world.changing_hosts = 0.02
    world.run()
    watchdog = world.core.state.counters.watchdog
    assert watchdog["host_joined"] > 2
    assert watchdog["host_evicted"] > 2


class InPools(Driver):
    """A host of pool `near` with an engine, and one of pool `far` with the trainer."""

    def begin(self) -> e.RunStarted:
        data = self.config.model_dump() | {
            "weights": {},
            "cluster": {"address": "127.0.0.1:1", "hosts": 2},
            "pools": {"near": {"resource": "H800"}, "far": {"resource": "H20"}},
            "engines": [{"count": 1, "pool": "near"}],
            "trainer": {"pool": "far"},
        }
        self.config = RunConfig.model_validate(data)
        self.core = Core(self.config)
        hosts = tuple(
            HostSlot(number=number, machine=f"m{number}", pools=(pool,))
            for number, pool in enumerate(["near", "far"])
        )
        engines = (e.EngineSlot(id=EngineId("e0"), host=0, pool="near"),)
        return e.RunStarted(engines=engines, hosts=hosts, ranks=(RankSlot(host=1),), relays=2)


class SitesDriver(Driver):
    """Hosts with an odd number are at another site than those with an even one."""

    def begin(self) -> e.RunStarted:
        data = self.config.model_dump() | {
            "weights": {},
            "cluster": {"address": "127.0.0.1:1", "hosts": self.relays},
            "pools": {
                "near": {"resource": "H800"},
                "far": {"resource": "H20", "site": "elsewhere"},
            },
        }
        self.config = RunConfig.model_validate(data)
        self.core = Core(self.config)
        hosts = tuple(
            HostSlot(number=number, machine=f"m{number}", pools=("far" if number % 2 else "near",))
            for number in range(self.relays)
        )
        return msgspec.structs.replace(super().begin(), hosts=hosts, ranks=(RankSlot(host=2),))


def published_at_sites(*relays: str) -> SitesDriver:
    """Return a run whose relays joined in this order before the first publication."""
    driver = SitesDriver(len(relays))
    for relay in relays:
        driver.send(e.RelayJoined(relay_id=relay, epoch=0))
    driver.send(e.TrainerReady(epoch=0, step=0))
    driver.publish()
    return driver


def test_relays_of_one_site_are_neighbors_in_the_chain() -> None:
    driver = SitesDriver(6)
    for relay in ("r1", "r4", "r3", "r0", "r2", "r5"):
        driver.send(e.RelayJoined(relay_id=relay, epoch=0))
    assert driver.chain.order == ["r2", "r4", "r0", "r1", "r3", "r5"]


def test_a_version_crosses_the_link_between_sites_once() -> None:
    """Whatever happens at the other site, a relay there has it from its own site as
    long as one there has it, or fetches it.
    """
    driver = published_at_sites("r2", "r4", "r0", "r1", "r3", "r5")

    def crossing() -> list[str]:
        far = [name for name in ("r1", "r3", "r5") if driver.relay(name).fetch is not None]
        return [name for name in far if driver.source(name) in ("r0", "r2", "r4")]

    assert crossing() == ["r1"]
    driver.suspect("r1")
    assert crossing() == ["r1", "r3"], "the first one still receives"
    driver.recover("r1")
    for relay in ("r2", "r4", "r0", "r3", "r5"):
        driver.hold(relay, driver.core.state.publication.id)
    driver.refuse("r1", "source")
    assert driver.source("r1") == "r3", "it is behind, but at the same site"


def test_a_relay_waits_for_one_of_its_site_that_still_fetches_older_weights() -> None:
    driver = published_at_sites("r2", "r0", "r1", "r3")
    older = driver.core.state.publication.id
    for relay in ("r2", "r0"):
        driver.hold(relay, older)
    driver.publish_again()
    newer = driver.core.state.publication.id
    driver.hold("r2", newer)

    driver.hold("r3", older)
    assert driver.relay("r3").fetch is None, "r1 brings the newer ones to their site"
    driver.hold("r1", older)
    assert driver.source("r1") == "r0"
    assert driver.source("r3") == "r1"
    assert driver.relay("r3").fetching == newer


def test_a_relay_does_not_wait_for_one_of_its_site_that_is_suspected() -> None:
    driver = published_at_sites("r2", "r0", "r1", "r3")
    older = driver.core.state.publication.id
    driver.publish_again()
    driver.hold("r2", driver.core.state.publication.id)
    driver.hold("r3", older)
    driver.suspect("r1")
    assert driver.source("r3") == "r2"
