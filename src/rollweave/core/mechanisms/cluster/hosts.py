"""Hosts that join and that are lost (RollArt §8).

With several hosts there is a relay on each. The loss of a host, or its end after
repeated failures (`mechanisms/membership`), ends its relay, its engines and, if one of
the trainer's ranks was there, the trainer. Other engines replace the lost engines, on
other hosts as long as there is room; the replacements move to the next host that joins,
once they may drain. Engines without a place start there, too. The trainer starts again
from its checkpoint, if need be in the place of engines, or on the next host that joins.
In a run that began without sharing GPUs, no GPU is shared later: its memory was only
found to suffice for one process.

In a colocated run the trainer and the engines are bound independently of each other.
The trainer starts again, next to the engines, if there is a GPU left for each rank;
else it waits for a host. The engines of a lost host start on GPUs without an engine, if
there are any, or on the next host that joins. GPUs that began with several engines may
have that many again.
"""

from rollweave.core import training
from rollweave.core.mechanisms import membership
from rollweave.core.mechanisms.cluster import workers
from rollweave.core.mechanisms.cluster.workers import Cluster
from rollweave.core.mechanisms.membership import bindings, members
from rollweave.core.run import HostMove, Run
from rollweave.core.state import Phase
from rollweave.schema.base import EngineId
from rollweave.schema.events import EngineSlot, HostJoined, HostLost, RunStarted, WorldLost
from rollweave.schema.hosts import HostSlot


def start(run: Run, _event: RunStarted | WorldLost) -> None:
    """Begin with the hosts of a new world, on which every engine is at home."""
    part = run.part(Cluster)
    part.displaced, part.returning = [], {}


def on_joined(run: Run, event: HostJoined) -> None:
    """Start a relay on the host, and the trainer and the engines that have no place."""
    state, number = run.state, event.host.number
    if number in state.hosts.up:
        return
    state.hosts.up[number] = event.host
    run.follow(HostMove.JOINED, number)
    run.warn(_name(event.host), "has joined", count="host_joined")
    if state.trainer.unplaced and state.phase is not Phase.FINISHED:
        training.start(run, state.trainer.unplaced)
    _give_way(run)
    _start_unplaced(run)
    workers.host_joined(run, number)
    part = run.part(Cluster)
    part.returning = dict.fromkeys(part.displaced, number)
    advance(run)


def on_lost(run: Run, event: HostLost) -> None:
    """Give the host up; `advance` starts the same number of engines elsewhere."""
    host = run.state.hosts.up.get(event.host)
    if host is not None and run.state.phase is not Phase.FINISHED:
        reason = f"{_name(host)} is lost: {event.error}"
        membership.evict(run, event.host, reason, returns=True)


def advance(run: Run) -> None:
    """Start the trainer elsewhere if its host is gone, start the engines for which
    there is a place now, and move the replacements of lost engines to a host that has
    joined.
    """
    if _trainer_is_cut_off(run) and not (run.state.error or run.state.trainer.unplaced):
        training.restart(run, "its host is gone")
        _give_way(run)
    if run.state.hosts.unplaced:
        before = {*run.state.engines}
        _start_unplaced(run)
        run.part(Cluster).displaced += [name for name in run.state.engines if name not in before]
    for engine_id, host in list(run.part(Cluster).returning.items()):
        _return(run, engine_id, host)


def _give_way(run: Run) -> None:
    """End the engines on the GPUs on which the trainer starts, until there is room for
    them elsewhere.
    """
    for engine in bindings.engines_in_the_way(run.config, run.state):
        membership.displace(run, engine, "the trainer needs its GPU", returns=True)


def _trainer_is_cut_off(run: Run) -> bool:
    """True if one of the trainer's ranks was on a host that is lost or was given up.
    The trainer does not depend on hosts that this machine stands for.
    """
    part = run.state.hosts
    return any(rank.host not in part.up for rank in part.ranks) and any(
        host.machine for host in part.up.values()
    )


def _return(run: Run, engine_id: EngineId, host: int) -> None:
    """Start another engine on this host if there is room, and drain `engine_id`."""
    state, part = run.state, run.part(Cluster)
    engine = state.engines.get(engine_id)
    if engine is None or engine.departing:
        part.displaced.remove(engine_id)
    elif host in state.hosts.up:
        slot = EngineSlot(
            id=members.next_id(state), degree=engine.seat.degree, group=engine.seat.group
        )
        place = bindings.bind_engine(run.config, state, slot)
        if place is not None and place.host == host:
            if not run.pacing.may_drain(run, engine):
                return  # a later event may let it
            membership.add(run, slot, joined=engine.joined)
            membership.drain(run, engine)
            part.displaced.remove(engine_id)
    del part.returning[engine_id]


def _start_unplaced(run: Run) -> None:
    state = run.state
    waiting, state.hosts.unplaced = state.hosts.unplaced, []
    for engine in waiting:
        slot = EngineSlot(id=members.next_id(state), degree=engine.degree, group=engine.group)
        membership.place(run, slot, engine)


def _name(host: HostSlot) -> str:
    return f"host {host.name or host.number}"
