"""Hosts that join and that are lost (RollArt §8).

With several hosts there is a relay on each. A lost host takes its relay, its engines
and the trainer with it if it had one of its ranks. Its engines start again elsewhere,
under new names; those for which there is no place wait for a host that joins. The
trainer starts again from its checkpoint, once the loss of its processes is reported.
"""

from rollweave.core import bindings, engines, membership, relays
from rollweave.core.run import Run
from rollweave.core.state import Phase
from rollweave.schema.events import EngineSlot, HostJoined, HostLost
from rollweave.schema.hosts import HostSlot, RankSlot


def start(run: Run, hosts: tuple[HostSlot, ...], ranks: tuple[RankSlot, ...], relayed: int) -> None:
    """Record the hosts that a new world begins with."""
    part = run.state.hosts
    part.up = {host.number: host for host in hosts or bindings.one_machine(relayed)}
    part.ranks, part.unplaced = list(ranks), []


def on_joined(run: Run, event: HostJoined) -> None:
    """Start a relay on the host, and the engines that have no place."""
    state, number = run.state, event.host.number
    if number in state.hosts.up:
        return
    state.hosts.up[number] = event.host
    if state.chain.relayed:
        relays.add(run, number)
    run.warn(_name(event.host), "has joined", count="host_joined")
    advance(run)


def on_lost(run: Run, event: HostLost) -> None:
    """Let its engines start elsewhere."""
    state = run.state
    host = state.hosts.up.get(event.host)
    if host is None or state.phase is Phase.FINISHED:
        return
    lost = [
        (engine.degree, engine.group)
        for engine in state.engines.values()
        if engine.host == event.host and not engine.departing
    ]
    state.hosts.unplaced += lost
    engines.evict(run, event.host, f"{_name(host)} is lost: {event.error}")
    advance(run)


def advance(run: Run) -> None:
    """Start the engines that have no place yet, as far as there is one now."""
    state = run.state
    waiting, state.hosts.unplaced = state.hosts.unplaced, []
    for degree, group in waiting:
        slot = EngineSlot(id=membership.next_id(state), degree=degree, group=group)
        engines.add(run, slot)  # waits again if there is no place


def _name(host: HostSlot) -> str:
    return f"host {host.name or host.number}"
