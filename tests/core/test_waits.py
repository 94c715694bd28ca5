"""Every wait for a host, relay, engine or trainer is listed with what it waits for."""

from rollweave.core.policy.waiting import wait_lines
from rollweave.schema import events as e
from rollweave.schema.base import EngineId
from rollweave.schema.hosts import HostSlot, RankSlot
from tests.support.relay_driver import Driver

FIRST_CHECKPOINT = "the checkpoint of step 0: being written"


class Named(Driver):
    """Two hosts with names, each on a machine of its own, the trainer on the first."""

    def begin(self) -> e.RunStarted:
        return e.RunStarted(
            engines=tuple(e.EngineSlot(id=EngineId(f"e{host}"), host=host) for host in range(2)),
            hosts=tuple(HostSlot(number=n, name="ab"[n], machine="ab"[n]) for n in range(2)),
            ranks=(RankSlot(host=0),),
            relays=2,
        )

    def waits(self, received: tuple[int, int] = (0, 0)) -> list[str]:
        waiting = self.core.waits({"r1": received})
        lines = [f"{wait.component}: {wait.what}" for wait in waiting]
        return [line for line in lines if line != FIRST_CHECKPOINT]


def test_everything_that_starts_is_waited_for() -> None:
    assert Named(2).waits() == [
        "engine e0 on host a: starting",
        "engine e1 on host b: starting",
        "relay r0 on host a: starting",
        "relay r1 on host b: starting",
        "the trainer on host a: starting",
    ]


def test_a_start_is_named_with_its_limit() -> None:
    driver = Named(2)
    for wait in driver.core.waits({}, start_s=900.0):
        seconds = 130.0
        (line,) = wait_lines([(wait, seconds)])
        assert line[1] == f"waiting 130 s of at most 900 s for {wait.component}: starting"


def test_a_fetch_is_named_with_its_source_and_its_bytes() -> None:
    driver = Named(2).up()
    driver.engines_up()
    driver.publish()
    assert driver.waits(received=(310_000_000, 900_000_000)) == [
        "engine e0 on host a: ready, without weights that it may use",
        "engine e1 on host b: ready, without weights that it may use",
        "relay r0 on host a: fetching version 0 from the trainer",
        "relay r1 on host b: fetching version 0 from r0, 310 of 900 MB",
    ]
    driver.suspect("r1")
    assert driver.waits()[-1] == "a sign of life of relay r1 on host b: silent"


def test_a_relay_without_a_source_and_a_lost_trainer_are_named() -> None:
    driver = Named(2).up()
    driver.publish()
    driver.send(e.HostLost(host=0, error="silent"))
    lines = driver.waits()
    assert "the trainer on host b: starting" in lines
    assert "engine e2 on host b: starting" in lines


def test_a_checkpoint_is_named() -> None:
    driver = Named(2).up()
    driver.publish()
    waiting = driver.core.waits({})
    assert FIRST_CHECKPOINT in [f"{wait.component}: {wait.what}" for wait in waiting]


def test_nothing_is_waited_for_once_all_serve() -> None:
    driver = Named(2).up()
    driver.engines_up()
    driver.publish()
    driver.hold("r0", 0)
    driver.hold("r1", 0)
    loading = driver.waits()
    expected = ["engine e0 on host a: loading version 0", "engine e1 on host b: loading version 0"]
    assert loading[:2] == expected
    for name in ("e0", "e1"):
        loaded = e.WeightsLoaded(engine_id=EngineId(name), epoch=0, version=0, publication_id=0)
        driver.send(loaded)
    assert driver.waits() == []
    driver.core.state.engines[EngineId("e0")].staging.id = 0
    assert driver.waits() == ["engine e0 on host a: receiving version 0 while it serves"]
