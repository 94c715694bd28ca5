"""The queue of turns, and their dispatch: a queued turn is given to an engine that
would run it at once, the highest rank first.

A turn waits for any engine (`AnyEngine`), unless a mechanism chooses an engine for it
before (`core/run.Chooser`). Suspects are not queued: they run before all others, each
alone on an engine (`mechanisms/suspects`).

Invariants: an engine is given more turns than it has slots only by a turn that preempts
(Heddle Alg. 1): it runs the highest ranks of its turns. An engine that runs a suspect
has no other turn.
"""

from collections.abc import Mapping

from rollweave.core.policy.routing import EngineLoad, choose, serving_pool
from rollweave.core.policy.scheduling import is_overdue, overdue_rank
from rollweave.core.run import EngineMove, Run, TurnMove
from rollweave.core.state import Engine, OnEngine, Queued, Suspected, Trajectory, Turn
from rollweave.core.turn_queues import QueuedTurn, QueueKey
from rollweave.schema.base import EngineId, TrajectoryId
from rollweave.schema.commands import StartTurn


class AnyEngine:
    """Turns wait for any engine, by the pool that they prefer."""

    def place(self, run: Run, trajectory: Trajectory, turn: Turn, former: Queued | None) -> Queued:
        if former is not None:
            return former
        pools = run.pools_of(trajectory)
        return Queued(
            engine=None,
            pool=pools[0] if pools else "",
            given=run.state.turns.given,
            tiebreak=float(turn.arrival),
        )

    def candidates(self, run: Run, trajectory: Trajectory, turn: Turn) -> list[EngineLoad]:
        return list(loads_of(run, pool_for(run, trajectory)).values())

    def dispatch(self, run: Run, waited_for: list[EngineId | None] | None) -> None:
        while (run.fleet.free or run.scheduling.preempts) and self._start_next(run):
            pass

    def _start_next(self, run: Run) -> bool:
        """Start the first turn that can run; return False if there is none."""
        heads = [next_in(run, (None, pool, False)) for pool in run.queue_pools]
        for queued in sorted((head for head in heads if head is not None), key=dispatch_key):
            chosen = self._engine_for(run, queued)
            if chosen is not None:
                start_turn(run, queued, chosen)
                return True
        return False

    def _engine_for(self, run: Run, queued: QueuedTurn) -> EngineId | None:
        pool = queued.place.pool
        serving = serving_pool(run.config.pools_of(pool or None), run.fleet.live_pools)
        return choose(
            loads_of(run, serving),
            affine=queued.trajectory.engine,
            avoid=queued.turn.avoid,
            placement=run.scheduling.placement,
            rank=queued.turn.rank,
            preempts=run.scheduling.preempts,
        )


def enqueue(run: Run, trajectory: Trajectory, turn: Turn) -> None:
    """Queue the open turn for the engine that is chosen for it, or for any; or among
    the suspects, if it is one.
    """
    state = run.state
    if turn.suspicion is not None:
        turn.place = Suspected()
        state.turns.suspects[trajectory.id] = None
        return
    state.turns.arrivals += 1
    turn.arrival = state.turns.arrivals
    rank(run, trajectory, turn)
    turn.place = run.chooser.place(run, trajectory, turn, None)
    state.turns.queue[trajectory.id] = turn.arrival
    run.turn_queues.add(QueuedTurn(trajectory, turn, turn.place))
    run.dirty_queues.append(turn.place.engine)


def rank(run: Run, trajectory: Trajectory, turn: Turn) -> None:
    """Set the rank of a turn; higher runs first."""
    turn.rank = -trajectory.launched_at  # first come, first served
    run.follow(TurnMove.RANKED, trajectory, turn)


def release(run: Run, released: list[Trajectory]) -> None:
    """Queue the turns that have waited for transfers of KV, or begin them on the
    engines that have them.
    """
    for trajectory in released:
        turn = trajectory.open_turn
        if turn.prefill is None:
            enqueue(run, trajectory, turn)
        else:
            begin_sampling(run, trajectory, turn)


def requeue(run: Run, queued: QueuedTurn) -> QueuedTurn:
    """Requeue a turn whose trajectory's estimate or engine has changed, and return it
    with its new place.

    It keeps its place among equals.
    """
    trajectory, turn, former = queued
    turn.place = place = run.chooser.place(run, trajectory, turn, former)
    if turn.rank < overdue_rank(turn.arrival):
        rank(run, trajectory, turn)
    moved = QueuedTurn(trajectory, turn, place)
    run.turn_queues.add(moved)
    run.dirty_queues.append(place.engine)
    return moved


def requeue_from(run: Run, engine: Engine) -> None:
    """Requeue the turns that wait for this engine, which takes none for a while or ever
    again.
    """
    for trajectory_id in list(run.state.turns.queue):
        trajectory = run.state.trajectories[trajectory_id]
        turn = trajectory.open_turn
        if isinstance(turn.place, Queued) and turn.place.engine == engine.id:
            requeue(run, QueuedTurn(trajectory, turn, turn.place))


