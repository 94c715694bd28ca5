"""Independent weight updates (mode decoupled, Laminar §3, §4): which trajectories an
engine launches, and when it loads other weights.

A trajectory is bound to the weights that it began with, and is assigned to an engine
that serves them. An engine launches trajectories while its weights are the newest, and
at least a whole batch under each version. When its last trajectory is over, or
consolidation has moved the rest away, it loads newer weights, independently of the
other engines. The trajectories of a lost engine are reassigned to another engine with
the same weights, or wait for the next engine that is free to load these weights from
memory or from a checkpoint (Laminar §3.3).

Invariant: an engine changes its weights only while no trajectory is assigned to it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import msgspec

from rollweave.core import attempts, evaluation, weights
from rollweave.core.mechanisms.lengths.index import index_of, reindex, work_of
from rollweave.core.mechanisms.placement.assignment import Placement
from rollweave.core.policy.modes import acceptable, origin, parted
from rollweave.core.run import Run
from rollweave.core.state import Engine, EngineStatus, Stage, Trajectory
from rollweave.schema.base import EngineId, TrajectoryId
from rollweave.schema.events import KvReported, WorldLost
from rollweave.schema.work import Purpose


class Batch(msgspec.Struct):
    """The trajectories that an engine has launched under its weights."""

    launched: int = 0  # trajectories
    peak_kv: int | None = None  # most KV tokens of its trajectories at earlier checks
    reported_kv: int | None = None  # KV tokens in use, as the engine says since its load
    checked_kv: int | None = None  # of these, what it had reported at the last check


class Versions(msgspec.Struct):
    """The part of the state."""

    # the weights (publication id) to which each attempt that was launched is bound
    trajectories: dict[TrajectoryId, int] = {}
    engines: dict[EngineId, Batch] = {}
    unassigned: dict[TrajectoryId, None] = {}  # no engine has their weights
    consolidated_at: float = 0.0


def weights_of(run: Run, trajectory: Trajectory) -> int:
    """Return the weights to which the attempt is bound; -1 before its launch."""
    return run.part(Versions).trajectories.get(trajectory.id, -1)


def batch_of(run: Run, engine: Engine) -> Batch:
    """Return what the engine has launched under its weights."""
    engines: dict[EngineId, Batch] = run.parts[Versions].engines
    batch = engines.get(engine.id)
    if batch is None:
        batch = engines[engine.id] = Batch()
    return batch


BATCH_PER_SLOT = 2
"""Default number of trajectories of an engine for each of its slots: while the
environments of half of them work, the others have turns.
"""


def assigned_count(run: Run, engine: Engine) -> int:
    """The number of trajectories under way that are assigned to the engine."""
    load = index_of(run).loads.get(engine.id)
    return len(load.remaining) if load is not None else 0


def batch_size(run: Run, engine: Engine) -> int:
    """The maximum number of trajectories of the engine at any time, and the minimum
    number that it launches under each version: at most its share of all trajectories.
    """
    return _batch_sizes(run)[engine.id]


class _BatchSizes(dict[EngineId, int]):
    """The batch sizes of all engines."""


def _batch_sizes(run: Run) -> _BatchSizes:
    sizes: _BatchSizes | None = run.fleet.derived.get(_BatchSizes)
    if sizes is None:
        engines = run.state.engines
        sampling = sum(engine.samples for engine in engines.values())
        share = -(-run.places.run // max(1, sampling))
        sizes = run.fleet.derived[_BatchSizes] = _BatchSizes(
            (
                engine.id,
                max(1, min(BATCH_PER_SLOT * engine.abilities.max_slots, share)),
            )
            for engine in engines.values()
        )
    return sizes


def _with_capacity(run: Run) -> list[Engine]:
    """The serving engines with fewer trajectories than their batch size.

    Called at every event, so it checks nothing else of all engines.
    """
    engines, loads, batches = run.state.engines, index_of(run).loads, _batch_sizes(run)
    return [
        engines[engine_id]
        for engine_id in run.fleet.loads
        if engine_id not in loads or len(loads[engine_id].remaining) < batches[engine_id]
    ]


# What an engine launches.


def free_capacity(run: Run) -> int:
    """The number of training trajectories that engines would launch now, within the
    limit on environments alive. Trajectories that wait for a place of INIT are drawn,
    too.
    """
    batches = _batch_sizes(run)
    free = sum(batches[engine.id] - assigned_count(run, engine) for engine in _launching(run))
    return max(0, min(free, run.places.alive - attempts.taken(run).alive))


def buffer_capacity(run: Run) -> int:
    """The number of groups that may be buffered or under way: a batch to take, and in
    addition another batch or the groups that engines work on at the same time.
    """
    rollout, size = run.config.rollout, min(run.group_sizes.values())
    held = min(run.places.run, sum(_batch_sizes(run).values()))
    return rollout.groups_per_step + max(rollout.groups_per_step, -(-held // size))


def buffer_limit(run: Run) -> int:
    """The maximum number of buffered groups. Each group that was begun within the
    capacity has a place: groups with long tails are not worth less.
    """
    return buffer_capacity(run) + run.places.run


def engine_for(run: Run, purpose: Purpose) -> Engine | None:
    """The engine that launches a trajectory now: the emptiest one that may."""
    batches = _batch_sizes(run)
    candidates = _taking_episodes(run) if purpose is Purpose.EVAL else _launching(run)
    return min(
        candidates,
        key=lambda engine: assigned_count(run, engine) / batches[engine.id],
        default=None,
    )


def begin_load(run: Run, engine: Engine) -> None:
    """Set how many trajectories the engine may launch after the load: a batch under the
    newest weights. Older weights are loaded only for the trajectories that wait for
    them.
    """
    newest = engine.loading.id == weights.newest(run, engine)
    batch = batch_of(run, engine)
    batch.launched, batch.peak_kv = 0 if newest else batch_size(run, engine), None
    batch.reported_kv = batch.checked_kv = None


def launched_sibling(run: Run, trajectory: Trajectory) -> Trajectory | None:
    """The first other member of the group that is bound to weights and not too old;
    None if there is none.
    """
    members = run.state.groups[trajectory.group_id].members
    siblings = (run.state.trajectories[name] for name in members if name != trajectory.id)
    next_version, window = run.next_version(), run.mode.window
    return next(
        (
            sibling
            for sibling in siblings
            if weights_of(run, sibling) >= 0 and acceptable(sibling.origin, next_version, window)
        ),
        None,
    )


def launch_beside(run: Run, trajectory: Trajectory, sibling: Trajectory) -> bool:
    """Launch the trajectory under the weights of a member of its group: on an engine
    that serves them, although it may have its whole batch, else it waits until an
    engine has loaded them again. Return False if that can no longer be.
    """
    bound = weights_of(run, sibling)
    if not (weights.is_obtainable(run, bound) or is_loaded_or_loading(run, bound)):
        return False
    run.part(Versions).trajectories[trajectory.id] = bound
    assign(run, trajectory)
    assigned = work_of(run, trajectory).assigned_engine
    if assigned is not None:
        batch_of(run, run.state.engines[assigned]).launched += 1
    return True


def launch_on(run: Run, trajectory: Trajectory, engine: Engine) -> None:
    """Launch the trajectory on this engine."""
    work_of(run, trajectory).assigned_engine = engine.id
    run.part(Versions).trajectories[trajectory.id] = engine.publication_id
    batch_of(run, engine).launched += 1


def _launching(run: Run) -> list[Engine]:
    """The engines that launch training trajectories now."""
    other, batches = awaited_weights(run), _batch_sizes(run)
    next_version, window = run.next_version(), run.mode.window
    restores, published = run.state.publication.restores, run.state.publication.id
    return [
        engine
        for engine in _with_capacity(run)
        if not engine.leaving
        and acceptable(
            origin(engine.version, parted(restores, engine.version, engine.publication_id)),
            next_version,
            window,
        )
        and (
            batch_of(run, engine).launched < batches[engine.id]
            or (
                (
                    engine.publication_id == published
                    or engine.publication_id == weights.newest(run, engine)
                )
                and (other is None or not weights.is_loadable(run, engine, other))
            )
        )
    ]


def _taking_episodes(run: Run) -> list[Engine]:
    """The engines that launch an evaluation's episodes now."""
    current = run.state.evaluations.current
    if current is None:
        return []
    return [
        engine
        for engine in _with_capacity(run)
        if not engine.leaving and engine.publication_id == current.publication_id
    ]


