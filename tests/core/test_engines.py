"""An engine that joins, fails, restarts, or is given up with its host."""

import pytest

from rollweave.core import engines
from rollweave.core.mechanisms import membership
from rollweave.core.mechanisms.placement.assignment import Partition
from rollweave.core.run import Run
from rollweave.core.state import EngineStatus
from rollweave.schema import commands as c
from rollweave.schema import events as e
from tests.support.states import E0, E1, members, place_on_hosts, running


def serving(*, hosts: int = 0) -> Run:
    run = running(5)
    state = run.state
    for engine in state.engines.values():
        engine.status, engine.version, engine.publication_id = EngineStatus.SERVING, 3, 5
    place_on_hosts(state, hosts)
    state.mechanisms["relays"].order = list(state.mechanisms["relays"].relays)
    run.fleet_changed()
    run.out = []
    return run


def of(run: Run, kind: type[c.Command]) -> list[c.Command]:
    return [command for command in run.out if isinstance(command, kind)]


def test_a_restart_begins_anew() -> None:
    run = serving()
    engine = run.state.engines[E0]
    engine.failures.consecutive_timeouts, engine.failures.load_failures, engine.loading.id = 2, 1, 9
    run.now = 8.0
    run.state.mechanisms["placement"].partitions = {"": Partition()}
    engines.restart(run, engine, "stuck")
    assert not run.state.mechanisms["placement"].partitions, "they had shares for it"
    assert (engine.failures.restarts, engine.epoch, engine.status) == (1, 1, EngineStatus.STARTING)
    assert (engine.version, engine.publication_id, engine.loading.id) == (-1, -1, -1)
    assert engine.failures.consecutive_timeouts == 0
    assert engine.failures.load_failures == 0
    assert engine.since == 8.0
    assert of(run, c.RestartEngine) == [
        c.RestartEngine(engine_id=E0, degree=1, group=0, epoch=1, reason="stuck")
    ]
    assert run.state.counters.watchdog == {"engine_restarted": 1}
    assert list(run.fleet.loads) == [E1]


def test_an_engine_that_keeps_failing_is_removed() -> None:
    run = serving()
    engine, limit = run.state.engines[E0], run.config.watchdog.restarts
    engine.failures.restarts = limit - 1
    engines.restart(run, engine, "stuck")
    assert engine.failures.restarts == limit
    engines.restart(run, engine, "stuck")
    assert list(run.state.engines) == [E1]
    assert of(run, c.RemoveEngine) == [c.RemoveEngine(engine_id=E0, reason="stuck")]
    (removal,) = [warning for warning in of(run, c.Warn) if "removed" in warning.message]  # type: ignore[attr-defined]
    assert removal.component == E0  # type: ignore[attr-defined]
    assert run.state.error == ""
    last = run.state.engines[E1]
    last.failures.restarts = limit
    engines.restart(run, last, "stuck")
    assert run.state.error == "no engine is left; the last one (e1): stuck"


def test_planned_engines_and_services_outlive_the_last_engine() -> None:
    for change in ("planned", "service"):
        run = serving()
        del run.state.engines[E1]
        run.state.membership.pending_degrees = [1] if change == "planned" else []
        run.state.serving = change == "service"
        engine = run.state.engines[E0]
        engine.failures.restarts = run.config.watchdog.restarts
        engines.restart(run, engine, "stuck")
        assert run.state.engines == {}
        assert run.state.error == ""


def test_a_host_whose_engines_keep_failing_is_given_up() -> None:
    """Engine 0 is on host 0, and engine 1 on host 1."""
    run = serving(hosts=2)
    engine = run.state.engines[E0]
    engine.failures.restarts = run.config.watchdog.restarts
    engines.restart(run, engine, "stuck")
    assert (list(run.state.engines), list(run.state.mechanisms["relays"].relays)) == ([E1], ["r1"])
    assert run.state.mechanisms["relays"].order == ["r1"]
    assert [command.relay_id for command in of(run, c.RemoveRelay)] == ["r0"]  # type: ignore[attr-defined]
    assert [command.engine_id for command in of(run, c.RemoveEngine)] == [E0]  # type: ignore[attr-defined]
    assert run.state.counters.watchdog == {"host_evicted": 1}


