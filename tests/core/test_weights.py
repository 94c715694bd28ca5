"""Versions are kept as long as they may be needed; engines can load some of them."""

from rollweave.core import weights
from rollweave.core.mechanisms.relays import state
from rollweave.core.mechanisms.relays.fetching import published as begin_broadcast
from rollweave.core.run import Run
from rollweave.core.weights import MAX_VERSIONS
from tests.support.states import E0, E1, place_on_hosts, running


def published(*versions: int, hosts: int = 0) -> Run:
    """A run that has published these versions, each under ten times its number; with
    `hosts` each has a relay.
    """
    run = running()
    place_on_hosts(run.state, hosts)
    for engine in run.state.engines.values():
        engine.publication_id = engine.version = -1
    run.fleet_changed()
    for version in versions:
        weights.publish(run, version, 10 * version)
    return run


def test_the_newest_version_is_kept_and_those_in_use() -> None:
    run = published(1, 2)
    publication = run.state.publication
    assert (publication.version, publication.id) == (2, 20)
    assert publication.retained == {20: 2}
    run.state.engines[E0].publication_id = 20
    run.now = 7.0
    weights.publish(run, 3, 30)
    assert publication.retained == {20: 2, 30: 3}
    assert publication.at == 7.0
    run.state.engines[E0].publication_id, run.state.engines[E1].loading.id = 30, 20
    weights.publish(run, 4, 40)
    assert publication.retained == {20: 2, 30: 3, 40: 4}
    run.state.engines[E1].loading.id = 30
    weights.publish(run, 5, 50)
    assert publication.retained == {30: 3, 50: 5}
    weights.forget(run, 30)
    assert publication.retained == {50: 5}


def test_what_relays_hold_pass_on_and_build_on_is_kept() -> None:
    run = published(1, 2, hosts=2)
    first, second = run.state.mechanisms["relays"].relays.values()
    run.state.publication.retained = {10: 1, 20: 2}
    first.versions, second.versions = [10, 20], [10]
    assert weights.needed(run) == (10, 20), "the newest of each"
    second.versions, second.fetch = [], state.Fetch(publication_id=10, source=None, base=None)
    assert weights.needed(run) == (10, 20)
    second.fetch = state.Fetch(publication_id=20, source=None, base=10)
    assert weights.needed(run) == (10, 20)
    second.fetch = None
    assert weights.needed(run) == (20,)


def test_what_is_left_on_a_host_without_engines_is_not_kept() -> None:
    run = published(1, 2, hosts=3)
    run.state.mechanisms["relays"].order = ["r0", "r1", "r2"]
    run.state.publication.retained = {10: 1, 20: 2}
    run.state.mechanisms["relays"].relays["r2"].versions = [10]
    assert weights.needed(run) == (20,)
    run.state.mechanisms["relays"].relays["r1"].versions = [10]
    assert weights.needed(run) == (10, 20)


def test_relays_beside_engines_and_the_master_take_versions() -> None:
    run = published(1, hosts=4)
    part, fleet = run.part(state.Relays), run.fleet
    relays = part.relays
    run.state.mechanisms["relays"].order = ["r2", "r3", "r0", "r1"]

    def takers() -> list[str]:
        return [
            name for name, relay in relays.items() if state.takes_versions(part, relay, fleet.hosts)
        ]

    assert takers() == ["r0", "r1", "r2"]
    relays["r2"].suspected_since = 1.0
    assert takers() == ["r0", "r1", "r2", "r3"], "the next one acts as the master"
    run.state.mechanisms["relays"].order = ["r3", "r0", "r1"]
    relays["r2"].suspected_since = None
    assert takers() == ["r0", "r1", "r3"], "r2 is not in the chain yet"


def test_no_more_versions_are_kept_than_fit() -> None:
    run = published()
    publication = run.state.publication
    publication.retained = {number: number for number in range(20)}
    publication.id = 19
    run.state.mechanisms["relays"].relays = {
        f"r{number}": state.Relay(id=f"r{number}", host=0, versions=[number])
        for number in range(20)
    }
    assert weights.needed(run) == tuple(range(20 - MAX_VERSIONS, 20))


def test_ids_are_given_once() -> None:
    run = published()
    assert [weights.take_id(run) for _ in range(3)] == [0, 1, 2]