def _serves(engine: Engine) -> bool:
    return engine.samples and engine.status is EngineStatus.SERVING and not engine.draining


# Which weights an engine loads.


def is_bound(run: Run, engine: Engine) -> bool:
    """True while trajectories that began under the engine's weights are under way, or
    KV moves from it or to it.
    """
    return assigned_count(run, engine) > 0 or engine.id in _in_transfer(run)


def _in_transfer(run: Run) -> frozenset[EngineId | None]:
    """The engines that are an end of a migration."""
    return frozenset(
        end for m in run.part(Placement).migrations.open.values() for end in (m.source, m.target)
    )


@dataclass(frozen=True, slots=True)
class _Demand:
    """The facts about all engines that decide which weights one of them loads."""

    other: int | None
    """Weights that are waited for and that no engine has or loads."""
    holder: EngineId | None
    """The engine that keeps the weights of an evaluation."""
    moving: frozenset[EngineId | None]

    @classmethod
    def of(cls, run: Run) -> Self:
        return cls(
            other=awaited_weights(run), holder=_evaluation_holder(run), moving=_in_transfer(run)
        )


def wanted_weights(run: Run, engine: Engine) -> int | None:
    """The weights that the engine is to load now; None to leave it as it is, for
    example while KV moves from it or to it.
    """
    return _wanted_weights(run, engine, _Demand.of(run))


