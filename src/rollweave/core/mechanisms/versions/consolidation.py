"""Consolidation ("repack") frees engines that are down to the tail of their batch, in
mode decoupled (Laminar §5, Alg. 1).

It runs every `CONSOLIDATION_S`, and when new weights are published. Only engines with
older weights are considered: engines with the newest weights are still launching. A
trajectory that leaves an engine takes its KV along, one transfer at a time for each
engine; the last trajectory to leave frees the engine.

`repack` plans it. Decoding few sequences takes an engine nearly as long as decoding
many, so the long tails of several replicas are consolidated on few. Algorithm 1 uses a
replica's load from before the plan, so it can empty a replica that has just received
work, and overfill the next (loads of 0.30, 0.35 and 0.40 put 1.05 on one replica). Here
received work moves along with its receiver, and the plan names where each replica's
work ends up. Invariants of a plan: moves are between replicas of one publication; a
source moves once, with all its work; no target is a source; after all moves each target
holds at most `KV_MAX` of its KV and `batch_max` requests, and no more than its slots.
"""

from collections.abc import Sequence

from rollweave.core import dispatching, turns
from rollweave.core.mechanisms.costs.interference import step_times
from rollweave.core.mechanisms.costs.rates import measured_of
from rollweave.core.mechanisms.lengths.index import EngineWork, index_of, work_of
from rollweave.core.mechanisms.placement import assignment, transfers
from rollweave.core.mechanisms.placement.assignment import Placement
from rollweave.core.mechanisms.versions import binding
from rollweave.core.mechanisms.versions.binding import Versions, batch_of
from rollweave.core.run import Run
from rollweave.core.state import Engine, EngineStatus, Queued, Stage, Trajectory
from rollweave.core.turn_queues import QueuedTurn
from rollweave.schema.base import EngineId, Struct
from rollweave.schema.events import StepTime

KV_MAX = 0.99
"""Share of a replica's KV that counts as full (Laminar's C_max)."""


class Replica(Struct, frozen=True, kw_only=True):
    """An engine with trajectories in flight, with the weights `publication_id`.
    `requests` counts all its trajectories, including trajectories at their tools or
    waiting. They use `kv_used` of `kv_total` tokens. `kv_before` is the use at the last
    check (0 at the first), as in Algorithm 1; or, if the use is an estimate, the
    highest one of all earlier checks since it took these weights: once it has fallen,
    what is left is the tail, whose contexts still grow.
    """

    id: EngineId
    publication_id: int
    kv_used: int
    kv_before: int
    kv_total: int
    requests: int
    slots: int


class Move(Struct, frozen=True, kw_only=True):
    """All trajectories of `source` go to `target`; `source` is then free to take new
    weights.
    """

    source: EngineId
    target: EngineId


def repack(replicas: Sequence[Replica], *, batch_max: int) -> list[Move]:
    """Return the plan, in the order of the replicas. Best fit: the least loaded replica
    moves to the target that it fills the most.

    Candidates have work, a KV use below `KV_MAX` that is not rising, and fewer requests
    than both `batch_max` and slots; a replica without work is free already. Raises
    ValueError for a repeated id and for invalid bounds.
    """
    if batch_max < 1:
        raise ValueError(f"batch_max must be at least 1, got {batch_max}")
    ids = [replica.id for replica in replicas]
    if len(set(ids)) < len(ids):
        raise ValueError(f"replicas must each be named once, got {ids}")
    final: dict[EngineId, EngineId] = {}
    for publication_id in dict.fromkeys(replica.publication_id for replica in replicas):
        group = [
            replica
            for replica in replicas
            if replica.publication_id == publication_id and _is_candidate(replica, batch_max)
        ]
        final |= _merged(group, batch_max)
    return [
        Move(source=source, target=final[source])
        for source in ids
        if final.get(source, source) != source
    ]


