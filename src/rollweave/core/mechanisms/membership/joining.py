"""Engines that join and leave during a run.

Invariant: an engine that was withdrawn is gone in later worlds, too, and one that has
joined returns in them.
"""

from collections.abc import Mapping

from rollweave.core import dispatching, engines, turns
from rollweave.core.mechanisms.membership import bindings, members
from rollweave.core.run import Run
from rollweave.core.state import Engine, Phase, State, Unplaced
from rollweave.schema.base import EngineId
from rollweave.schema.commands import StartEngine
from rollweave.schema.events import EngineRegistered, EngineSlot, EngineWithdrawn


def replaced(run: Run, former: Mapping[EngineId, Engine]) -> None:
    """Begin with the engines and hosts of a new world. Engines that were leaving the
    `former` one have gone with it.
    """
    state, hosts, part = run.state, run.state.hosts, run.state.membership
    for engine in former.values():
        if engine.leaving and engine.id not in state.engines:
            _count_departure(state, engine)
    configured = {slot.id for slot in members.first_engines(run.config)}
    for engine in state.engines.values():
        _mark(run, engine, joined=engine.id not in configured)
    part.withdrawn = [name for name in part.withdrawn if name not in state.engines]
    numbers = [members.number_of(name) + 1 for name in state.engines]
    part.next_number = max([part.next_number, *numbers])
    part.pending_degrees.clear()
    seats = [engine.seat for engine in state.engines.values()]
    hosts.unplaced, hosts.shares_gpus = [], bindings.share_gpus(seats, hosts.ranks)
    hosts.engine_limits = bindings.engine_limits(hosts.up.values(), seats) if run.colocated else {}


def _mark(run: Run, engine: Engine, *, joined: bool) -> None:
    """Record whether the engine joined during the run. The clients of a service
    register engines that do everything.
    """
    engine.joined = joined
    if joined and run.state.serving:
        engine.seat.phase = "both"


def on_registered(run: Run, event: EngineRegistered) -> None:
    """Start one more engine, in any phase.

    It is stale until it has loaded the newest weights available to it.
    """
    state, slot = run.state, event.engine
    if state.serving:
        refused = slot.id in state.engines or state.phase is not Phase.SERVING
    else:
        refused = bool(members.why_not_join(run.config, state, slot))  # or the event is a duplicate
    if refused:
        return
    state.counters.engines_joined += 1
    add(run, slot, joined=True)


def add(run: Run, slot: EngineSlot, *, joined: bool = False) -> None:
    """Start this engine where there is a place, or once there is one."""
    place(run, slot, Unplaced(degree=slot.degree, group=slot.group, joined=joined))


def place(run: Run, slot: EngineSlot, engine: Unplaced) -> None:
    """Start an engine that had no place; it waits again if there is still none."""
    state, joined, moved = run.state, engine.joined, engine.moved
    placed = bindings.bind_engine(run.config, state, slot)
    if placed is None:
        state.hosts.unplaced.append(engine)
        return
    slot = placed
    _start(run, slot, joined=joined, moved=moved)


def borrow(run: Run, slot: EngineSlot) -> bool:
    """Start an engine on a lender; False if none of the run's hosts can have it."""
    placed = bindings.bind_engine(run.config, run.state, slot)
    if placed is None:
        return False
    _start(run, placed)
    return True


def _start(run: Run, slot: EngineSlot, *, joined: bool = False, moved: bool = False) -> None:
    state, engine = run.state, engines.new(run, slot)
    state.engines[slot.id] = engine
    _mark(run, engine, joined=joined)
    engine.failures.moved = moved
    if not state.serving:  # a service's engines are not numbered
        state.membership.next_number = members.number_of(slot.id) + 1
    run.fleet_changed()
    run.emit(
        StartEngine(
            engine_id=slot.id,
            degree=slot.degree,
            group=slot.group,
            host=slot.host,
            devices=slot.devices,
            lender=slot.lender,
        )
    )


def on_withdrawn(run: Run, event: EngineWithdrawn) -> None:
    """Mark the engine as leaving: `remove_drained` removes it when it may.

    In training the last engine stays.
    """
    engine = run.state.engines.get(event.engine_id)
    if engine is None or (
        not run.state.serving
        and not engine.lender
        and members.why_not_leave(run.config, run.state, engine)
    ):
        return
    engine.leaving = True
    run.fleet_changed()
    if not event.drain:
        drain(run, engine)
        turns.recall_all(run, engine)


def remove_drained(run: Run) -> None:
    """Drain engines that leave, in mode decoupled once their trajectories are over.
    Remove those that have drained.

    If all others were lost in the meantime, a training run keeps the engine that was to
    leave.
    """
    state = run.state
    for engine in [state.engines[engine_id] for engine_id in run.fleet.departing]:
        if engine.leaving and not state.serving and not members.remaining_engines(state, engine):
            run.warn(
                engine.id, "stays: it was to leave, and is the last engine", count="engine_stays"
            )
            engine.leaving = engine.draining = False
            engines.fleet_changed(run)
        if engine.leaving and not engine.draining and run.pacing.may_drain(run, engine):
            drain(run, engine)
        if engine.draining and not engine.active:
            engines.remove(
                run,
                engine,
                "it was withdrawn" if engine.leaving else "another engine takes its place",
            )


def drain(run: Run, engine: Engine) -> None:
    """Give the engine no more turns; `remove_drained` removes it when its last one is
    done.
    """
    engine.draining = True
    engines.fleet_changed(run)
    dispatching.requeue_from(run, engine)


def removed(run: Run, engine: Engine) -> None:
    """Count a withdrawn engine that has gone."""
    if engine.leaving:
        _count_departure(run.state, engine)


def _count_departure(state: State, engine: Engine) -> None:
    """Count a withdrawn engine that has gone, and keep it out of later worlds."""
    state.counters.engines_left += 1
    if not (engine.joined or engine.lender):
        state.membership.withdrawn.append(engine.id)
