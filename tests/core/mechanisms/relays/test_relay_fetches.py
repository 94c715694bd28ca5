"""A relay remembers nothing of a fetch that succeeded, and the reason of one that
failed.
"""

import pytest

from rollweave.core.mechanisms.relays import fetching as relays
from rollweave.core.mechanisms.relays.state import Fetch, Relay, Relays, RelayStatus
from rollweave.core.run import Run
from rollweave.core.state import Evaluation
from rollweave.schema import commands as c
from rollweave.schema import events as e
from tests.support.kinds import of
from tests.support.states import E1, place_on_hosts, running


def relays_of(run: Run) -> dict[str, Relay]:
    return run.part(Relays).relays


def fetching(
    *, source: str | None = "r0", base: int | None = None, mode: str = "bounded"
) -> tuple[Run, Relay]:
    """The second of three relays fetches weights 20; the first one has them."""
    run = running(mode=mode)
    state = run.state
    state.publication.id, state.publication.retained = 20, {10: 1, 20: 2}
    place_on_hosts(state, 3)
    for relay in relays_of(run).values():
        relay.status, relay.versions = RelayStatus.READY, [10]
    state.mechanisms["relays"].order = list(relays_of(run))
    relays_of(run)["r0"].versions = [10, 20]
    relay = relays_of(run)["r1"]
    relay.status, relay.fetches = RelayStatus.FETCHING, 4
    relay.fetch = Fetch(publication_id=20, source=source, base=base)
    run.now, run.out = 9.0, []
    return run, relay


def fails(run: Run, reason: str, *, publication_id: int = 20, number: int = 4) -> None:
    relays.on_fetch_failed(
        run,
        e.FetchFailed(
            relay_id="r1",
            epoch=0,
            publication_id=publication_id,
            fetch_number=number,
            reason=reason,  # type: ignore[arg-type]
            error="no luck",
        ),
    )


def test_a_fetch_that_succeeded_forgets_what_went_wrong() -> None:
    run, relay = fetching()
    follower = relays_of(run)["r2"]
    follower.status = RelayStatus.FETCHING
    follower.fetch = Fetch(publication_id=20, source="r1", base=None)
    relay.refused_sources, relay.stalled_sources, relay.force_full = ["r2"], ["r2"], True
    relay.starved_since, relay.failed_source, relay.restarts = 3.0, "r0", 2
    relays.on_fetched(run, e.WeightsFetched(relay_id="r1", epoch=0, publication_id=20))
    assert relay.versions == [10, 20]
    assert (relay.refused_sources, relay.stalled_sources, relay.force_full) == ([], [], False)
    assert (relay.starved_since, relay.failed_source, relay.restarts) == (None, None, 0)
    assert (relay.status, relay.fetch) == (RelayStatus.READY, None)
    assert follower.since == 9.0, "a timeout is now its own fault"
    assert relays_of(run)["r0"].since == 0.0


def test_the_seconds_and_bytes_of_a_fetch_are_counted() -> None:
    run, relay = fetching()
    relay.fetch_began = 7.5
    for publication_id in (5, 20):  # the first was not asked for
        relays.on_fetched(
            run, e.WeightsFetched(relay_id="r1", epoch=0, publication_id=publication_id, nbytes=300)
        )
    counted = run.state.counters.weights
    assert (counted.fetch_s, counted.fetched_bytes) == (1.5, 300)


def test_the_first_version_forgives_no_restart() -> None:
    run, relay = fetching()
    relay.versions, relay.restarts = [], 2
    relays.on_fetched(run, e.WeightsFetched(relay_id="r1", epoch=0, publication_id=20))
    assert (relay.versions, relay.restarts) == ([20], 2)


def test_weights_that_were_not_asked_for_count_while_they_are_kept() -> None:
    run, relay = fetching()
    relays.on_fetched(run, e.WeightsFetched(relay_id="r1", epoch=0, publication_id=5))
    assert relay.versions == [10]
    run.state.publication.retained[15] = 1
    relays.on_fetched(run, e.WeightsFetched(relay_id="r1", epoch=0, publication_id=15))
    assert relay.versions == [10, 15]
    assert relay.fetching == 20
    relays.on_fetched(run, e.WeightsFetched(relay_id="r1", epoch=1, publication_id=20))
    assert relay.fetching == 20, "of another life"


@pytest.mark.parametrize("reason", ["base", "broken"])
def test_a_change_that_does_not_fit_is_followed_by_the_whole_version(reason: str) -> None:
    run, relay = fetching(base=10)
    fails(run, reason)
    assert (relay.force_full, relay.refused_sources) == (True, [])
    assert (relay.starved_since, relay.failed_source) == (9.0, None)
    run, relay = fetching()
    fails(run, reason)
    assert (relay.force_full, relay.refused_sources) == (False, ["r0"])