def batch_bound(profile: Sequence[StepTime], *, largest: int) -> int:
    """Return B, at most `largest`: the largest batch whose sequences take at most as
    long as what a step takes anyway. Laminar takes B from the roofline, where decoding
    turns from memory-bound into compute-bound: before that point, a step mostly reads
    the weights, for any number of sequences. Here both parts are measured: a step with
    one sequence is what a step takes anyway, and a sequence takes what it adds to a
    step in the upper half of the measured batches.

    The step times are smoothed (`step_times`) and those of the shortest measured
    context; a longer context costs memory, which `KV_MAX` bounds. An engine without a
    profile has no such bound: `largest`; an engine with a single measured batch is
    bounded by it. Raises ValueError for an invalid bound.

    (For the simulated engines, by published figures of an H800, B is 287, 221 and 172
    for Laminar's three sizes; the ratio of weights to compute alone gives about 250.)
    """
    if largest < 1:
        raise ValueError(f"largest must be at least 1, got {largest}")
    if not profile:
        return largest
    shortest = min(point.context for point in profile)
    points = [point for point in profile if point.context == shortest]
    first, last = (pick(point.batch for point in points) for pick in (min, max))
    if first == last:
        return min(largest, last)
    step_s = step_times(points, largest=last + last - first)
    sequence_s = float(step_s[-1] - step_s[last - 1]) / (last - first)  # beyond the measurements
    anyway_s = float(step_s[0])
    return largest if largest * sequence_s <= anyway_s else max(1, int(anyway_s / sequence_s))


def _is_candidate(replica: Replica, batch_max: int) -> bool:
    falling = replica.kv_used <= replica.kv_before and replica.kv_used < KV_MAX * replica.kv_total
    return falling and 0 < replica.requests < batch_max and replica.requests <= replica.slots


class _Load:
    """The planned load of a replica, and the replicas from which the load comes."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.kv = replica.kv_used
        self.requests = replica.requests
        self.members = [replica.id]

    def fits(self, other: "_Load", batch_max: int) -> bool:
        requests = self.requests + other.requests
        room = self.kv + other.kv <= KV_MAX * self.replica.kv_total
        return room and requests <= min(batch_max, self.replica.slots)

    def filled_by(self, other: "_Load") -> float:
        return (self.kv + other.kv) / self.replica.kv_total


def _merged(group: Sequence[Replica], batch_max: int) -> dict[EngineId, EngineId]:
    """Return where each replica's work ends up: on the replica itself or on another
    replica.
    """
    loads = [_Load(replica) for replica in sorted(group, key=lambda replica: replica.kv_used)]
    kept: list[_Load] = []
    while loads:
        source = loads.pop(0)
        targets = [load for load in (*kept, *loads) if load.fits(source, batch_max)]
        if not targets:
            kept.append(source)
            continue
        best = max(targets, key=lambda load: load.filled_by(source))
        best.kv += source.kv
        best.requests += source.requests
        best.members += source.members
    return {member: load.replica.id for load in kept for member in load.members}


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
            held, before = _kv_use(run, engine, is_waited_for=engine.id in waited_for)
            if engine.id not in moving:
                replicas.append(_replica(run, engine, held, before))
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


def _kv_use(run: Run, engine: Engine, *, is_waited_for: bool) -> tuple[int, int]:
    """Return the KV tokens that the engine has in use, and those with which this use is
    compared, and record the check.

    An engine that reports its KV is judged as in Laminar §5.2: by its report, compared
    with the report at the last check. Of another engine, contexts are an estimate, and
    are compared with the highest estimate so far. An engine for which no turn waits is
    then in its tail, and not filling up, although contexts grow.
    """
    batch, counted = batch_of(run, engine), run.state.counters.scheduling
    if batch.reported_kv is not None:
        counted.kv_reported += 1
        held, before = batch.reported_kv, batch.checked_kv or 0
        batch.checked_kv = held
        return held, before
    counted.kv_estimated += 1
    held, peak = _kv_tokens(run, engine), batch.peak_kv or 0
    batch.peak_kv = max(peak, held)
    return held, max(peak, 0 if is_waited_for else held)


def _kv_tokens(run: Run, engine: Engine) -> int:
    """Context tokens of all assigned trajectories, which their KV holds now or with
    their next turn: an estimate of the KV in use. Contexts are as old as the last
    report on a turn, tokens that contexts share count several times, and trajectories
    at their tools count, because their KV moves along.
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
