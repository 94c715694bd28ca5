"""Engines that hosts lend: where they are, and when they are given back."""

from rollweave.core.mechanisms import loans
from rollweave.core.mechanisms.loans import IDLE_S, Loans
from rollweave.core.mechanisms.membership.bindings import bind_all, bind_engine
from rollweave.core.run import Run
from rollweave.core.state import Phase
from rollweave.schema import commands as c
from rollweave.schema.base import EngineId, TrajectoryId
from rollweave.schema.events import EngineSlot, Lender, LendersReported
from rollweave.schema.hosts import HostSlot
from tests.support.kinds import of
from tests.support.states import running

OWN = HostSlot(number=0, name="own", machine="own")
LENDS = HostSlot(number=1, name="lends", machine="lends", lends=True)
REPORT = LendersReported(lenders=(Lender(name="lends", kv_use=0.5, host=1),))


def borrower() -> Run:
    """Return a run on a host of its own, beside a host that lends."""
    run = running(
        weights={"relays": 0}, loans={"engines": 2}, cluster={"address": "127.0.0.1:1", "hosts": 1}
    )
    run.state.hosts.up = {0: OWN, 1: LENDS}
    run.state.phase, run.out = Phase.RUNNING, []
    return run


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
    (engine,) = [one for one in run.state.engines.values() if one.lender]
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
