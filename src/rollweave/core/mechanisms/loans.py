"""Serving engines that the run borrows: which ones, and for how long (ROSE §4). The
engines with the lowest recent use of KV memory are borrowed, each by at most one run.

A borrowed engine is an engine like any other. It joins in the middle of a step, loads
weights while the run's own engines continue, takes turns only with weights that are at
least as new as theirs (`core/fleet`), and leaves immediately when its lender asks for
it: its turns continue elsewhere. It is never restarted; another lender takes its place.
A lender whose engine has failed is passed over for `RETRY_S`. A lender whose engine the
user has removed is passed over until the run is resumed.

When the run has had no trajectory for `IDLE_S`, because it trains, all borrowed engines
are given back, so that the lenders have their memory; they are borrowed again as soon
as a trajectory starts.

Invariants: a lender has at most one engine of the run, and the run has no more borrowed
engines than `loans.engines`.
"""

import math
from collections.abc import Iterable, Mapping

import msgspec

from rollweave.core import dispatching, turns
from rollweave.core.mechanisms import membership
from rollweave.core.mechanisms.membership import members
from rollweave.core.run import EngineFailure, EngineMove, Mechanism, Run
from rollweave.core.state import Engine, Phase
from rollweave.schema.base import EngineId
from rollweave.schema.config.root import RunConfig
from rollweave.schema.events import EngineSlot, Lender, LendersReported

LEASE_S = 30.0
"""Seconds after which an engine is given back if its lender no longer reports it as
lent to the run.
"""

RETRY_S = 60.0
"""Seconds without a loan for a lender whose engine has failed. Without this pause, a
lender that always fails would be tried again and again, although others may not fail.
"""

IDLE_S = 30.0
"""Seconds without a trajectory after which all borrowed engines are given back."""


def to_borrow(lenders: Iterable[Lender], *, held: Iterable[str], most: int) -> list[str]:
    """Return the lenders to borrow in addition to those in `held`, up to `most` in all,
    the least used first.
    """
    taken = set(held)
    free = [
        lender
        for lender in lenders
        if not (lender.lent_to or lender.recalled or lender.name in taken)
    ]
    free.sort(key=lambda lender: (lender.kv_use, lender.name))
    return [lender.name for lender in free[: max(0, most - len(taken))]]


def must_return(name: str, lenders: Iterable[Lender], *, run: str) -> str:
    """Return the reason why a borrowed engine must be given back immediately; "" if it
    may be kept. A lender that is not reported may be late: its lease decides.
    """
    for lender in lenders:
        if lender.name == name:
            if lender.recalled:
                return "its lender needs it"
            if lender.lent_to not in ("", run):
                return f"it is lent to {lender.lent_to}"
    return ""


BUSY = "serving"
"""The reason why a borrowed engine takes no turns: serving needs all of it."""


class Loans(msgspec.Struct):
    """The part of the state."""

    # the engines that are not given back yet, and when their lenders were last reported
    # as lent to the run
    engines: dict[EngineId, float] = {}
    lenders: tuple[Lender, ...] = ()  # as they were last reported
    reported_at: float = 0.0
    idle_since: float | None = None  # since when the run has had no trajectory
    resting: bool = False  # it has had none for `IDLE_S`, and borrows nothing
    passed_over: dict[str, float] = {}  # until when the run borrows nothing from these lenders


def used(config: RunConfig) -> bool:
    """True if the run borrows engines."""
    return config.loans is not None


def replaced(run: Run, _former: Mapping[EngineId, Engine]) -> None:
    """Forget the lenders and loans of a former world: hosts have new numbers, and the
    next report names the lenders of this world.
    """
    part = run.part(Loans)
    part.engines, part.lenders, part.passed_over = {}, (), {}
    part.idle_since, part.resting = None, False


def on_reported(run: Run, event: LendersReported) -> None:
    """Renew leases, give back the engines that must leave, and borrow the engines that
    may join: while the run trains, and not for its end.
    """
    if run.state.phase is Phase.FINISHED:
        return
    name, part = run.config.run.name, run.part(Loans)
    known = {lender.name: lender for lender in event.lenders}
    for engine in _borrowed(run):
        reason = must_return(engine.lender, event.lenders, run=name)
        if reason:
            give_back(run, engine, reason)
            continue
        lender = known.get(engine.lender)
        if lender is None:
            continue
        if lender.lent_to == name and engine.id in part.engines:
            part.engines[engine.id] = run.now
        if lender.takes and engine.barred.pop(BUSY, None) is not None:
            run.fleet_changed()
        elif not lender.takes and BUSY not in engine.barred:
            engine.barred[BUSY] = math.inf
            run.fleet_changed()
            dispatching.requeue_from(run, engine)
    part.lenders, part.reported_at = event.lenders, run.now
    part.passed_over = {
        lender: until for lender, until in part.passed_over.items() if run.now < until
    }
    if run.state.phase is Phase.RUNNING and not part.resting:
        _borrow(run)


