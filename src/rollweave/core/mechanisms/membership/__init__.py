"""The engines of a run, which may join and leave, and the places of engines and of the
trainer's ranks on hosts and their devices.
"""

from collections.abc import Mapping

from rollweave.core import dispatching, engines, turns
from rollweave.core.mechanisms.membership import bindings, members
from rollweave.core.policy.retry import gives_up_host
from rollweave.core.run import EngineMove, HostMove, Mechanism, Run, TrainerMove
from rollweave.core.state import Engine, EngineStatus, Phase, State, Unplaced
from rollweave.schema.base import EngineId
from rollweave.schema.commands import StartEngine
from rollweave.schema.events import EngineRegistered, EngineSlot, EngineWithdrawn


def replaced(run: Run, former: Mapping[EngineId, Engine]) -> None:
    """Begin with the engines and hosts of a new world. Engines that were leaving the
    `former` world have gone with it.
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
    """Start this engine where there is a place, or once there is a place."""
    place(run, slot, Unplaced(degree=slot.degree, group=slot.group, joined=joined))


def place(run: Run, slot: EngineSlot, engine: Unplaced) -> None:
    """Start an engine that had no place; it waits again if there is still no place."""
    if not start(run, slot, joined=engine.joined, moved=engine.moved):
        run.state.hosts.unplaced.append(engine)


def start(run: Run, slot: EngineSlot, *, joined: bool = False, moved: bool = False) -> bool:
    """Start an engine; False if none of the run's hosts can have it."""
    state, placed = run.state, bindings.bind_engine(run.config, run.state, slot)
    if placed is None:
        return False
    engine = state.engines[placed.id] = engines.new(run, placed)
    _mark(run, engine, joined=joined)
    engine.failures.moved = moved
    if not state.serving:  # a service's engines are not numbered
        state.membership.next_number = members.number_of(placed.id) + 1
    run.fleet_changed()
    run.emit(
        StartEngine(
            engine_id=placed.id,
            degree=placed.degree,
            group=placed.group,
            host=placed.host,
            devices=placed.devices,
            lender=placed.lender,
        )
    )
    return True


def on_withdrawn(run: Run, event: EngineWithdrawn) -> None:
    """Mark the engine as leaving: `remove_drained` removes it when it has drained.

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
    Remove the engines that have drained. If all others were lost in the meantime, a
    training run keeps the engine that was to leave.
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


# Engines and ranks of the trainer that lose their places: they start where there is
# room, or wait for a host.


def given_up(run: Run, engine: Engine, reason: str) -> None:
    """Give up the host of an engine that has failed too often, if others can continue
    (Laminar §3.3).
    """
    failures, host = engine.failures, engine.seat.host
    if gives_up_host(elsewhere=_serving_elsewhere(run, host), moved=failures.moved):
        failures.moved = True
        evict(run, host, f"engine {engine.id} failed {failures.restarts} times; last: {reason}")


def _serving_elsewhere(run: Run, host: int) -> int:
    """Return the number of the run's own engines on other hosts that have weights; 0
    without relays. Borrowed engines may leave at any time, and nothing can move to
    their hosts.
    """
    if not run.carrier.relayed(run):
        return 0
    others = [engine for engine in run.state.engines.values() if engine.seat.host != host]
    return sum(engine.version >= 0 and not (engine.departing or engine.lender) for engine in others)


def evict(run: Run, host: int, reason: str, *, returns: bool = False) -> None:
    """Give up a host, with its relay and all its engines, which are started
    elsewhere.

    Relays that fetch weights from it find another source. A host `returns` if it may
    join again, as a lost host may.
    """
    state = run.state
    run.warn(f"host {host}", f"given up: {reason}", count="host_evicted")
    state.hosts.up.pop(host, None)
    run.follow(HostMove.GIVEN_UP, host, reason)
    for engine in [engine for engine in state.engines.values() if engine.seat.host == host]:
        displace(run, engine, f"host {host} was given up: {reason}", returns=returns)


def displace(run: Run, engine: Engine, reason: str, *, returns: bool = False) -> None:
    """Remove an engine that has lost its place; unless it was departing, it starts
    elsewhere. If there is no place, it waits for a host that `returns`.
    """
    if not (engine.departing or engine.lender):
        run.state.hosts.unplaced.append(
            Unplaced(
                degree=engine.seat.degree,
                group=engine.seat.group,
                joined=engine.joined,
                moved=engine.failures.moved,
                returns=returns,
            )
        )
    turns.fail_all(run, engine, reason, abort=True)
    engines.lose(run, engine, reason)


def end_if_last(run: Run, engine: Engine, reason: str) -> None:
    """End the run if the removed engine was the last one, unless another engine is
    planned, has a place, or waits for a host that may return.
    """
    state = run.state
    if state.serving or any(
        engine.samples and not engine.lender for engine in state.engines.values()
    ):
        return
    planned = state.membership.pending_degrees or any(
        slot.returns or _has_place(run, slot)
        for slot in state.hosts.unplaced
        if run.config.engines[slot.group].phase != "prefill"
    )
    if not (planned and state.hosts.up):
        state.error = state.error or f"no engine is left; the last one ({engine.id}): {reason}"


def _has_place(run: Run, engine: Unplaced) -> bool:
    slot = EngineSlot(id=EngineId(""), degree=engine.degree, group=engine.group)
    return bindings.bind_engine(run.config, run.state, slot) is not None


def place_trainer(run: Run, reason: str) -> None:
    """Find a place for each of the trainer's ranks; else the trainer waits for a host,
    and the watchdog bounds the wait.
    """
    state, trainer = run.state, run.state.trainer
    ranks = bindings.bind_ranks(run.config, state)
    if ranks or not state.hosts.ranks:
        trainer.unplaced, state.hosts.ranks = "", ranks
        return
    if not trainer.unplaced:
        run.warn("trainer", f"waits for a host with room: {reason}", count="trainer_unplaced")
    trainer.unplaced = reason


def check(run: Run) -> None:
    """Assert that engine numbers are used once, that a leaving engine launches nothing,
    and that the last engine of a training run stays.
    """
    state = run.state
    if state.serving or state.phase is Phase.FINISHED:
        return
    engines = list(state.engines.values())
    assert all(members.number_of(engine.id) < state.membership.next_number for engine in engines), (
        state.membership.next_number
    )
    assert not {*state.membership.withdrawn} & state.engines.keys(), (
        f"{state.membership.withdrawn} were withdrawn for good"
    )
    leaving = [engine for engine in engines if engine.leaving]
    assert not leaving or members.remaining_engines(state, leaving[0]), (
        f"all engines leave: {leaving}"
    )
    for engine in leaving:
        assert not run.pacing.interchangeable or engine.draining, f"{engine} takes turns"
        assert engine.status is not EngineStatus.STARTING or not engine.active, engine


MECHANISM = Mechanism(
    name="membership",
    used=lambda _: True,  # engines may join every run
    handlers={EngineRegistered: on_registered, EngineWithdrawn: on_withdrawn},
    steps={"end": remove_drained},
    follows={
        EngineMove.REPLACED: replaced,
        EngineMove.REMOVED: removed,
        EngineMove.GIVEN_UP: given_up,
        EngineMove.LOST: end_if_last,
        TrainerMove.STARTING: place_trainer,
    },
    check=check,
)
