"""Engines that hosts lend: where they are, and when they are given back."""

import msgspec

from rollweave.core import engines
from rollweave.core.mechanisms import loans, membership
from rollweave.core.mechanisms.loans import IDLE_S, LEASE_S, RETRY_S, Loans
from rollweave.core.mechanisms.membership.bindings import bind_all, bind_engine
from rollweave.core.mechanisms.relays.state import Relays
from rollweave.core.run import EngineMove, Run
from rollweave.core.state import Engine, Phase
from rollweave.schema import commands as c
from rollweave.schema.base import EngineId, TrajectoryId
from rollweave.schema.events import EngineSlot, EngineWithdrawn, Lender, LendersReported
from rollweave.schema.hosts import HostSlot
from tests.support.kinds import of
from tests.support.states import running

OWN = HostSlot(number=0, name="own", machine="own")
LENDS = HostSlot(number=1, name="lends", machine="lends", lends=True)
REPORT = LendersReported(lenders=(Lender(name="lends", kv_use=0.5, host=1),))


def borrower(*, most: int = 2) -> Run:
    """Return a run on a host of its own, beside a host that lends."""
    cluster = {"address": "127.0.0.1:1", "hosts": 1}
    run = running(weights={"relays": 0}, loans={"engines": most}, cluster=cluster)
    run.state.hosts.up = {0: OWN, 1: LENDS}
    run.state.phase, run.out = Phase.RUNNING, []
    return run


def borrowed(run: Run) -> list[Engine]:
    """Return the engines that are borrowed now."""
    return [engine for engine in run.state.engines.values() if engine.lender]


def started(run: Run) -> list[tuple[int, str]]:
    """Return host and lender of each engine that was started since the last call."""
    found = [(one.host, one.lender) for one in of(run.out, c.StartEngine)]
    run.out = []
    return found


def test_nothing_but_the_borrowed_engine_is_bound_to_a_host_that_lends() -> None:
    run = borrower()
    config, slots = run.config, [EngineSlot(id=EngineId(f"e{n}")) for n in range(4)]
    engines, ranks, unbound = bind_all(config, slots, [LENDS, OWN])
    assert {slot.host for slot in (*engines, *ranks)} == {0}
    assert not unbound
    for number in range(4):
        placed = bind_engine(config, run.state, EngineSlot(id=EngineId(f"e{9 + number}")))
        assert placed is not None
        assert placed.host == 0
    lent = EngineSlot(id=EngineId("e20"), host=1, lender="lends")
    assert bind_engine(config, run.state, lent) == lent


def test_an_engine_is_borrowed_on_its_host_and_only_while_the_host_is_up() -> None:
    run = borrower()
    loans.on_reported(run, REPORT)
    assert started(run) == [(1, "lends")]
    loans.on_reported(run, REPORT)
    assert started(run) == [], "a lender has one engine of the run"
    gone = borrower()
    del gone.state.hosts.up[1]
    loans.on_reported(gone, REPORT)
    assert started(gone) == []


def test_engines_are_given_back_while_no_trajectory_needs_them() -> None:
    run = borrower()
    loans.on_reported(run, REPORT)
    (engine,) = borrowed(run)
    trajectory = TrajectoryId("t0")
    run.state.pools.run[trajectory] = None
    run.now = 10 * IDLE_S
    loans.on_reported(run, REPORT)
    run.part(Loans).engines[engine.id] = run.now
    loans.check_leases(run)
    assert not engine.leaving
    del run.state.pools.run[trajectory]
    for now in (10.5, 11.4, 11.6):  # the lease is renewed meanwhile
        assert not engine.leaving, now
        run.now = now * IDLE_S
        run.part(Loans).engines[engine.id] = run.now
        loans.check_leases(run)
    assert engine.leaving
    del run.state.engines[engine.id]
    run.out = []
    loans.on_reported(run, REPORT)
    assert started(run) == [], "no trajectory needs it"
    run.state.pools.init[trajectory] = None
    loans.check_leases(run)
    assert started(run) == [(1, "lends")]