def updates(run: Run) -> Iterator[tuple[Engine, int]]:
    """Yield the engines that are to load other weights now, with these weights.

    The caller's action on one engine is taken into account for the next.
    """
    wishes, loads = None, index_of(run).loads
    for engine in [engine for engine in run.state.engines.values() if engine.id not in loads]:
        if not engine.departing and engine.status in (EngineStatus.STALE, EngineStatus.SERVING):
            wishes = wishes or _Demand.of(run)
            target = _wanted_weights(run, engine, wishes)
            if target is not None:
                yield engine, target
                wishes = None


def _wanted_weights(run: Run, engine: Engine, wishes: _Demand) -> int | None:
    newest = weights.newest(run, engine)
    if not engine.samples:  # nothing is bound to it
        return newest if newest != engine.publication_id else None
    if assigned_count(run, engine) or engine.id == wishes.holder or engine.id in wishes.moving:
        return None
    other = wishes.other
    if other is not None and weights.is_loadable(run, engine, other):
        return other
    if newest is None or newest == engine.publication_id:
        return None
    # A version published during a load waits until the engine has launched something,
    # or it might load forever.
    fresh = (
        engine.status is EngineStatus.SERVING
        and batch_of(run, engine).launched == 0
        and engine.since >= run.state.publication.at
    )
    return None if fresh else newest


def awaited_weights(run: Run) -> int | None:
    """Weights that no engine has or loads, and that an evaluation or unassigned
    trajectories wait for.
    """
    state = run.state
    evaluated = (
        [state.evaluations.current.publication_id] if state.evaluations.current is not None else []
    )
    bound = (
        sorted(weights_of(run, trajectory) for trajectory in _unassigned(run))
        if run.part(Versions).unassigned
        else []
    )
    return next(
        (
            awaited
            for awaited in (*evaluated, *bound)
            if weights.is_obtainable(run, awaited) and not is_loaded_or_loading(run, awaited)
        ),
        None,
    )


def _evaluation_holder(run: Run) -> EngineId | None:
    """The first engine with the weights of an evaluation. It keeps them while episodes
    of the evaluation are yet to begin.
    """
    state, current = run.state, run.state.evaluations.current
    if current is None:
        return None
    first = next(
        (
            engine.id
            for engine in state.engines.values()
            if engine.samples and engine.publication_id == current.publication_id
        ),
        None,
    )
    waiting = any(state.groups[group_id].task is None for group_id in current.pending) or any(
        state.groups[state.trajectories[member].group_id].purpose is Purpose.EVAL
        for member in state.pools.queued
    )
    return first if not current.started or current.to_draw or waiting else None


def is_loaded_or_loading(run: Run, publication_id: int) -> bool:
    """True if an engine has these weights or is loading them."""
    return publication_id in run.fleet.expected_publication_ids


def abandon_if_lost(run: Run) -> None:
    """Abandon an evaluation of weights that no engine has or can load."""
    current = run.state.evaluations.current
    if (
        current is None
        or weights.is_obtainable(run, current.publication_id)
        or is_loaded_or_loading(run, current.publication_id)
    ):
        return
    run.warn(
        "evaluation",
        f"of version {current.version} abandoned: its weights can no longer be loaded",
        count="evaluation_lost",
    )
    evaluation.abandon(run)


# Trajectories of a lost engine.


