"""The simulated relays, which fetch weights from each other in the time of the links
between their hosts.

Invariants: commands and answers are those of `runtime/supervisors/relays.py`; a relay
is never ahead of its source, and ends at least a chunk after it (Laminar §4.2: a
pipeline); bytes already received are not sent again by another source; a relay that
hangs does nothing and sends nothing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from rollweave.record.trace import RELAYS, Trace
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave_sim.clock import Clock
from rollweave_sim.cost import TrainerCosts

SUSPECT_S = 0.6
"""Seconds of silence after which a relay is suspected (runtime/supervisors/relays)."""

SILENT_S = 5.0
"""Seconds of silence after which a relay counts as lost."""

RESTART_S = 5.0
"""Seconds until a restarted relay listens. Assumption: the start of a small process."""

DELTA_SHARE = 0.0039
"""Bytes of a delta per byte of weights: `rollweave bench delta` with SmolLM2-135M,
whose weights were trained at a rate of 1e-6, so that 0.44 % of them change in a step
(2026-11-30, docs/results/delta.md). PULSE has 0.0077 for a 7B model.
"""


@dataclass(slots=True)
class Node:
    """One relay process.

    Of the current fetch, the share `received` had arrived at `since`, and the rest
    takes `seconds` from then on.
    """

    id: str
    host: int
    epoch: int
    up: bool = False
    versions: dict[int, float] = field(default_factory=dict)  # weights → time of arrival
    fetch: c.FetchWeights | None = None
    received: float = 0.0  # share of the fetch
    began: float = 0.0
    since: float = 0.0
    seconds: float = 0.0
    awaits_source: bool = False  # has received all that its source has
    ticket: int = 0
    hangs: bool = False
    deferred: list[c.FetchWeights] = field(default_factory=list)  # commands during a hang


class RelayHosts(Protocol):
    """Hosts of which the first `relays` have a relay."""

    relays: int

    def slowdown(self, one: int, other: int) -> float:
        """Return how many times as long weights travel between these hosts as between
        hosts of one site.
        """


class SimRelays:
    """Relays r0, r1, …, one on each host."""

    def __init__(
        self,
        *,
        clock: Clock,
        post: Callable[[e.Event], None],
        cost: TrainerCosts,
        hosts: RelayHosts,
        trace: Trace | None,
    ) -> None:
        self._clock, self._post, self._cost, self._hosts, self._trace = (
            clock,
            post,
            cost,
            hosts,
            trace,
        )
        self.nodes: dict[str, Node] = {}
        self.refusals: dict[str, int] = {}  # fetches whose bytes arrive corrupted

    # Relay lifecycle.

    def start(self) -> None:
        """Start all relays immediately, like engines."""
        for host in range(self._hosts.relays):
            self._begin(Node(id=f"r{host}", host=host, epoch=0), 0.0)

    def restart(self, command: c.RestartRelay) -> None:
        self._drop(self.nodes.get(command.relay_id))
        self._begin(Node(id=command.relay_id, host=command.host, epoch=command.epoch), RESTART_S)

    def remove(self, command: c.RemoveRelay) -> None:
        self._drop(self.nodes.pop(command.relay_id, None))

    def lose(self, relay_id: str, error: str) -> None:
        """Kill the process, and with it its stored weights."""
        node = self.nodes.get(relay_id)
        if node is not None and node.up:
            self.silence(relay_id)
            self._post(e.RelayLost(relay_id=relay_id, epoch=node.epoch, error=error))

    def silence(self, relay_id: str) -> None:
        """Kill the process without a report; later commands to it stay unanswered."""
        self._drop(self.nodes.get(relay_id))

    def hang(self, relay_id: str, seconds: float) -> None:
        """Let the process hang for that long, or until it counts as lost.

        Its stored weights stay readable.
        """
        node = self.nodes.get(relay_id)
        if node is None or not node.up or node.hangs:
            return
        for other in (node, *self._fetchers(node)):
            self._pause(other)
        node.hangs = True
        suspected = seconds > SUSPECT_S

        def suspect() -> None:
            if self._still_hangs(node):
                self._post(e.RelaySuspected(relay_id=relay_id, epoch=node.epoch))

        def end() -> None:
            if self._still_hangs(node) and seconds >= SILENT_S:
                self.lose(relay_id, f"no message for {SILENT_S:g} s")
            elif self._still_hangs(node):
                node.hangs = False
                if suspected:
                    self._post(e.RelayRecovered(relay_id=relay_id, epoch=node.epoch))
                self._resume_after_hang(node)

        if suspected:
            self._clock.after(SUSPECT_S, suspect)
        self._clock.after(min(seconds, SILENT_S), end)

    def drop_all(self) -> None:
        """End all relays, as the children of a lost controller."""
        for node in self.nodes.values():
            self._drop(node)
        self.nodes.clear()

    @property
    def relayed(self) -> bool:
        """True if engines get weights from relays."""
        return self._hosts.relays > 0

    def serves(self, host: int, publication_id: int) -> bool:
        """Return whether an engine of this host can read these weights, from its relay
        or, without relays, from the trainer.
        """
        if not self.relayed:
            return True
        node = self.nodes.get(f"r{host}")
        return node is not None and publication_id in node.versions

    # Weights.

    def fetch(self, command: c.FetchWeights) -> None:
        node = self.nodes.get(command.relay_id)
        if node is None or not node.up:
            return
        if node.hangs:
            node.deferred.append(command)
            return
        former, now = node.fetch, self._clock.now
        continues = former is not None and former.publication_id == command.publication_id
        node.received = self._received_share(node) if continues else 0.0
        if not continues:
            node.began = now
        self._clock.cancel(node.ticket)
        node.versions = {
            publication_id: since
            for publication_id, since in node.versions.items()
            if publication_id in command.keep or publication_id == command.base_id
        }
        node.fetch, node.since, node.awaits_source, node.seconds = command, now, False, math.inf
        self._resume(node)

    def _pause(self, node: Node) -> None:
        """Receive nothing from now on."""
        if node.fetch is not None:
            self._clock.cancel(node.ticket)
            node.received, node.since, node.seconds = (
                self._received_share(node),
                self._clock.now,
                math.inf,
            )

    def _resume(self, node: Node) -> None:
        """Receive the rest of the fetch from now on, unless the relay or its source
        hangs.
        """
        if node.fetch is None or node.awaits_source or self._is_hanging(node):
            return
        node.since, node.seconds = (
            self._clock.now,
            (1 - node.received) * self._transfer_s(node, node.fetch),
        )
        node.ticket = self._clock.after(node.seconds, lambda: self._arrived(node))

    def _resume_after_hang(self, node: Node) -> None:
        """Resume the relay and its fetchers after a hang or a loss."""
        deferred, node.deferred = node.deferred, []
        for command in deferred:
            self.fetch(command)
        for other in (node, *self._fetchers(node)):
            if other.seconds == math.inf:
                self._resume(other)

    def _is_hanging(self, node: Node) -> bool:
        source = (
            self.nodes.get(node.fetch.source)
            if node.fetch is not None and node.fetch.source is not None
            else None
        )
        return node.hangs or (source is not None and source.hangs)

    def _fetchers(self, source: Node) -> list[Node]:
        return [
            node
            for node in self.nodes.values()
            if node.fetch is not None and node.fetch.source == source.id
        ]

    def _still_hangs(self, node: Node) -> bool:
        return node.hangs and self.nodes.get(node.id) is node

    def _transfer_s(self, node: Node, command: c.FetchWeights) -> float:
        """Return the seconds of a full transfer.

        From the trainer it takes none: the publication's time includes handing the
        weights to the master.
        """
        if command.source is None:
            return 0.0
        slower = self._slower(node, command.source)
        if command.base_id is None:
            return self._cost.hop_s(share=1.0) * slower
        # changes are found, sent and applied piece by piece
        return max(self._cost.hop_s(share=DELTA_SHARE) * slower, self._cost.delta_s())

    def _slower(self, node: Node, source: str) -> float:
        """Return how many times as long weights travel to this relay as within a
        site.
        """
        other = self.nodes.get(source)
        return self._hosts.slowdown(other.host, node.host) if other is not None else 1.0

    def _received_share(self, node: Node) -> float:
        """Return the share of the current fetch that has arrived."""
        if not node.seconds:
            return 1.0
        return min(
            1.0, node.received + (1 - node.received) * (self._clock.now - node.since) / node.seconds
        )

    def _arrived(self, node: Node) -> None:
        """Handle the arrival of everything that the source has.

        Where the source is still fetching, the rest arrives one chunk behind it.
        """
        command = node.fetch
        assert command is not None, "a relay without a fetch has no ticket"
        if self._is_hanging(node):
            self._pause(node)
            return
        source = self.nodes.get(command.source) if command.source is not None else None
        if command.base_id is not None and command.base_id not in node.versions:
            self._refuse(node, command, "base", f"weights {command.base_id} are missing")
        elif self.refusals.get(node.id, 0) > 0:
            self.refusals[node.id] -= 1
            self._refuse(node, command, "broken", "the digest differs")
        elif command.source is None:
            self._finish(node, command)
        elif source is not None and command.publication_id in source.versions:
            since = source.versions[command.publication_id]
            # A source that had all of it before adds no lag.
            lag = self._cost.lag_s() * self._slower(node, source.id)
            due = since + lag if since > node.since else 0.0
            if self._clock.now < due:
                node.ticket = self._clock.at(due, lambda: self._arrived(node))
            else:
                self._finish(node, command)
        elif (
            source is not None
            and source.fetch is not None
            and source.fetch.publication_id == command.publication_id
        ):
            node.awaits_source = True
        else:
            self._refuse(
                node,
                command,
                "source",
                f"{command.source} does not have weights {command.publication_id}",
            )

    def _finish(self, node: Node, command: c.FetchWeights) -> None:
        node.versions[command.publication_id] = self._clock.now
        node.fetch = None
        if self._trace is not None:
            name = f"fetch {command.publication_id} from {command.source or 'the trainer'}"
            self._trace.span(RELAYS, node.id, name, node.began, self._clock.now)
        self._post(
            e.WeightsFetched(
                relay_id=node.id, epoch=node.epoch, publication_id=command.publication_id
            )
        )
        self._release_fetchers(node)

    def _refuse(
        self, node: Node, command: c.FetchWeights, reason: e.RefusalReason, error: str
    ) -> None:
        node.fetch = None
        self._post(
            e.FetchFailed(
                relay_id=node.id,
                epoch=node.epoch,
                publication_id=command.publication_id,
                fetch_number=command.fetch_number,
                reason=reason,
                error=error,
            )
        )
        self._release_fetchers(node)

    def _release_fetchers(self, source: Node) -> None:
        """Let relays that wait for this one receive its last chunk, or fail."""
        for node in self._fetchers(source):
            if node.awaits_source:
                node.awaits_source = False
                node.ticket = self._clock.after(0.0, lambda node=node: self._arrived(node))  # type: ignore[misc]

    def _begin(self, node: Node, seconds: float) -> None:
        self.nodes[node.id] = node

        def joined() -> None:
            node.up = True
            self._post(e.RelayJoined(relay_id=node.id, epoch=node.epoch))

        node.ticket = self._clock.after(seconds, joined)

    def _drop(self, node: Node | None) -> None:
        if node is None:
            return
        self._clock.cancel(node.ticket)
        node.up, node.fetch, node.awaits_source, node.hangs = False, None, False, False
        node.versions.clear()
        node.deferred.clear()
        self._release_fetchers(node)
        self._resume_after_hang(node)
