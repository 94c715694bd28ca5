"""Consolidation ("repack") frees engines that are down to the tail of their batch, in
mode decoupled (Laminar §5; `mechanisms/versions/repack`).

It runs every `CONSOLIDATION_S`, and when new weights are published. Only engines with
older weights are considered: engines with the newest weights are still launching. A
trajectory that leaves an engine takes its KV along, one transfer at a time for each
engine; the last trajectory to leave frees the engine.
"""

from rollweave.core import dispatching, turns
from rollweave.core.mechanisms.costs.rates import measured_of
from rollweave.core.mechanisms.lengths.index import EngineWork, index_of
from rollweave.core.mechanisms.lengths.state import work_of
from rollweave.core.mechanisms.placement import assignment, transfers
from rollweave.core.mechanisms.placement.state import Placement
from rollweave.core.mechanisms.versions import binding
from rollweave.core.mechanisms.versions.repack import Move, Replica, batch_bound, repack
from rollweave.core.mechanisms.versions.state import Versions, batch_of
from rollweave.core.run import Run
from rollweave.core.state import Engine, EngineStatus, Queued, Stage, Trajectory
from rollweave.core.turn_queues import QueuedTurn
from rollweave.schema.base import EngineId

CONSOLIDATION_S = 5.0
"""Seconds between two consolidations (Laminar §5.1)."""


def check_due(run: Run) -> None:
    """Consolidate if the period is over."""
    if run.now - run.part(Versions).consolidated_at >= CONSOLIDATION_S:
        run_now(run)


def run_now(run: Run) -> None:
    """Plan, and begin to move."""
    if run.state.serving or "repack" in run.config.ablation.without:
        return
    state = run.state
    run.part(Versions).consolidated_at = run.now
    moving = {
        end for m in run.part(Placement).migrations.open.values() for end in (m.source, m.target)
    }
    waited_for = {
        work_of(run, state.trajectories[member]).assigned_engine for member in state.turns.queue
    }
    replicas = []
    for engine in state.engines.values():
        stays = not engine.departing  # a departing engine is no target, and ends its own batch
        if (
            engine.samples
            and engine.status is EngineStatus.SERVING
            and stays
            and engine.publication_id != state.publication.id
        ):
            held = _kv_tokens(run, engine)
            # Use rises in the tail too, as contexts grow; an engine for which no turn
            # waits is in its tail, and not filling up.
            batch = batch_of(run, engine)
            before = max(batch.peak_kv or 0, 0 if engine.id in waited_for else held)
            if engine.id not in moving:
                replicas.append(_replica(run, engine, held, before))
            batch.peak_kv = max(batch.peak_kv or 0, held)
    if len(replicas) < 2:
        return
    moves = repack(replicas, batch_max=_batch_max(run, [replica.id for replica in replicas]))
    for move in moves:
        _move_all(run, move)
    if moves:
        state.counters.scheduling.released += len(moves)
        dispatching.release(run, transfers.begin(run))


def _replica(run: Run, engine: Engine, held: int, before: int) -> Replica:
    return Replica(
        id=engine.id,
        publication_id=engine.publication_id,
        kv_used=held,
        kv_before=before,
        kv_total=engine.abilities.kv_tokens,
        requests=binding.assigned_count(run, engine),
        slots=engine.abilities.max_slots,
    )


def _kv_tokens(run: Run, engine: Engine) -> int:
    """Context tokens of all assigned trajectories, which their KV holds now or with
    their next turn.
    """
    return sum(_context(trajectory) for trajectory in _assigned(run, engine.id))


def _context(trajectory: Trajectory) -> int:
    return trajectory.context_tokens + (
        trajectory.turn.output_tokens if trajectory.turn is not None else 0
    )


def _assigned(run: Run, engine_id: EngineId) -> list[Trajectory]:
    return [
        run.state.trajectories[name]
        for _, name in index_of(run).loads.get(engine_id, EngineWork()).remaining
    ]


def _batch_max(run: Run, engine_ids: list[EngineId]) -> int:
    """B, the batch size beyond which a step would take longer (Laminar §5.2)."""
    engines = [run.state.engines[engine_id] for engine_id in engine_ids]
    bounds = []
    for engine in engines:
        measured = measured_of(run, engine)
        bounds.append(
            batch_bound(
                measured.profile if measured is not None else (), largest=engine.abilities.max_slots
            )
        )
    return min(bounds)


def _move_all(run: Run, move: Move) -> None:
    for trajectory in _assigned(run, move.source):
        run.state.counters.scheduling.repacked += 1
        if trajectory.stage is Stage.RUN and work_of(run, trajectory).kv_resident:
            if trajectory.turn is not None:
                turns.recall(run, trajectory, trajectory.turn)
            transfers.vacate(run, trajectory, move.source, move.target)
        else:  # it has no KV there yet
            assignment.reassign(run, trajectory, move.target)
            if trajectory.turn is not None and isinstance(trajectory.turn.place, Queued):
                dispatching.requeue(
                    run, QueuedTurn(trajectory, trajectory.turn, trajectory.turn.place)
                )