def assign(run: Run, trajectory: Trajectory, avoid: Sequence[EngineId] = ()) -> None:
    """Assign the trajectory to the emptiest engine with its weights, or mark it as
    unassigned. Engines of `avoid` and engines that leave are a last resort.
    """
    engines = [
        engine
        for engine in run.state.engines.values()
        if serves_version_of(run, engine, trajectory)
    ]
    preferred = [engine for engine in engines if engine.id not in avoid] or engines
    wanted = [engine for engine in preferred if not engine.leaving] or preferred
    work = work_of(run, trajectory)
    work.kv_resident = False
    work.assigned_engine = (
        min(wanted, key=lambda engine: assigned_count(run, engine) / batch_size(run, engine)).id
        if wanted
        else None
    )
    if work.assigned_engine is None:
        run.part(Versions).unassigned[trajectory.id] = None
    reindex(run, trajectory)


def serves_version_of(run: Run, engine: Engine, trajectory: Trajectory) -> bool:
    """True if the engine takes turns under the weights that the trajectory began
    with.
    """
    return _serves(engine) and engine.publication_id == weights_of(run, trajectory)


def unassign_engine(run: Run, engine: Engine) -> None:
    """Unassign all trajectories of an engine that lost its weights or was removed."""
    load = index_of(run).loads.get(engine.id)
    for _, trajectory_id in list(load.remaining) if load is not None else ():
        assign(run, run.state.trajectories[trajectory_id])


def reassign(run: Run) -> list[Trajectory]:
    """Reassign unassigned trajectories to engines that now serve their version. Return
    the trajectories whose version can no longer be loaded anywhere.
    """
    stranded = []
    for trajectory in _unassigned(run) if run.part(Versions).unassigned else ():
        assign(run, trajectory)
        bound = weights_of(run, trajectory)
        lost = not weights.is_obtainable(run, bound) and not is_loaded_or_loading(run, bound)
        if work_of(run, trajectory).assigned_engine is None and lost:
            stranded.append(trajectory)
    return stranded


def needed_checkpoints(run: Run) -> set[int]:
    """The steps of checkpoints that an engine is reading, or that an unassigned
    trajectory waits for.
    """
    state = run.state
    reading = [
        engine.loading.step
        for engine in state.engines.values()
        if engine.status is EngineStatus.LOADING
    ]
    waiting = (
        [
            state.publication.checkpointed.get(weights_of(run, trajectory))
            for trajectory in _unassigned(run)
        ]
        if run.part(Versions).unassigned
        else []
    )
    return {step for step in (*reading, *waiting) if step is not None}


def _unassigned(run: Run) -> list[Trajectory]:
    """The trajectories that are still unassigned; the others are dropped from the
    list.
    """
    state = run.state
    listed = [
        state.trajectories[member]
        for member in run.part(Versions).unassigned
        if member in state.trajectories
    ]
    unassigned = [
        trajectory
        for trajectory in listed
        if work_of(run, trajectory).assigned_engine is None
        and trajectory.stage in (Stage.INIT, Stage.RUN)
    ]
    run.part(Versions).unassigned = {trajectory.id: None for trajectory in unassigned}
    return unassigned


def on_kv_reported(run: Run, event: KvReported) -> None:
    """Record what an engine says of its KV."""
    engine = run.state.engines.get(event.engine_id)
    if engine is not None and engine.epoch == event.epoch:
        batch_of(run, engine).reported_kv = event.used


def begin_attempt(run: Run, trajectory: Trajectory) -> None:
    """Begin with a new attempt, which is bound to no weights."""
    run.part(Versions).trajectories.pop(trajectory.id, None)


def on_world_lost(run: Run, _event: WorldLost) -> None:
    """Forget the trajectories without an engine: they end."""
    run.part(Versions).unassigned.clear()


def check(run: Run) -> None:
    """Assert that a trajectory's turns are only on engines with the weights that it
    began with.
    """
    if run.pacing.interchangeable:
        return
    state = run.state
    for engine in state.engines.values():
        for trajectory_id in engine.active if engine.samples else ():
            bound = weights_of(run, state.trajectories[trajectory_id])
            assert bound == engine.publication_id, f"{trajectory_id} on {engine}"
    for trajectory_id in (*state.pools.init, *state.pools.run):
        trajectory = state.trajectories[trajectory_id]
        assigned = state.engines.get(work_of(run, trajectory).assigned_engine or EngineId(""))
        if assigned is None:
            assert trajectory_id in run.part(Versions).unassigned, (
                f"{trajectory} has no engine, and is not listed as unassigned"
            )
        else:
            assert assigned.publication_id == weights_of(run, trajectory), (
                f"{trajectory} is assigned to {assigned}"
            )
            assert assigned.status in (EngineStatus.SERVING, EngineStatus.SUSPENDING), assigned
