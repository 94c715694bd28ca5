"""Simulated relays: the time of a chain and of its repair, and refusals of missing
weights.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.core.policy.relay import broadcast_s
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave_sim.clock import Clock
from rollweave_sim.relays import DELTA_SHARE, RESTART_S, SILENT_S, SUSPECT_S, SimRelays

CHUNKS = 100


class Costs:
    """A version takes 10 s from relay to relay, in a hundred chunks, and its changes at
    least `codec_s`.
    """

    codec_s = 0.0

    def delta_s(self) -> float:
        return self.codec_s

    def hop_s(self, *, share: float) -> float:
        return 10.0 * share

    def lag_s(self) -> float:
        return 10.0 / CHUNKS

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"relays need no {name}")


class TwoSites:
    """Hosts from number `near` on are at another site, to which all takes five times as
    long.
    """

    def __init__(self, relays: int, near: int) -> None:
        self.relays, self._near = relays, near

    def slowdown(self, one: int, other: int) -> float:
        return 1.0 if (one < self._near) is (other < self._near) else 5.0


class Stage:
    def __init__(self, relays: int, *, near: int = 100) -> None:
        self.clock = Clock()
        self.events: list[tuple[float, e.Event]] = []
        self.relays = SimRelays(
            clock=self.clock,
            post=self._post,
            cost=Costs(),
            hosts=TwoSites(relays, near),
            trace=None,
        )
        self.relays.start()
        self.run()

    def _post(self, event: e.Event) -> None:
        self.events.append((self.clock.now, event))

    def take(
        self, relay: int, source: int | None, publication_id: int = 0, *, base: int | None = None
    ) -> None:
        name = f"r{source}" if source is not None else None
        self.relays.fetch(
            c.FetchWeights(
                relay_id=f"r{relay}",
                publication_id=publication_id,
                fetch_number=1,
                source=name,
                base_id=base,
                keep=tuple(range(publication_id)),
            )
        )

    def run(self, until: float = 1e9) -> None:
        over: list[int] = []
        if until < 1e9:
            self.clock.at(until, lambda: over.append(1))
        while not over and self.clock.step():
            pass

    def arrival_times(self) -> dict[str, float]:
        return {
            event.relay_id: now for now, event in self.events if isinstance(event, e.WeightsFetched)
        }


@given(relays=st.integers(1, 20))
def test_a_chain_takes_the_time_of_the_formula(relays: int) -> None:
    """Laminar App. C, where a chunk takes a hundredth of the total."""
    stage = Stage(relays)
    for relay in range(relays):
        stage.take(relay, relay - 1 if relay else None)
    stage.run()
    closed = broadcast_s(CHUNKS, nodes=relays, chunks=CHUNKS, start_s=0.0, byte_s=0.1)
    assert max(stage.arrival_times().values()) == pytest.approx(closed)


@given(relays=st.integers(3, 8), near=st.integers(1, 7))
def test_a_chain_crosses_a_slow_link_once(relays: int, near: int) -> None:
    near = min(near, relays - 1)
    stage = Stage(relays, near=near)
    for relay in range(relays):
        stage.take(relay, relay - 1 if relay else None)
    stage.run()
    arrivals = stage.arrival_times()
    behind = (relays - 1 - near) * 10.0 / CHUNKS
    assert arrivals[f"r{relays - 1}"] == pytest.approx(50.0 + behind)
    assert arrivals[f"r{near - 1}"] <= 10.0 + relays * 10.0 / CHUNKS


@given(relays=st.integers(3, 8), lost=st.integers(1, 6), at=st.floats(0.1, 9.9))
def test_a_repair_resends_no_bytes(relays: int, lost: int, at: float) -> None:
    lost = min(lost, relays - 2)
    stage = Stage(relays)
    for relay in range(relays):
        stage.take(relay, relay - 1 if relay else None)
    stage.run(until=at)
    stage.relays.lose(f"r{lost}", "injected")
    stage.take(lost + 1, lost - 1)
    stage.run()
    arrivals = stage.arrival_times()
    assert arrivals.keys() == {f"r{relay}" for relay in range(relays) if relay != lost}
    assert max(arrivals.values()) <= 10.0 + (relays - 1) * 10.0 / CHUNKS


@given(
    relays=st.integers(2, 6),
    hung=st.integers(0, 5),
    at=st.floats(0.1, 9.9),
    seconds=st.floats(0.05, 4.9),
)
def test_a_hanging_relay_delays_itself_and_all_relays_behind_it(
    relays: int, hung: int, at: float, seconds: float
) -> None:
    """Received bytes are not sent again; without a new source all relays behind it are
    late by the duration of its hang.
    """
    hung = min(hung, relays - 1)
    times = []
    for pause in (0.0, seconds):
        stage = Stage(relays)
        began = stage.clock.now
        for relay in range(relays):
            stage.take(relay, relay - 1 if relay else None)
        stage.run(until=at)
        if pause:
            stage.relays.hang(f"r{hung}", pause)
            stage.relays.hang(f"r{hung}", pause)  # at most one hang at a time
        stage.run()
        times.append({name: when - began for name, when in stage.arrival_times().items()})
        events = [
            type(event)
            for _, event in stage.events
            if isinstance(event, e.RelaySuspected | e.RelayRecovered | e.RelayLost)
        ]
        assert events == ([e.RelaySuspected, e.RelayRecovered] if pause > SUSPECT_S else [])
    quiet, delayed = times
    assert delayed.keys() == quiet.keys()
    for relay in range(relays):
        name = f"r{relay}"
        over = relay == 0 and hung == 0  # the master has already read the trainer's memory
        expected = 0.0 if relay < hung or over or quiet[name] <= at else seconds
        behind = 10.0 / CHUNKS * relays  # chunks in transfer
        assert quiet[name] + expected - behind <= delayed[name] <= quiet[name] + expected + 1e-6


def test_a_relay_with_another_source_does_not_wait_for_a_hanging_one() -> None:
    stage = Stage(3)
    for relay in range(3):
        stage.take(relay, relay - 1 if relay else None)
    stage.run(until=5.0)
    stage.relays.hang("r1", 60.0)
    stage.run(until=5.0 + SUSPECT_S)
    assert isinstance(stage.events[-1][1], e.RelaySuspected)
    stage.take(2, 0)
    stage.run()
    assert stage.arrival_times() == pytest.approx({"r0": 0.0, "r2": 10.0 + SUSPECT_S})
    now, event = (
        stage.events[-1] if isinstance(stage.events[-1][1], e.RelayLost) else stage.events[-2]
    )
    assert isinstance(event, e.RelayLost)
    assert now == pytest.approx(5.0 + SILENT_S)


def test_a_hanging_relay_handles_commands_later() -> None:
    stage = Stage(2)
    stage.take(0, None)
    stage.run()
    stage.relays.hang("r1", 2.0)
    began = stage.clock.now
    stage.take(1, 0)
    stage.run()
    assert stage.arrival_times()["r1"] - began == pytest.approx(12.0)


def test_a_delta_takes_its_share_of_the_time() -> None:
    stage = Stage(2)
    stage.take(0, None, 0)
    stage.run()
    stage.take(1, 0, 0)
    stage.run()
    began = stage.clock.now
    stage.take(0, None, 1)
    stage.take(1, 0, 1, base=0)
    stage.run()
    assert stage.arrival_times()["r1"] - began == pytest.approx(10.0 * DELTA_SHARE)


def test_changes_take_as_long_as_it_takes_to_find_and_apply_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Costs, "codec_s", 4.0)
    stage = Stage(3)
    for relay in range(3):
        stage.take(relay, relay - 1 if relay else None, 0)
    stage.run()
    began = stage.clock.now
    for relay in range(3):
        stage.take(relay, relay - 1 if relay else None, 1, base=0 if relay else None)
    stage.run()
    assert stage.arrival_times()["r1"] - began == pytest.approx(4.0)
    assert stage.arrival_times()["r2"] - began == pytest.approx(4.0 + 10.0 / CHUNKS), "at once"


def test_refuses_weights_that_are_missing() -> None:
    stage = Stage(3)
    stage.take(1, 0)
    stage.take(2, None, 5, base=4)
    stage.run()
    refused = {
        event.relay_id: event.reason
        for _, event in stage.events
        if isinstance(event, e.FetchFailed)
    }
    assert refused == {"r1": "source", "r2": "base"}
    assert not stage.relays.serves(1, 0)


def test_a_restarted_relay_has_no_weights() -> None:
    stage = Stage(1)
    stage.take(0, None)
    stage.run()
    assert stage.relays.serves(0, 0)
    stage.relays.restart(c.RestartRelay(relay_id="r0", host=0, epoch=1, reason="injected"))
    stage.run()
    now, event = stage.events[-1]
    assert (now, event) == (RESTART_S, e.RelayJoined(relay_id="r0", epoch=1))
    assert not stage.relays.serves(0, 0)