@pytest.mark.parametrize("elsewhere", ["without weights", "leaving", "draining"])
def test_a_host_stays_if_no_other_serves(elsewhere: str) -> None:
    run = serving(hosts=2)
    other = run.state.engines[E1]
    match elsewhere:
        case "without weights":
            other.version = -1
        case "leaving":
            other.leaving = True
        case "draining":
            other.draining = True
    engine = run.state.engines[E0]
    engine.failures.restarts = run.config.watchdog.restarts
    engines.restart(run, engine, "stuck")
    assert list(run.state.mechanisms["relays"].relays) == ["r0", "r1"]
    assert E0 not in run.state.engines


def test_an_engine_that_was_to_leave_is_not_restarted() -> None:
    run = serving()
    engine = run.state.engines[E0]
    engine.leaving = True
    engines.restart(run, engine, "stuck")
    assert list(run.state.engines) == [E1]
    assert run.state.counters.engines_left == 1
    assert run.state.membership.withdrawn == [E0]
    assert of(run, c.RestartEngine) == []


def test_an_engine_joins_with_or_without_weights() -> None:
    for version, status in ((-1, EngineStatus.STALE), (0, EngineStatus.SERVING)):
        run = serving()
        engine = run.state.engines[E0]
        engine.status, engine.version, engine.publication_id = EngineStatus.STARTING, -1, -1
        joined = e.EngineJoined(
            engine_id=E0, epoch=0, max_slots=7, kv_total_tokens=70, version=version
        )
        engines.on_joined(run, joined)
        assert (engine.status, engine.version, engine.publication_id) == (status, version, version)
        assert (engine.abilities.max_slots, engine.abilities.kv_tokens) == (7, 70)
        engines.on_joined(
            run, e.EngineJoined(engine_id=E0, epoch=0, max_slots=9, kv_total_tokens=1)
        )
        assert engine.abilities.max_slots == 7, "it has joined"


def test_news_of_a_former_life_is_ignored() -> None:
    run = serving()
    run.state.engines[E0].epoch = 2
    engines.on_lost(run, e.EngineLost(engine_id=E0, epoch=1, error="killed"))
    assert run.state.engines[E0].status is EngineStatus.SERVING
    engines.on_lost(run, e.EngineLost(engine_id=E0, epoch=2, error="killed"))
    assert run.state.engines[E0].status is EngineStatus.STARTING


def test_an_engine_that_leaves_drains_and_is_removed_when_it_is_idle() -> None:
    run = serving()
    membership.on_withdrawn(run, e.EngineWithdrawn(engine_id=E0, drain=True))
    engine = run.state.engines[E0]
    assert (engine.leaving, engine.draining) == (True, False)
    (only,) = members(run)
    run.fleet.occupy(engine, only.id, only.open_turn)
    membership.remove_drained(run)
    assert engine.draining
    assert E0 in run.state.engines
    run.fleet.vacate(engine, only.id, only.open_turn)
    membership.remove_drained(run)
    assert list(run.state.engines) == [E1]
    assert [command.reason for command in of(run, c.RemoveEngine)] == ["it was withdrawn"]  # type: ignore[attr-defined]


def test_the_last_engine_stays_although_it_was_to_leave() -> None:
    run = serving()
    membership.on_withdrawn(run, e.EngineWithdrawn(engine_id=E0, drain=True))
    del run.state.engines[E1]
    run.fleet_changed()
    membership.remove_drained(run)
    engine = run.state.engines[E0]
    assert (engine.leaving, engine.draining) == (False, False)
    assert run.state.counters.watchdog == {"engine_stays": 1}
    assert run.fleet.departing == ()


def test_an_engine_of_another_degree_is_removed_by_the_plan() -> None:
    run = serving()
    membership.drain(run, run.state.engines[E0])
    membership.remove_drained(run)
    assert list(run.state.engines) == [E1]
    assert run.state.counters.engines_left == 0
    (removed,) = of(run, c.RemoveEngine)
    assert isinstance(removed, c.RemoveEngine)
    assert removed.reason == "another engine takes its place"
