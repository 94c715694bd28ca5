"""Costs follow what the engines measured, and nothing where degrees cannot be
compared.
"""

import msgspec
import pytest

from rollweave.core.mechanisms.costs import rates as costs
from rollweave.core.mechanisms.lengths.work import rate
from rollweave.core.mechanisms.placement import assignment
from rollweave.schema.events import StepTime
from tests.support.states import E0, E1, TAIL, fleet, members, profile, running

WORKS = [(40, 400), (20, 100), (10, 50)]
KINDS = {1: ("", 1), 2: ("", 2)}


def test_groups_cost_what_their_degrees_measured() -> None:
    run = fleet(1, lengths=TAIL)
    groups = costs.groups_of(run, WORKS, KINDS)
    for degree in (1, 2):
        measured = rate(profile(degree, gain=1.9), slots=16, kv_tokens=10**6)
        assert groups.seconds(degree, 0, 3) == measured.seconds(longest=40, tokens=70, occupied=550)


def test_degrees_cost_the_same_if_one_is_unmeasured() -> None:
    run = fleet(1, lengths=TAIL)
    del run.state.mechanisms["costs"].measured[""][2]
    groups = costs.groups_of(run, WORKS, KINDS)
    same = rate(costs.UNMEASURED, slots=16, kv_tokens=550)
    for degree in (1, 2):
        assert groups.seconds(degree, 0, 3) == same.seconds(longest=40, tokens=70, occupied=550)


def test_an_engine_without_a_profile_has_a_rate_and_no_measurement() -> None:
    run = fleet(1, lengths=TAIL)
    engine = next(iter(run.state.engines.values()))
    engine.abilities.max_slots, engine.abilities.kv_tokens = 0, 0
    before = dict(run.state.mechanisms["costs"].measured[""])
    costs.joined(run, engine, ())
    assert costs.rate_of(run, engine) == rate(profile(1, gain=1.9), slots=1, kv_tokens=1)
    assert run.state.mechanisms["costs"].measured[""] == before
    run.state.mechanisms["costs"].measured = {}
    costs.joined(run, engine, ())
    assert costs.rate_of(run, engine) == rate(costs.UNMEASURED, slots=1, kv_tokens=1)
    costs.joined(run, engine, (StepTime(batch=1, seconds=3.0),))
    known = costs.rate_of(run, engine)
    engine.seat.degree = 2
    costs.joined(run, engine, ())
    assert costs.rate_of(run, engine) == known, "no engine of degree 2 is measured"
    assert run.state.mechanisms["costs"].measured[""][1].rate == costs.rate_of(run, engine)
    assert run.state.mechanisms["costs"].measured[""][1].slots == 1


def test_engines_of_different_hardware_are_measured_apart() -> None:
    """Both have degree 1. The one of the faster pool gets the longest trajectory and
    more of the others, whichever joined last.
    """
    for last in (E0, E1):
        run = running(40, 30, 20, 10, 10, 10, 10)
        engines = run.state.engines
        engines[E0].seat.pool, engines[E1].seat.pool = "compute", "bandwidth"
        for engine_id in sorted((E0, E1), key=lambda one: one == last):
            engine = engines[engine_id]
            engine.abilities.max_slots, engine.abilities.kv_tokens = 16, 10**6
            costs.joined(run, engine, profile(1 if engine_id == E0 else 4, gain=2))
        assert run.state.mechanisms["costs"].measured["bandwidth"][1].rate == costs.rate_of(
            run, engines[E1]
        )
        assert run.state.mechanisms["costs"].measured["compute"][1].rate == costs.rate_of(
            run, engines[E0]
        )
        places = [assignment.engine_of_rank(run, one) for one in members(run)]
        assert places[0] == E1
        assert places.count(E1) > places.count(E0) > 0
        assert costs.numbers_of(run, engines.values()) == {("bandwidth", 1): 2, ("compute", 1): 1}


def test_hosts_without_a_pool_of_the_engine_tell_hardware_apart_by_their_pools() -> None:
    run = running(1)
    host = run.state.hosts.up[0]
    run.state.hosts.up[0] = msgspec.structs.replace(host, pools=("H20", "all"))
    engine = run.state.engines[E0]
    assert costs.kind_of(run, engine) == ("H20+all", 1)
    engine.seat.pool = "H20"
    assert costs.kind_of(run, engine) == ("H20", 1)


def test_another_rate_changes_the_seconds_of_the_same_work() -> None:
    run = running(50, engine=E0)
    engine = run.state.engines[E0]
    before = assignment.work_s(run, engine)
    costs.joined(run, engine, (StepTime(batch=1, seconds=100.0),))
    assert assignment.work_s(run, engine) > 10 * before


def test_recent_lengths_are_of_all_domains() -> None:
    run = fleet(1, lengths=[3, 5])
    run.state.mechanisms["lengths"].domains["b"] = type(
        run.state.mechanisms["lengths"].domains["a"]
    )(lengths=[7])
    assert costs.recent_lengths(run) == [3, 5, 7]


def test_only_the_shortest_context_prices_a_table() -> None:
    points = [StepTime(batch=b, context=c, seconds=1.0) for b, c in [(1, 64), (4, 64), (1, 4096)]]
    assert costs._shortest(points) == points[:2]
    with pytest.raises(ValueError, match="min"):
        costs._shortest([])
