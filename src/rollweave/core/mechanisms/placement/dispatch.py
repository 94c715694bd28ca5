"""Turns that wait for the engine to which their trajectory is assigned."""

from rollweave.core import dispatching
from rollweave.core.dispatching import dispatch_key, loads_of, next_in, pool_for, start_turn
from rollweave.core.mechanisms.lengths.index import work_of
from rollweave.core.mechanisms.placement import assignment, elastic
from rollweave.core.mechanisms.placement.assignment import reassign
from rollweave.core.policy.routing import EngineLoad
from rollweave.core.run import Run
from rollweave.core.state import Engine, Queued, Trajectory, Turn
from rollweave.core.turn_queues import QueuedTurn
from rollweave.schema.base import EngineId


class AssignedEngine:
    """Turns wait for the engine of their trajectory, even if another one is free."""

    def place(self, run: Run, trajectory: Trajectory, turn: Turn, former: Queued | None) -> Queued:
        queue = assignment.queue_of(run, trajectory, turn.avoid)
        resident = work_of(run, trajectory).kv_resident
        if former is not None and (former.engine, former.resident) == (queue, resident):
            return former
        # Where KV is kept for trajectories in the order of their launch, turns must
        # follow the same order.
        tiebreak = trajectory.launched_at if run.scheduling.by_rank else float(turn.arrival)
        given = dispatching.turns_given(run, queue)
        if former is not None:
            tiebreak = former.tiebreak
            given = former.given if former.engine == queue else given
        return Queued(engine=queue, given=given, tiebreak=tiebreak, resident=resident)

    def candidates(self, run: Run, trajectory: Trajectory, turn: Turn) -> list[EngineLoad]:
        if run.pacing.interchangeable:
            return list(loads_of(run, pool_for(run, trajectory)).values())
        assigned = assignment.queue_of(run, trajectory, turn.avoid)
        load = None if assigned is None else run.fleet.loads.get(assigned)
        return [] if load is None else [load]

    def dispatch(self, run: Run, waited_for: list[EngineId | None] | None) -> None:
        _assign_waiting(run)
        for engine_id in (None, *run.state.engines) if waited_for is None else waited_for:
            while run.turn_queues.awaits(engine_id) and _start_next(run, engine_id):
                pass
        if run.scheduling.steals:
            _steal_work(run, waited_for)


def keep_resident(run: Run, trajectory: Trajectory, _turn: Turn, engine: Engine) -> None:
    """Record that the engine, which is about to get the turn, holds its context."""
    if not run.scheduling.assigns:
        return
    if work_of(run, trajectory).assigned_engine != engine.id:
        reassign(run, trajectory, engine.id)
    assignment.keep_resident(run, trajectory)


def _steal_work(run: Run, waited_for: list[EngineId | None] | None) -> None:
    """Let engines that the event touched and that have a free slot take turns that wait
    for other engines.
    """
    if not run.fleet.free:
        return
    for engine_id in run.fleet.loads if waited_for is None else dict.fromkeys(waited_for):
        while engine_id is not None and _has_slot(run, engine_id) and _steal_turn(run, engine_id):
            pass


def _has_slot(run: Run, engine_id: EngineId) -> bool:
    load = run.fleet.loads.get(engine_id)
    return load is not None and load.active < load.slots


def _steal_turn(run: Run, engine_id: EngineId) -> bool:
    """Give this engine the first turn that waits for another engine. Return False if
    this engine cannot run the turn.
    """
    queues = [
        (other, "", resident)
        for other in run.turn_queues.engines
        if other != engine_id
        for resident in (True, False)
    ]
    own = run.state.engines[engine_id].seat.pool
    ready = [
        queued
        for queue in queues
        if (queued := next_in(run, queue)) is not None
        and engine_id not in queued.turn.avoid
        and pool_for(run, queued.trajectory) in (None, own)
    ]
    if not ready:
        return False
    first = min(ready, key=dispatch_key)
    if not assignment.fits_in_kv(run, first.trajectory, run.state.engines[engine_id]):
        return False
    if run.scheduling.by_finish and not elastic.gains(
        run, first.trajectory, run.state.engines[engine_id]
    ):
        return False
    reassign(run, first.trajectory, engine_id)
    start_turn(run, first, engine_id)
    return True


def _assign_waiting(run: Run) -> None:
    """Assign the queued turns that had no engine when they were queued."""
    if not run.pacing.interchangeable:  # each waits for an engine with its own weights
        for waiting in run.turn_queues.waiting(run.state, (None, "", False)):
            if assignment.queue_of(run, waiting.trajectory, ()) is not None:
                dispatching.requeue(run, waiting)
        return
    while (first := run.turn_queues.first(run.state, (None, "", False))) is not None:
        if dispatching.requeue(run, first).place.engine is None:
            return  # no engine takes turns


def _start_next(run: Run, waited_for: EngineId | None) -> bool:
    """Start the first turn that can run and waits for this engine, or for any engine.
    Return False if there is no such turn.
    """
    heads = [next_in(run, (waited_for, "", resident)) for resident in (True, False)]
    for queued in sorted((head for head in heads if head is not None), key=dispatch_key):
        chosen = _assigned_or_free_engine(run, queued)
        if chosen is not None:
            start_turn(run, queued, chosen)
            return True
    return False


def _has_alternative(run: Run, queued: QueuedTurn) -> bool:
    """True if an engine that has not failed this turn could take it."""
    return any(
        engine.id not in queued.turn.avoid for engine in assignment.usable(run, queued.trajectory)
    )


def _assigned_or_free_engine(run: Run, queued: QueuedTurn) -> EngineId | None:
    """The assigned engine if it has a slot and KV to spare; else the least loaded
    engine that has both, which is then assigned; else the assigned engine, by
    preemption. Computing a context again costs less than waiting for the end of another
    turn, or making another turn wait.
    """
    trajectory, turn, place = queued
    if place.engine in turn.avoid and run.pacing.interchangeable and _has_alternative(run, queued):
        place = dispatching.requeue(
            run, queued
        ).place  # its engine failed it when there was no alternative
    assigned = run.fleet.loads.get(place.engine) if place.engine is not None else None
    fits = assigned is not None and assignment.fits_in_kv(
        run, trajectory, run.state.engines[assigned.id]
    )
    if assigned is not None and fits and assigned.active < assigned.slots:
        return assigned.id
    if run.scheduling.migration == "gain" and run.fleet.free:
        loads = loads_of(run, pool_for(run, trajectory))
        free = [load.id for load in loads.values() if load.active < load.slots]
        idlest = assignment.least_loaded(
            run, [engine_id for engine_id in free if engine_id not in (place.engine, *turn.avoid)]
        )
        if idlest is not None and assignment.fits_in_kv(run, trajectory, idlest):
            reassign(run, trajectory, idlest.id)
            return idlest.id
    if assigned is not None and fits and assigned.runs(turn.rank, preempts=run.scheduling.preempts):
        return assigned.id
    return None