@pytest.mark.parametrize("fault", ["its own", "suspected", "lacks them"])
def test_a_source_that_should_have_had_them_is_remembered(fault: str) -> None:
    run, relay = fetching()
    source = relays_of(run)["r0"]
    if fault == "suspected":
        source.suspected_since = 8.0
    elif fault == "lacks them":
        source.versions = [10]
    fails(run, "source")
    assert relay.refused_sources == ["r0"]
    own = fault == "its own"
    assert relay.failed_source == ("r0" if own else None)
    assert relay.starved_since == (9.0 if own else None)
    assert run.state.counters.watchdog == {"fetch_refused": 1}


def test_starving_begins_with_the_first_failure() -> None:
    run, relay = fetching()
    relay.starved_since = 2.0
    fails(run, "room")
    assert (relay.starved_since, relay.refused_sources) == (2.0, ["r0"])


@pytest.mark.parametrize("late", [{"publication_id": 10}, {"number": 3}])
def test_news_of_an_earlier_fetch_is_ignored(late: dict[str, int]) -> None:
    run, relay = fetching()
    fails(run, "source", **late)
    assert (relay.fetching, relay.refused_sources) == (20, [])
    assert run.state.counters.watchdog == {}


def asked(run: Run) -> list[tuple[str, str | None]]:
    """The relays that begin to fetch, each with its source."""
    return [(one.relay_id, one.source) for one in of(run.out, c.FetchWeights)]


def test_a_fetch_under_way_is_left_alone() -> None:
    run, relay = fetching()
    relays_of(run)["r2"].versions = [20]
    before = relay.fetch
    relays.advance(run)
    assert (asked(run), relay.fetch) == ([], before)
    relays_of(run)["r0"].suspected_since = relay.suspected_since = 8.0
    relays.advance(run)
    assert (asked(run), relay.fetch) == ([], before), "it cannot act"


def test_a_fetch_from_a_suspected_source_continues_from_another_if_one_exists() -> None:
    run, relay = fetching()
    relays_of(run)["r0"].suspected_since = 8.0
    relays_of(run)["r2"].versions = [20]
    relays.advance(run)
    assert asked(run) == [("r1", None)], "it acts as the master"
    run, relay = fetching()
    relays_of(run)["r0"].suspected_since = 8.0
    relays_of(run)["r2"].versions = [20]
    relay.refused_sources = [None, "r2"]
    relays.advance(run)
    assert relay.fetch == Fetch(publication_id=20, source="r0", base=None)
    assert asked(run) == []


def test_a_relay_whose_source_is_gone_takes_another_or_stops() -> None:
    run, relay = fetching()
    relays_of(run)["r0"].versions = [10]
    relays_of(run)["r2"].versions = [20]
    relays_of(run)["r0"].refused_sources = [None, "r2"]
    relays.advance(run)
    assert asked(run) == [("r1", "r2")]
    run, relay = fetching()
    relays_of(run)["r0"].versions = [10]
    relays_of(run)["r2"].versions = [20]
    relays_of(run)["r0"].refused_sources = [None, "r2"]
    relay.refused_sources = ["r2"]
    relays.advance(run)
    assert relay.fetch is None


def test_a_relay_fetches_the_published_weights_that_it_lacks() -> None:
    run, _ = fetching()
    relays.advance(run)
    assert asked(run) == [], "there is no engine on its host"
    run.state.engines[E1].seat.host = 2
    run.fleet_changed()
    relays.advance(run)
    assert asked(run) == [("r2", "r1")], "the one before it is fetching them"


def test_older_weights_come_to_where_an_engine_can_load_them() -> None:
    """An evaluation waits for weights 10, which the trainer still has. The master
    fetches them if no relay has them, and else a relay with an engine on its host, if
    none of these has them.
    """
    for hosts, holders, expected in (
        ({1, 2}, (), [("r0", None)]),
        ({1, 2}, ("r2",), []),
        ({1}, ("r2",), [("r1", "r2")]),
        ({2}, ("r0", "r1"), [("r2", "r1")]),
        (set[int](), ("r0",), []),
    ):
        run, _ = fetching(mode="decoupled")
        run.state.evaluations.current = Evaluation(
            version=1, final=False, to_draw=[], publication_id=10
        )
        for relay in relays_of(run).values():
            relay.versions = [10, 20] if relay.id in holders else [20]
            relay.status, relay.fetch = RelayStatus.READY, None
        for engine, host in zip(
            list(run.state.engines.values()), [*hosts, None, None], strict=False
        ):
            engine.seat.host, engine.draining = host or 0, host is None
        run.fleet_changed()
        relays.advance(run)
        assert asked(run) == expected, (hosts, holders)
        del run.state.publication.retained[10]
        assert relays._older_weights(run) is None
