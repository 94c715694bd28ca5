"""Engines and ranks of the trainer that lose their places: they start where there is
room, or wait for a host.
"""

from rollweave.core import engines, turns
from rollweave.core.mechanisms.membership import bindings
from rollweave.core.policy.retry import Failover, failover
from rollweave.core.run import HostMove, Run
from rollweave.core.state import Engine, Unplaced
from rollweave.schema.base import EngineId
from rollweave.schema.events import EngineSlot


def given_up(run: Run, engine: Engine, reason: str) -> None:
    """Give up the host of an engine that has failed too often, if others can continue
    (Laminar §3.3).
    """
    followed = failover(
        restarts=engine.failures.restarts - 1,
        limit=run.config.watchdog.restarts,
        elsewhere=_serving_elsewhere(run, engine.seat.host),
        moved=engine.failures.moved,
    )
    if followed is Failover.EVICT_MACHINE:
        engine.failures.moved = True
        evict(
            run,
            engine.seat.host,
            f"engine {engine.id} failed {engine.failures.restarts} times; last: {reason}",
        )


def _serving_elsewhere(run: Run, host: int) -> int:
    """Return the number of engines on other hosts that have weights; 0 without
    relays.
    """
    if not run.carrier.relayed(run):
        return 0
    others = [engine for engine in run.state.engines.values() if engine.seat.host != host]
    return sum(engine.version >= 0 and not engine.departing for engine in others)


def evict(run: Run, host: int, reason: str, *, returns: bool = False) -> None:
    """Give up a host, with its relay and all its engines, which are started
    elsewhere.

    Relays that fetch weights from it find another source. A host `returns` if it may
    join again, as a lost one may.
    """
    state = run.state
    run.warn(f"host {host}", f"given up: {reason}", count="host_evicted")
    state.hosts.up.pop(host, None)
    run.follow(HostMove.GIVEN_UP, host, reason)
    for engine in [engine for engine in state.engines.values() if engine.seat.host == host]:
        displace(run, engine, f"host {host} was given up: {reason}", returns=returns)


def displace(run: Run, engine: Engine, reason: str, *, returns: bool = False) -> None:
    """Remove an engine that has lost its place; unless it was departing, it
    starts elsewhere. It waits for a host that `returns`, if there is no place.
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
    """End the run if the removed engine was the last one, unless another is planned,
    has a place, or waits for a host that may return.
    """
    state = run.state
    if state.serving or any(
        engine.samples and not engine.lender for engine in state.engines.values()
    ):
        return
    planned = state.membership.pending_degrees or any(
        one.returns or _has_place(run, one)
        for one in state.hosts.unplaced
        if run.config.engines[one.group].phase != "prefill"
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