def turns_given(run: Run, engine_id: EngineId | None) -> int:
    """The number of turns that this engine, or any, was given so far."""
    return run.state.turns.given if engine_id is None else run.state.engines[engine_id].turns_given


def dispatch(run: Run, waited_for: list[EngineId | None] | None = None) -> None:
    """Give queued turns to engines that would run them at once: those that wait for one
    of these engines, or all if none are named.
    """
    state = run.state
    if not (state.turns.queue or state.turns.suspects) or (
        "free_stepping" in run.config.ablation.without and _any_environment_steps(run)
    ):
        return
    if state.turns.suspects:
        run.follow(EngineMove.SOUGHT)
    if not state.turns.queue:
        return
    if run.turn_queues.is_overgrown(state):
        run.rebuild_turn_queues()
    run.chooser.dispatch(run, waited_for)


def dispatch_key(queued: QueuedTurn) -> tuple[float, float, TrajectoryId]:
    return (-queued.turn.rank, queued.place.tiebreak, queued.trajectory.id)


def next_in(run: Run, queue: QueueKey) -> QueuedTurn | None:
    """The turn of this queue that runs next.

    One that was overtaken too often goes first.
    """
    state, waited_for = run.state, queue[0]
    oldest = run.turn_queues.oldest(state, queue)
    if oldest is None:
        return None
    turn = oldest.turn
    engine = state.engines.get(waited_for) if waited_for is not None else None
    slots = engine.abilities.max_slots if engine is not None else run.fleet.slots
    if is_overdue(
        turns_given(run, waited_for) - oldest.place.given, slots=slots
    ) and turn.rank < overdue_rank(turn.arrival):
        turn.rank = overdue_rank(turn.arrival)
        state.counters.scheduling.overdue += 1
        run.turn_queues.add(oldest)
    return run.turn_queues.first(state, queue)


def loads_of(run: Run, pool: str | None) -> Mapping[EngineId, EngineLoad]:
    """Return the loads of the pool's engines, or of all engines."""
    return run.fleet.loads if pool is None else run.fleet.loads_by_pool.get(pool, {})


def pool_for(run: Run, trajectory: Trajectory) -> str | None:
    """Return the pool whose engines serve the trajectory now; None if all engines
    do.
    """
    return serving_pool(run.pools_of(trajectory), run.fleet.live_pools)


def start_turn(run: Run, queued: QueuedTurn, chosen: EngineId) -> None:
    """Give a queued turn to this engine."""
    trajectory, turn, _ = queued
    del run.state.turns.queue[trajectory.id]
    run.turn_queues.leave(trajectory.id)
    give(run, trajectory, turn, run.state.engines[chosen])


def give(run: Run, trajectory: Trajectory, turn: Turn, engine: Engine) -> None:
    """Give a turn that was taken from its queue to an engine."""
    state = run.state
    counted = state.counters.scheduling
    counted.preemptions += len(engine.active) >= engine.abilities.max_slots
    counted.queue_s += run.now - turn.since
    state.turns.given += 1
    engine.turns_given += 1
    turn.place, turn.since = OnEngine(engine=engine.id, given=engine.turns_given), run.now
    run.follow(TurnMove.GIVEN, trajectory, turn, engine)
    run.fleet.occupy(engine, trajectory.id, turn)
    _emit_start(run, trajectory, turn, engine.id)


def begin_sampling(run: Run, trajectory: Trajectory, turn: Turn) -> None:
    """Begin a turn whose prompt was given to a prefill engine on its own engine, which
    computes what it lacks of the KV.
    """
    assert isinstance(turn.place, OnEngine), "a prompt is computed for the engine of its turn"
    run.follow(TurnMove.BEGUN, trajectory, turn, run.state.engines[turn.place.engine])
    turn.prefill = None
    turn.dispatch += 1
    turn.since = run.now
    _emit_start(run, trajectory, turn, turn.place.engine)


def _emit_start(run: Run, trajectory: Trajectory, turn: Turn, owner: EngineId) -> None:
    """Start the turn on its engine, or its prompt on the one that computes it."""
    engine_id = owner if turn.prefill is None else turn.prefill
    run.emit(
        StartTurn(
            trajectory_id=trajectory.id,
            attempt=trajectory.attempt,
            turn=turn.number,
            engine_id=engine_id,
            rank=turn.rank,
            dispatch=turn.dispatch,
            # A trajectory that is bound to weights was sampled under those of this
            # engine. What a program has read cannot be taken back, so that such a turn
            # may have tokens of several versions, as one whose engine is updated has.
            resume=turn.streamed
            or not run.pacing.interchangeable
            or turn.returned_with == run.state.engines[engine_id].publication_id,
            prefill=turn.prefill is not None,
        )
    )


def _any_environment_steps(run: Run) -> bool:
    """True while an environment is starting or stepping: batch-level interaction waits
    for the slowest (RollArt Fig. 5b).
    """
    state = run.state
    return bool(state.pools.init) or any(
        state.trajectories[member].turn is None for member in state.pools.run
    )
