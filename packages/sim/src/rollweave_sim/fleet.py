"""The simulated engine processes of a run: they start, answer turns, load weights, are
lost and restart.

Invariant: commands and answers are those of `runtime/supervisors/engines.py`; a message
to an engine of an earlier epoch changes nothing.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from rollweave.record.trace import ENGINES, Trace
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId
from rollweave.schema.config.engines import BLOCK_TOKENS, EngineConfig
from rollweave_sim.clock import Clock
from rollweave_sim.cost import EngineCosts, SharedCost, TrainerCosts, capped_slots
from rollweave_sim.engine import Done, SimEngine
from rollweave_sim.hardware import GPUS_PER_MACHINE
from rollweave_sim.kv import Request
from rollweave_sim.lending import Lending, LentEngine
from rollweave_sim.noise import Noise
from rollweave_sim.relays import SimRelays

RESTART_S = 60.0
"""Seconds until a restarted engine is ready, without its weights. Assumption: process
start and graph capture.
"""

PROFILE_CONTEXTS = (1024, 16384)
"""Tokens of each context in an engine's profile: about a prompt, and a long trajectory
of an agent.
"""


@dataclass(slots=True)
class Node:
    """One engine process. `engine` is None while it starts."""

    id: EngineId
    epoch: int
    degree: int
    group: int = 0
    host: int = 0
    devices: tuple[int, ...] = ()
    lender: str = ""  # the serving engine that it is borrowed from
    sharing: int = 1  # engines on these devices
    engine: SimEngine | LentEngine | None = None
    version: int = -1
    ticket: int = 0  # of its next wake-up
    lost: bool = False
    since: float = 0.0
    suspended: bool = False  # by the core, until it resumes the engine
    loading: bool = False
    staging_id: int = -1  # weights that it receives while it serves
    staging_ticket: int = 0
    staged_id: int = -1
    deferred: c.LoadWeights | None = None  # a load of what it still receives
    tickets: list[int] = field(default_factory=list)  # of a suspension, load or start in progress


class SimFleet:
    """The engines, with `settings` for each engine group, and `costs` by the pool of
    their host (`pool_of`) and their degree.

    `on_done(engine_id, version, done)` is called for every finished turn, and
    `on_lost(engine_id, reported)` for every engine that ends, with the tokens that it
    had reported of its turns.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        post: Callable[[e.Event], None],
        costs: Mapping[tuple[str, int], EngineCosts],
        pool_of: Callable[[int], str],
        trainer: TrainerCosts,
        relays: SimRelays,
        settings: Callable[[int], EngineConfig],
        prefix_cache: bool,
        trace: Trace | None,
        noise: Callable[[str], Noise] | None = None,
        lending: Lending | None = None,
        context: int = 0,
    ) -> None:
        """`noise` makes that of an engine's steps from its name. `context` are the
        tokens of each sequence of the steps from which an engine sets its own slots.
        """
        self._noise, self._context = noise, context
        self._clock, self._post, self._costs, self._trainer, self._settings = (
            clock,
            post,
            costs,
            trainer,
            settings,
        )
        self._relays, self._trace, self._prefix_cache = relays, trace, prefix_cache
        self._pool_of, self._lending = pool_of, lending
        if lending is not None:
            lending.on_touched, lending.on_returned = self._lender_touched, self._gave_back
        # GPU-seconds of work of former engines, by pool
        self._former_busy_s: defaultdict[str, float] = defaultdict(float)
        self.nodes: dict[EngineId, Node] = {}
        self._changed: dict[EngineId, Node] = {}
        self._slowdown = 1.0
        self.checkpoints: Callable[[], Container[int]] = tuple  # steps that an engine can read
        self.refusals: dict[EngineId, int] = {}  # loads that an engine must refuse
        self.on_done: Callable[[EngineId, int, Done], None] = lambda engine_id, version, done: None
        self.on_lost: Callable[[EngineId, Mapping[str, int]], None] = lambda engine_id, reported: (
            None
        )
        # turns that a lent engine gives back, and the tokens that they have sampled
        self.on_returned: Callable[[EngineId, Mapping[str, int]], None] = lambda engine_id, turns: (
            None
        )

    # Engine lifecycle.

    def start(self, slots: Sequence[e.EngineSlot]) -> None:
        """Start engines immediately: a run's own beginning is not studied."""
        for slot in slots:
            self.nodes[slot.id] = node = _node(slot, epoch=0)
            self._starting(node, 0.0)

    def add(self, command: c.StartEngine) -> None:
        self.nodes[command.engine_id] = node = _node(command, epoch=0)
        lending = self._lending if command.lender else None
        self._starting(node, RESTART_S if lending is None else lending.activate(command.lender))

    def restart(self, command: c.RestartEngine) -> None:
        self._drop(self.nodes.get(command.engine_id))
        self.nodes[command.engine_id] = node = _node(command, epoch=command.epoch)
        self._starting(node, RESTART_S)

    def remove(self, command: c.RemoveEngine) -> None:
        node = self.nodes.pop(command.engine_id, None)
        self._drop(node)
        if node is not None:
            self._share(node.host)

    def lose(self, engine_id: EngineId, error: str) -> None:
        """Kill the process. The turns that it served fail with this one event."""
        node = self.nodes.get(engine_id)
        if node is not None and not node.lost:
            self.silence(engine_id)
            self._post(e.EngineLost(engine_id=engine_id, epoch=node.epoch, error=error))

    def silence(self, engine_id: EngineId) -> None:
        """Kill the process without a report; later requests to it stay unanswered."""
        node = self.nodes.get(engine_id)
        if node is not None:
            self._drop(node)
            node.lost = True

    def lose_host(self, host: int) -> None:
        """Kill all processes of a host, without reports."""
        for node in self.nodes.values():
            if node.host == host:
                self.silence(node.id)

    def suspect(self, engine_id: EngineId, error: str) -> None:
        """Report a healthy process as lost."""
        node = self.nodes.get(engine_id)
        if node is not None and not node.lost:
            self._post(e.EngineLost(engine_id=engine_id, epoch=node.epoch, error=error))

    def stall(self, engine_id: EngineId, seconds: float) -> None:
        """Let the engine compute and answer nothing for a while."""
        node = self.nodes.get(engine_id)
        if node is None or node.engine is None:
            return
        engine = node.engine
        engine.suspend(self._clock.now)
        self._touch(node)

        def over() -> None:
            if node.engine is engine and not node.suspended:
                engine.resume(self._clock.now)
                self._touch(node)

        self._clock.after(seconds, over)

    def drop_all(self) -> None:
        """End all engines, as the children of a lost controller."""
        for node in self.nodes.values():
            self._drop(node)
        self.nodes.clear()

    def busy_by_pool(self) -> dict[str, float]:
        """Return the GPU-seconds in which engines have computed, by pool."""
        seconds = defaultdict(float, self._former_busy_s)
        for node in self.nodes.values():
            if node.engine is not None:
                seconds[self._pool_of(node.host)] += node.degree * node.engine.busy_s
        return dict(seconds)

    # Weights.

    def suspend(self, command: c.SuspendEngine) -> None:
        node = self.nodes.get(command.engine_id)
        if node is not None and node.engine is not None:
            node.suspended = True
            settled = node.engine.suspend(self._clock.now)
            self._later(node, settled - self._clock.now, lambda: self._suspended(node))
            self._touch(node)

    def stage(self, command: c.StageWeights) -> None:
        """Receive weights in the memory of the engine's host; a relay there has them
        already.
        """
        node = self.nodes.get(command.engine_id)
        if node is None or node.engine is None:
            return
        if node.staging_id >= 0:
            self._clock.cancel(node.staging_ticket)
            self._staging_failed(node, node.staging_id, "another version took its place")
        started, node.staging_id, node.staged_id = self._clock.now, command.publication_id, -1
        engines = sum(other.loading or other.staging_id >= 0 for other in self.nodes.values())
        seconds = (
            0.0 if self._relays.relayed else self._trainer.load_s(engines=engines, tp=node.degree)
        )
        node.staging_ticket = self._clock.after(
            seconds, lambda: self._staged(node, command, started)
        )

    def load(self, command: c.LoadWeights) -> None:
        node = self.nodes.get(command.engine_id)
        if node is None or node.engine is None:
            return
        if node.staging_id == command.publication_id:
            node.deferred = command
            return
        node.loading = True
        node.since = self._clock.now
        if command.from_checkpoint is not None:
            readers = sum(other.loading for other in self.nodes.values())
            self._later(
                node, self._trainer.saved_s(engines=readers), lambda: self._loaded(node, command)
            )
            return
        if node.staged_id == command.publication_id:
            readers = sum(
                other.loading and other.host == node.host for other in self.nodes.values()
            )
            room = max(1, GPUS_PER_MACHINE // node.degree)  # engines on a machine, at most
            self._later(
                node,
                self._trainer.swap_s(engines=min(readers, room), tp=node.degree),
                lambda: self._loaded(node, command),
            )
            return
        relayed = self._relays.relayed
        together = sum(
            other.loading and (not relayed or other.host == node.host)
            for other in self.nodes.values()
        )
        cost = self._trainer.beside_s if relayed else self._trainer.load_s
        self._later(
            node, cost(engines=together, tp=node.degree), lambda: self._loaded(node, command)
        )

    def resume(self, command: c.ResumeEngine) -> None:
        node = self.nodes.get(command.engine_id)
        if node is not None and node.engine is not None:
            node.suspended = False
            node.engine.resume(self._clock.now)
            self._touch(node)

    # Turns.

    def generate(self, engine_id: EngineId, request: Request) -> bool:
        """Queue a turn. Returns False where there is no such engine.

        A lost engine does not answer: the core learns of its loss.
        """
        node = self.nodes.get(engine_id)
        if node is None or node.engine is None:
            return node is not None and node.lost
        added = node.engine.add(self._clock.now, request)
        self._touch(node)
        if added is False:  # serving needs the memory of a lent engine
            self._clock.after(0.0, lambda: self.on_returned(engine_id, {request.key: 0}))
        return True

    def abort(self, engine_id: EngineId, key: str) -> int | None:
        """Return the tokens that the turn has sampled when the running step ends, or
        None for an unknown turn.
        """
        node = self.nodes.get(engine_id)
        if node is None or node.engine is None:
            return None
        self._touch(node)
        return node.engine.abort(self._clock.now, key)

    def reported_tokens(self) -> dict[EngineId, dict[str, int]]:
        """Return the tokens that engines have reported of their turns."""
        nodes = self.nodes.values()
        return {
            node.id: node.engine.reported_tokens(self._clock.now)
            for node in nodes
            if node.engine is not None
        }

    def rerank(self, engine_id: EngineId, key: str, rank: float) -> None:
        node = self.nodes.get(engine_id)
        if node is not None and node.engine is not None:
            node.engine.rerank(self._clock.now, key, rank)
            self._touch(node)

    def migrate(self, command: c.Migrate, key: str, shared_key: str, *, shared_tokens: int) -> None:
        """Copy a trajectory's KV between two engines, as far as the target lacks it.

        A change of either engine during the copy ends it with an error.
        """
        source, target = self.nodes.get(command.source), self.nodes.get(command.target)
        done = e.MigrationDone(
            number=command.number,
            trajectory_id=command.trajectory_id,
            attempt=command.attempt,
            moved_tokens=0,
        )
        if source is None or source.engine is None or target is None or target.engine is None:
            self._post(msgspec.structs.replace(done, error="an engine is lost"))
            return
        started, reader, writer = self._clock.now, source.engine, target.engine
        blocks, weights = reader.export_kv(started, key, shared_key), reader.publication_id
        present = writer.export_kv(started, key, shared_key)
        tokens = max(0, blocks - present) * BLOCK_TOKENS

        def arrived() -> None:
            if source.engine is not reader or target.engine is not writer:
                self._post(msgspec.structs.replace(done, error="an engine was lost on the way"))
            elif writer.publication_id != weights:
                self._post(
                    msgspec.structs.replace(done, error="the engines have different weights")
                )
            else:
                moved = writer.import_kv(
                    self._clock.now, key, shared_key, blocks, shared_tokens=shared_tokens
                )
                self._post(msgspec.structs.replace(done, moved_tokens=moved * BLOCK_TOKENS))

        self._clock.after(reader.cost.move_s(tokens), arrived)

    @property
    def computing(self) -> int:
        """Return the number of GPUs, or threads, that compute."""
        return sum(
            node.degree
            for node in self.nodes.values()
            if isinstance(node.engine, SimEngine) and node.engine.has_work
        )

    def slow_down(self, factor: float) -> None:
        """Let every step begin to take so many times the seconds that it costs."""
        self._slowdown = factor
        for node in self.nodes.values():
            if isinstance(node.engine, SimEngine):
                node.engine.slow_down(self._clock.now, factor)
                self._touch(node)

    def settle(self) -> None:
        """Reschedule engines changed since the last call: once for all turns that one
        event gave an engine.
        """
        for node in self._changed.values():
            self._clock.cancel(node.ticket)
            due = node.engine.next_at() if node.engine is not None else None
            if due is not None:
                node.ticket = self._clock.at(due, lambda node=node: self._wake(node))  # type: ignore[misc]
        self._changed.clear()

    # Internal events.

    def _wake(self, node: Node) -> None:
        assert node.engine is not None, "a lost engine has no ticket"
        for done in node.engine.advance(self._clock.now):
            self.on_done(node.id, node.version, done)
        self._touch(node)

    def _starting(self, node: Node, seconds: float) -> None:
        settings = self._settings(node.group)
        self._share(node.host)

        def joined() -> None:
            cost = self._cost(node)
            room = kv_room(cost, settings)
            engine = self._engine(node, settings, cost, room)
            if engine is None:
                refused = f"{node.lender} does not lend itself"
                self._post(e.EngineLost(engine_id=node.id, epoch=node.epoch, error=refused))
                return
            node.engine = engine
            room = engine.kv_tokens
            own = settings.server is None
            slots = settings.most_slots
            if settings.max_slots == "profiled":
                slots = capped_slots(cost, context=self._context, room=room)
            self._post(
                e.EngineJoined(
                    engine_id=node.id,
                    epoch=node.epoch,
                    max_slots=slots,
                    kv_total_tokens=room,
                    profile=_profile(cost, slots, room) if own else (),
                    stages=True,
                    moves_kv=settings.moves_kv,
                    preempts=own,
                    lent=bool(node.lender),
                )
            )

        self._later(node, seconds, joined)

    def _engine(
        self, node: Node, settings: EngineConfig, cost: EngineCosts, room: int
    ) -> SimEngine | LentEngine | None:
        """Return the engine of a process; None if its lender refuses."""
        lending = self._lending if node.lender else None
        cached = self._prefix_cache and (lending is None or lending.prefix_cache)
        chunk = settings.prefill_chunk_tokens
        most = chunk if lending is None else lending.chunk_tokens or chunk
        engine = SimEngine(
            cost=cost,
            slots=settings.most_slots,
            chunk_tokens=min(chunk, most),
            block_tokens=BLOCK_TOKENS,
            prefix_cache=cached,
            kv_tokens=room,
            noise=self._noise(f"{node.id}/{node.epoch}") if self._noise is not None else None,
        )
        engine.slow_down(self._clock.now, self._slowdown)
        return engine if lending is None else lending.lend(node.lender, engine)

    def _lender_touched(self, name: str) -> None:
        for node in self.nodes.values():
            if node.lender == name and node.engine is not None:
                self._touch(node)

    def _gave_back(self, name: str, turns: Mapping[str, int]) -> None:
        for node in self.nodes.values():
            if node.lender == name and node.engine is not None:
                self.on_returned(node.id, turns)

    def _suspended(self, node: Node) -> None:
        self._post(e.EngineSuspended(engine_id=node.id, epoch=node.epoch))

    def _staged(self, node: Node, command: c.StageWeights, started: float) -> None:
        node.staging_id = -1
        error = self._refusal(node, self._relays.serves(node.host, command.publication_id))
        publication_id = command.publication_id
        if error:
            self._staging_failed(node, publication_id, error)
        else:
            node.staged_id = publication_id
            if self._trace is not None:
                self._trace.span(
                    ENGINES, f"{node.id} weights", f"v{command.version}", started, self._clock.now
                )
            self._post(
                e.WeightsStaged(engine_id=node.id, epoch=node.epoch, publication_id=publication_id)
            )
        if node.deferred is not None:
            deferred, node.deferred = node.deferred, None
            self.load(deferred)

    def _staging_failed(self, node: Node, publication_id: int, error: str) -> None:
        self._post(
            e.StagingFailed(
                engine_id=node.id, epoch=node.epoch, publication_id=publication_id, error=error
            )
        )

    def _refusal(self, node: Node, there: bool) -> str:
        """Return the reason why the engine refuses weights, or ""."""
        if self.refusals.get(node.id, 0) > 0:
            self.refusals[node.id] -= 1
            return "the digest differs"
        return "" if there else "the weights no longer exist"

    def _loaded(self, node: Node, command: c.LoadWeights) -> None:
        node.loading = False
        assert node.engine is not None, "a lost engine has no ticket"
        step = command.from_checkpoint
        if step is not None:
            error = self._refusal(node, step in self.checkpoints())
        elif node.staged_id == command.publication_id:
            error = ""  # the engine has verified them
        else:
            error = self._refusal(node, self._relays.serves(node.host, command.publication_id))
        if error:
            failed = e.WeightsLoadFailed(
                engine_id=node.id,
                epoch=node.epoch,
                publication_id=command.publication_id,
                error=error,
            )
            self._post(failed)
            return
        if node.staged_id <= command.publication_id:
            node.staged_id = -1
        node.engine.load(self._clock.now, command.publication_id)
        node.version = command.version
        self._touch(node)
        if self._trace is not None:
            self._trace.span(
                ENGINES, node.id, f"load v{command.version}", node.since, self._clock.now
            )
        self._post(
            e.WeightsLoaded(
                engine_id=node.id,
                epoch=node.epoch,
                version=command.version,
                publication_id=command.publication_id,
            )
        )

    def _cost(self, node: Node) -> EngineCosts:
        cost = self._costs[self._pool_of(node.host), node.degree]
        return cost if node.sharing == 1 else SharedCost(cost, engines=node.sharing)

    def _share(self, host: int) -> None:
        """Divide GPUs among the engines of a host that share them."""
        nodes = [node for node in self.nodes.values() if node.host == host and node.devices]
        users = Counter(device for node in nodes for device in node.devices)
        for node in nodes:
            sharing = max(users[device] for device in node.devices)
            if sharing != node.sharing:
                node.sharing = sharing
                if node.engine is not None:
                    node.engine.reprice(self._clock.now, self._cost(node))
                    self._touch(node)

    def _later(self, node: Node, seconds: float, action: Callable[[], None]) -> None:
        node.tickets = [self._clock.after(seconds, action)]

    def _touch(self, node: Node) -> None:
        self._changed[node.id] = node

    def _drop(self, node: Node | None) -> None:
        if node is None:
            return
        for ticket in [node.ticket, node.staging_ticket, *node.tickets]:
            self._clock.cancel(ticket)
        if node.engine is not None:
            self.on_lost(node.id, node.engine.reported_tokens(self._clock.now))
            self._former_busy_s[self._pool_of(node.host)] += node.degree * node.engine.busy_s
        if node.lender and self._lending is not None:
            self._lending.take_back(node.lender)
        node.loading, node.engine, node.staging_id = False, None, -1


def _node(slot: e.EngineSlot | c.StartEngine | c.RestartEngine, *, epoch: int) -> Node:
    return Node(
        id=slot.id if isinstance(slot, e.EngineSlot) else slot.engine_id,
        epoch=epoch,
        degree=slot.degree,
        group=slot.group,
        host=slot.host,
        devices=slot.devices,
        lender="" if isinstance(slot, c.RestartEngine) else slot.lender,
    )


def kv_room(cost: EngineCosts, settings: EngineConfig) -> int:
    """Return the size of an engine's KV cache in tokens: the capacity of its GPUs, but
    at most `engines.kv_tokens` if changed.

    The default of `engines.kv_tokens` is meant for engines on a CPU and ignored for
    GPUs.
    """
    default = EngineConfig.model_fields["kv_tokens"].default
    return (
        cost.kv_tokens if settings.kv_tokens == default else min(cost.kv_tokens, settings.kv_tokens)
    )


def _profile(cost: EngineCosts, slots: int, room: int) -> tuple[e.StepTime, ...]:
    """Return the profile that a live engine would have measured of itself.

    Its steps decode 1, 2, 4, … sequences, and as many as it has slots.
    """
    batches = sorted({*(1 << power for power in range(slots.bit_length())), slots})
    return tuple(
        e.StepTime(
            batch=batch,
            context=context,
            seconds=cost.decode_s(decode=batch, decode_context=batch * context, steps=1),
        )
        for context in PROFILE_CONTEXTS
        for batch in batches
        if batch == 1 or batch * context <= room
    )