def failed(run: Run, engine: Engine, _failure: EngineFailure) -> None:
    """Pass over the lender of an engine that has failed while it was borrowed."""
    if engine.lender and not engine.leaving:
        run.part(Loans).passed_over[engine.lender] = run.now + RETRY_S


def removed(run: Run, engine: Engine) -> None:
    """Borrow another engine in the place of one that has gone."""
    part = run.part(Loans)
    if part.engines.pop(engine.id, None) is not None and engine.leaving:
        part.passed_over[engine.lender] = math.inf  # the user has withdrawn it
    if engine.lender and run.state.phase is Phase.RUNNING and not part.resting:
        _borrow(run)


def _borrow(run: Run) -> None:
    """Borrow the engines that may join, by the last report, if it is recent."""
    part = run.part(Loans)
    if run.now - part.reported_at > LEASE_S:
        return
    lenders = {lender.name: lender for lender in part.lenders}
    held = [engine.lender for engine in _borrowed(run)]
    able = [
        lender
        for lender in part.lenders
        if lender.host in {-1, *run.state.hosts.up}
        and run.now >= part.passed_over.get(lender.name, -math.inf)
    ]
    for lender_name in to_borrow(able, held=held, most=_most(run)):
        slot = EngineSlot(
            id=members.next_id(run.state),
            degree=run.config.engines[0].degree,
            host=max(0, lenders[lender_name].host),
            lender=lender_name,
        )
        if membership.start(run, slot):
            part.engines[slot.id] = run.now


def check_leases(run: Run) -> None:
    """Give back the engines whose lenders have not been heard of for too long, and all
    of them while the run has no trajectories. Borrow again when it has.
    """
    part, pools = run.part(Loans), run.state.pools
    if pools.init or pools.run_queued or pools.run:
        part.idle_since = None
        if part.resting and run.state.phase is Phase.RUNNING:
            part.resting = False
            _borrow(run)
    elif part.idle_since is None:
        part.idle_since = run.now
    elif run.now - part.idle_since > IDLE_S and not part.resting:
        part.resting = True
        for engine in _borrowed(run):
            give_back(run, engine, f"no trajectory has needed it for {IDLE_S:g} s")
    for engine in _borrowed(run):
        if run.now - part.engines.get(engine.id, 0.0) > LEASE_S:
            give_back(run, engine, f"its lender was not heard of for {LEASE_S:g} s")


def give_back(run: Run, engine: Engine, reason: str) -> None:
    """Take all turns from the engine, and remove it."""
    if run.part(Loans).engines.pop(engine.id, None) is None:
        return  # it is given back already
    run.warn(engine.id, f"given back to {engine.lender}: {reason}", count="engine_given_back")
    for trajectory_id in engine.active:  # its turns continue with what they have
        turn = run.state.trajectories[trajectory_id].open_turn
        turn.returned_with = engine.publication_id
    engine.leaving = True
    membership.drain(run, engine)
    turns.recall_all(run, engine)


def _most(run: Run) -> int:
    assert run.config.loans is not None, "the mechanism is used"
    return run.config.loans.engines


def _borrowed(run: Run) -> list[Engine]:
    return [engine for engine in run.state.engines.values() if engine.lender]


def check(run: Run) -> None:
    """Assert that the run has no more borrowed engines than it may have, and that they
    have new weights when they take turns.
    """
    engines = _borrowed(run)
    lenders = [engine.lender for engine in engines]
    assert len(lenders) == len(set(lenders)), f"a lender has two engines of the run: {lenders}"
    assert len(engines) <= _most(run), f"{len(engines)} engines are borrowed"
    for engine in engines:
        load = run.fleet.loads.get(engine.id)
        oldest = run.fleet.oldest
        assert load is None or oldest is None or engine.version >= oldest[0], (
            f"{engine.id} takes turns with stale weights"
        )


MECHANISM = Mechanism(
    name="loans",
    used=used,
    state=Loans,
    handlers={LendersReported: on_reported},
    steps={"rests": check_leases},
    follows={
        EngineMove.REPLACED: replaced,
        EngineMove.FAILED: failed,
        EngineMove.REMOVED: removed,
    },
    check=check,
)
