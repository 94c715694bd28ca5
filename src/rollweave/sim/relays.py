"""The simulated relays: they take weights from each other in the time that the links
between their machines need.

Invariants: commands and answers are those of `runtime/supervisors/relays.py`; a relay
is never ahead of the one that it takes from, and ends at least a chunk after it
(Laminar §4.2: a pipeline); what it has got so far is not sent again when its source is
another; a relay that hangs does nothing, and nothing comes from it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from rollweave.core.membership import machine_of
from rollweave.record.trace import RELAYS, Trace
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId
from rollweave.sim.clock import Clock
from rollweave.sim.cost import TrainerCosts

SUSPECT_S = 0.6
"""Seconds for which a relay may be silent until it is suspected (runtime/links/relay)."""

SILENT_S = 5.0
"""The same, until it counts as lost."""

RESTART_S = 5.0
"""Seconds until a relay that was started again listens.

Assumption: the start of a small process.
"""

DELTA_SHARE = 108e6 / 14e9
"""Bytes of a change for a byte of weights: PULSE's 108 MB for a 7B model's 14 GB, about
1 % of whose elements have changed.
"""


@dataclass(slots=True)
class Node:
    """One relay and its machine.

    Of what it takes, `got` had come at `since`, and the rest takes `seconds` from then
    on.
    """

    id: str
    epoch: int
    up: bool = False
    held: dict[int, float] = field(default_factory=dict)  # weights → since when
    take: c.FetchWeights | None = None
    got: float = 0.0  # share
    began: float = 0.0
    since: float = 0.0
    seconds: float = 0.0
    waits: bool = False  # all that its source had has come
    ticket: int = 0
    hangs: bool = False
    unheard: list[c.FetchWeights] = field(default_factory=list)  # what was said to it meanwhile


class SimRelays:
    """Relays r0, r1, …, one on each of `machines`."""

    def __init__(
        self,
        *,
        clock: Clock,
        post: Callable[[e.Event], None],
        cost: TrainerCosts,
        machines: int,
        trace: Trace | None,
    ) -> None:
        self._clock, self._post, self._cost, self._machines, self._trace = (
            clock,
            post,
            cost,
            machines,
            trace,
        )
        self.nodes: dict[str, Node] = {}
        self.refusals: dict[str, int] = {}  # takes whose bytes are to come broken

    # The life of a relay.

    def start(self) -> None:
        """Start all of them: at once, as engines."""
        for machine in range(self._machines):
            self._begin(Node(id=f"r{machine}", epoch=0), 0.0)

    def restart(self, command: c.RestartRelay) -> None:
        self._drop(self.nodes.get(command.relay_id))
        self._begin(Node(id=command.relay_id, epoch=command.epoch), RESTART_S)

    def remove(self, command: c.RemoveRelay) -> None:
        self._drop(self.nodes.pop(command.relay_id, None))

    def lose(self, relay_id: str, error: str) -> None:
        """The process dies, and the weights that it held with it."""
        node = self.nodes.get(relay_id)
        if node is not None and node.up:
            self.silence(relay_id)
            self._post(e.RelayLost(relay_id=relay_id, epoch=node.epoch, error=error))

    def silence(self, relay_id: str) -> None:
        """The process dies and nobody says so: what is asked of it from now on is not
        answered.
        """
        self._drop(self.nodes.get(relay_id))

    def hang(self, relay_id: str, seconds: float) -> None:
        """The process stands still for so long, or until it counts as lost.

        What it holds can be read.
        """
        node = self.nodes.get(relay_id)
        if node is None or not node.up or node.hangs:
            return
        for other in (node, *self._takers(node)):
            self._pause(other)
        node.hangs = True
        suspected = seconds > SUSPECT_S

        def suspect() -> None:
            if self._still_hangs(node):
                self._post(e.RelaySuspected(relay_id=relay_id, epoch=node.epoch))

        def end() -> None:
            if self._still_hangs(node) and seconds >= SILENT_S:
                self.lose(relay_id, f"said nothing for {SILENT_S:g} s")
            elif self._still_hangs(node):
                node.hangs = False
                if suspected:
                    self._post(e.RelayRecovered(relay_id=relay_id, epoch=node.epoch))
                self._go_on_after(node)

        if suspected:
            self._clock.after(SUSPECT_S, suspect)
        self._clock.after(min(seconds, SILENT_S), end)

    def drop_all(self) -> None:
        """The controller is gone, and its children with it."""
        for node in self.nodes.values():
            self._drop(node)
        self.nodes.clear()

    def machine_of(self, engine_id: EngineId) -> int | None:
        """The machine that the engine is on; None without relays."""
        return machine_of(engine_id, self._machines)

    def serves(self, engine_id: EngineId, weights_id: int) -> bool:
        """The engine can read these weights: from its machine's relay, or without
        relays from the trainer.
        """
        machine = self.machine_of(engine_id)
        if machine is None:
            return True
        node = self.nodes.get(f"r{machine}")
        return node is not None and weights_id in node.held

    # Weights.

    def take(self, command: c.FetchWeights) -> None:
        node = self.nodes.get(command.relay_id)
        if node is None or not node.up:
            return
        if node.hangs:
            node.unheard.append(command)
            return
        former, now = node.take, self._clock.now
        goes_on = former is not None and former.weights_id == command.weights_id
        node.got = self._share(node) if goes_on else 0.0
        if not goes_on:
            node.began = now
        self._clock.cancel(node.ticket)
        node.held = {
            held: since
            for held, since in node.held.items()
            if held in command.keep or held == command.base_id
        }
        node.take, node.since, node.waits, node.seconds = command, now, False, math.inf
        self._go_on(node)

    def _pause(self, node: Node) -> None:
        """From now on nothing comes."""
        if node.take is not None:
            self._clock.cancel(node.ticket)
            node.got, node.since, node.seconds = self._share(node), self._clock.now, math.inf

    def _go_on(self, node: Node) -> None:
        """The rest of what it takes comes from now on, unless it stands still, or its
        source does.
        """
        if node.take is None or node.waits or self._stands_still(node):
            return
        node.since, node.seconds = self._clock.now, (1 - node.got) * self._whole_s(node.take)
        node.ticket = self._clock.after(node.seconds, lambda: self._came(node))

    def _go_on_after(self, node: Node) -> None:
        """It hangs no more, or is gone."""
        unheard, node.unheard = node.unheard, []
        for command in unheard:
            self.take(command)
        for other in (node, *self._takers(node)):
            if other.seconds == math.inf:
                self._go_on(other)

    def _stands_still(self, node: Node) -> bool:
        source = (
            self.nodes.get(node.take.source)
            if node.take is not None and node.take.source is not None
            else None
        )
        return node.hangs or (source is not None and source.hangs)

    def _takers(self, source: Node) -> list[Node]:
        return [
            node
            for node in self.nodes.values()
            if node.take is not None and node.take.source == source.id
        ]

    def _still_hangs(self, node: Node) -> bool:
        return node.hangs and self.nodes.get(node.id) is node

    def _whole_s(self, command: c.FetchWeights) -> float:
        """The trainer has handed them to the master already: that is what its
        publication takes.
        """
        if command.source is None:
            return 0.0
        return self._cost.hop_s(share=1.0 if command.base_id is None else DELTA_SHARE)

    def _share(self, node: Node) -> float:
        """How much of what it takes has come."""
        if not node.seconds:
            return 1.0
        return min(1.0, node.got + (1 - node.got) * (self._clock.now - node.since) / node.seconds)

    def _came(self, node: Node) -> None:
        """All has come that its source has.

        Where the source is still taking it too, the rest comes a chunk behind.
        """
        command = node.take
        assert command is not None, "a relay that takes nothing has no ticket"
        if self._stands_still(node):
            self._pause(node)
            return
        source = self.nodes.get(command.source) if command.source is not None else None
        if command.base_id is not None and command.base_id not in node.held:
            self._refuse(node, command, "base", f"weights {command.base_id} are not here")
        elif self.refusals.get(node.id, 0) > 0:
            self.refusals[node.id] -= 1
            self._refuse(node, command, "broken", "the digest differs")
        elif command.source is None:
            self._has(node, command)
        elif source is not None and command.weights_id in source.held:
            since = source.held[command.weights_id]
            # else all of it was there from the start
            due = since + self._cost.lag_s() if since > node.since else 0.0
            if self._clock.now < due:
                node.ticket = self._clock.at(due, lambda: self._came(node))
            else:
                self._has(node, command)
        elif (
            source is not None
            and source.take is not None
            and source.take.weights_id == command.weights_id
        ):
            node.waits = True
        else:
            self._refuse(
                node,
                command,
                "source",
                f"{command.source} does not have weights {command.weights_id}",
            )

    def _has(self, node: Node, command: c.FetchWeights) -> None:
        node.held[command.weights_id] = self._clock.now
        node.take = None
        if self._trace is not None:
            name = f"take {command.weights_id} from {command.source or 'the trainer'}"
            self._trace.span(RELAYS, node.id, name, node.began, self._clock.now)
        self._post(
            e.WeightsFetched(relay_id=node.id, epoch=node.epoch, weights_id=command.weights_id)
        )
        self._let_go_on(node)

    def _refuse(
        self, node: Node, command: c.FetchWeights, reason: e.RefusalReason, error: str
    ) -> None:
        node.take = None
        self._post(
            e.FetchFailed(
                relay_id=node.id,
                epoch=node.epoch,
                weights_id=command.weights_id,
                try_number=command.try_number,
                reason=reason,
                error=error,
            )
        )
        self._let_go_on(node)

    def _let_go_on(self, source: Node) -> None:
        """Whoever waited for this one gets its last chunk next; or learns that it will
        not come.
        """
        for node in self._takers(source):
            if node.waits:
                node.waits = False
                node.ticket = self._clock.after(0.0, lambda node=node: self._came(node))  # type: ignore[misc]

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
        node.up, node.take, node.waits, node.hangs = False, None, False, False
        node.held.clear()
        node.unheard.clear()
        self._let_go_on(node)
        self._go_on_after(node)
