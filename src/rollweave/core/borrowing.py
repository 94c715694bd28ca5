"""Serving engines that the run borrows: which ones, and for how long (ROSE §4).

A borrowed engine is an engine like any other. It joins in the middle of a step, loads
weights while the run's own engines continue, takes turns only with weights that are at
least as new as theirs (`core/fleet`), and leaves at once when its lender asks for it:
its turns continue elsewhere. It is never restarted: another lender takes its place.

Invariants (`core/checks`): a lender has at most one engine of the run, and no group has
more engines than it may borrow.
"""

from rollweave.core import dispatching, engines, membership, turns
from rollweave.core.policy.borrowing import LEASE_S, must_return, to_borrow
from rollweave.core.run import Run
from rollweave.core.state import Engine, Phase
from rollweave.schema.events import EngineSlot, LendersReported


def on_reported(run: Run, event: LendersReported) -> None:
    """Renew leases, give back what must be, and borrow what may be."""
    if run.state.phase is not Phase.RUNNING:
        return
    name = run.config.run.name
    known = {lender.name: lender for lender in event.lenders}
    for engine in _borrowed(run):
        reason = must_return(engine.lender, event.lenders, run=name)
        if reason:
            give_back(run, engine, reason)
            continue
        lender = known.get(engine.lender)
        if lender is None:
            continue
        if lender.lent_to == name:
            engine.heard_at = run.now
        if lender.takes != engine.takes:
            engine.takes = lender.takes
            run.fleet_changed()
            if not lender.takes:
                dispatching.requeue_from(run, engine)
    for number, group in enumerate(run.config.engines):
        if not group.borrowed:
            continue
        held = [engine.lender for engine in _borrowed(run) if engine.group == number]
        others = [engine.lender for engine in _borrowed(run) if engine.group != number]
        for lender_name in to_borrow(
            [lender for lender in event.lenders if lender.name not in others],
            held=held,
            most=group.count,
        ):
            slot = EngineSlot(
                id=membership.next_id(run.state),
                degree=group.degree,
                group=number,
                lender=lender_name,
            )
            engines.borrow(run, slot)


def check_leases(run: Run) -> None:
    """Give back the engines whose lenders have not been heard of for too long."""
    for engine in _borrowed(run):
        if run.now - engine.heard_at > LEASE_S:
            give_back(run, engine, f"its lender was not heard of for {LEASE_S:g} s")


def give_back(run: Run, engine: Engine, reason: str) -> None:
    """Take all turns from the engine, and remove it."""
    if engine.leaving:
        return
    run.warn(engine.id, f"given back to {engine.lender}: {reason}", count="engine_given_back")
    for trajectory_id in engine.active:  # its turns continue with what they have
        turn = run.state.trajectories[trajectory_id].open_turn
        turn.returned_with = engine.publication_id
    engine.leaving = True
    engines.drain(run, engine)
    turns.recall_all(run, engine)


def _borrowed(run: Run) -> list[Engine]:
    return [engine for engine in run.state.engines.values() if engine.lender]