def test_a_lender_whose_engine_fails_is_passed_over_for_a_while() -> None:
    """Otherwise a lender that always fails, as one that is lent to another run does,
    would be borrowed again and again, and the others never.
    """
    run = borrower(most=1)
    run.state.hosts.up[2] = HostSlot(number=2, name="other", machine="other", lends=True)
    report = LendersReported(lenders=(*REPORT.lenders, Lender(name="other", kv_use=0.9, host=2)))
    loans.on_reported(run, report)
    (engine,) = borrowed(run)
    assert engine.lender == "lends"
    engines.restart(run, engine, "it is lent to another run", lost=True)
    (engine,) = borrowed(run)
    assert engine.lender == "other"
    run.now += RETRY_S / 2
    engines.restart(run, engine, "it fails, too", lost=True)
    loans.on_reported(run, report)
    assert not borrowed(run), "both have failed"
    run.now += RETRY_S / 2
    loans.on_reported(run, report)
    assert [engine.lender for engine in borrowed(run)] == ["lends"]


def test_the_final_evaluation_keeps_what_is_borrowed_and_returns_it_at_once() -> None:
    run = borrower()
    loans.on_reported(run, REPORT)
    (engine,) = borrowed(run)
    run.state.phase = Phase.EVALUATING
    run.state.pools.run[TrajectoryId("t0")] = None
    lent = Lender(name="lends", kv_use=0.5, host=1, lent_to=run.config.run.name)
    for _ in range(4):
        run.now += 0.8 * LEASE_S
        loans.on_reported(run, LendersReported(lenders=(lent,)))
        loans.check_leases(run)
        assert not engine.leaving, "its lender reports it"
    recalled = msgspec.structs.replace(lent, recalled=True)
    loans.on_reported(run, LendersReported(lenders=(recalled,)))
    assert engine.leaving
    engines.remove(run, engine, "it was withdrawn")
    run.out = []
    loans.on_reported(run, REPORT)
    assert started(run) == [], "the run is about to end"


def test_the_only_own_host_stays_while_engines_are_borrowed() -> None:
    """Its other engine and the trainer have nowhere else to go."""
    run = borrower()
    run.part(Relays).relayed = True
    loans.on_reported(run, REPORT)
    (lent,) = borrowed(run)
    lent.version = 0
    fails, stays = (one for one in run.state.engines.values() if not one.lender)
    for _ in range(run.config.watchdog.restarts + 1):
        engines.restart(run, fails, "it fails", lost=True)
    assert [*run.state.hosts.up] == [0, 1]
    assert [*run.state.engines] == [stays.id, lent.id]
    assert not run.state.error


def test_a_new_world_borrows_nothing_until_its_own_hosts_have_reported() -> None:
    """The numbers of a former world's hosts may be those of other hosts now."""
    run = borrower()
    loans.on_reported(run, REPORT)
    former, run.state.engines = run.state.engines, {}
    run.state.hosts.up = {0: msgspec.structs.replace(LENDS, number=0), 1: OWN}
    run.follow(EngineMove.REPLACED, former)
    run.out = []
    run.state.pools.run[TrajectoryId("t0")] = None
    run.part(Loans).resting = True
    loans.check_leases(run)
    assert started(run) == []
    loans.on_reported(run, LendersReported(lenders=(Lender(name="lends", kv_use=0.5, host=0),)))
    assert started(run) == [(0, "lends")]
    assert [*run.part(Loans).engines] == [one.id for one in borrowed(run)]


def test_an_engine_that_the_user_withdraws_is_not_borrowed_again() -> None:
    run = borrower()
    loans.on_reported(run, REPORT)
    (engine,) = borrowed(run)
    membership.on_withdrawn(run, EngineWithdrawn(engine_id=engine.id, drain=True))
    assert not engine.draining, "its turns may end"
    recalled = msgspec.structs.replace(REPORT.lenders[0], recalled=True)
    loans.on_reported(run, LendersReported(lenders=(recalled,)))
    assert engine.draining, "its lender needs it now"
    engines.remove(run, engine, "it was given back")
    loans.on_reported(run, REPORT)
    (engine,) = borrowed(run)
    membership.on_withdrawn(run, EngineWithdrawn(engine_id=engine.id, drain=True))
    engines.remove(run, engine, "it was withdrawn")
    run.now += 10 * RETRY_S
    loans.on_reported(run, REPORT)
    assert not borrowed(run)