def test_a_publication_is_a_new_chance_for_sources() -> None:
    run = published(1, hosts=1)
    (relay,) = run.state.mechanisms["relays"].relays.values()
    relay.refused_sources, relay.stalled_sources, relay.force_full = ["r1"], ["r2"], True
    run.state.mechanisms["relays"].broadcast = {"whole": 1}
    begin_broadcast(run)
    assert (relay.refused_sources, relay.stalled_sources, relay.force_full) == ([], [], False)
    assert run.state.mechanisms["relays"].broadcast == {}


def test_what_a_lost_trainer_leaves_is_what_relays_hold() -> None:
    run = published(1, 2, hosts=2)
    first, second = run.state.mechanisms["relays"].relays.values()
    run.state.publication.retained = {10: 1, 20: 2, 30: 3}
    first.versions, second.fetch = [10], state.Fetch(publication_id=30, source=None, base=None)
    weights.trainer_lost(run)
    assert run.state.publication.retained == {10: 1, 30: 3}


def test_without_relays_an_engine_loads_what_the_trainer_holds() -> None:
    run = published(1, 2)
    engine = run.state.engines[E0]
    assert weights.newest(run, engine) == 20
    assert weights.is_in_memory(run, engine, 20)
    assert not weights.is_in_memory(run, engine, 10)
    assert state.relay_of(run, engine) is None
    run.state.publication.retained.clear()
    assert weights.newest(run, engine) is None
    assert not weights.is_obtainable(run, 20)


def test_with_relays_an_engine_loads_what_its_own_host_holds() -> None:
    run = published(1, 2, hosts=2)
    first, second = run.state.mechanisms["relays"].relays.values()
    run.state.publication.retained = {10: 1, 20: 2}
    first.versions, second.versions = [10, 20], [10]
    for engine_id, relay, newest in ((E0, first, 20), (E1, second, 10)):
        engine = run.state.engines[engine_id]
        assert state.relay_of(run, engine) is relay
        assert weights.newest(run, engine) == newest
        assert weights.is_in_memory(run, engine, 20) is (20 in relay.versions)
        assert weights.is_loadable(run, engine, 20) is (20 in relay.versions)
    del run.state.publication.retained[20]
    assert weights.newest(run, run.state.engines[E0]) == 10
    del run.state.mechanisms["relays"].relays["r1"]
    assert weights.newest(run, run.state.engines[E1]) is None
    assert not weights.is_in_memory(run, run.state.engines[E1], 10)


def test_a_checkpoint_serves_while_the_published_version_is_not_in_memory() -> None:
    run = published(1, 2)
    engine, publication = run.state.engines[E0], run.state.publication
    publication.checkpointed = {10: 1}
    assert weights.is_loadable(run, engine, 10)
    assert not weights.is_in_memory(run, engine, 10)
    assert weights.is_obtainable(run, 10)
    assert weights.newest(run, engine) == 20
    publication.retained.clear()
    assert weights.newest(run, engine) == 10
    engine.publication_id = 10
    assert weights.newest(run, engine) == 10
    engine.publication_id = 11
    assert weights.newest(run, engine) is None, "its own are newer"
    weights.keep_checkpoints(run, but={2})
    assert publication.checkpointed == {}


def test_only_decoupled_runs_load_checkpoints() -> None:
    run = published(1)
    weights.mark_checkpointed(run, 1, 10)
    assert run.state.publication.checkpointed == {}


def test_a_lost_relay_leaves_the_chain() -> None:
    run = published(hosts=2)
    run.state.mechanisms["relays"].order = ["r0", "r1"]
    state.leave_chain(run, run.state.mechanisms["relays"].relays["r0"])
    assert run.state.mechanisms["relays"].order == ["r1"]
    state.leave_chain(run, run.state.mechanisms["relays"].relays["r0"])
    assert run.state.mechanisms["relays"].order == ["r1"]


def test_a_fetch_of_a_whole_version_needs_no_base() -> None:
    run = published(1, hosts=1)
    run.state.publication.retained = {1: 1, 10: 1}
    (relay,) = run.state.mechanisms["relays"].relays.values()
    relay.fetch = state.Fetch(publication_id=10, source=None, base=None)
    assert weights.needed(run) == (10,)
    relay.fetch = state.Fetch(publication_id=10, source=None, base=1)
    assert weights.needed(run) == (1, 10)
