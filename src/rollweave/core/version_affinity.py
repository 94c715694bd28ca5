"""Each engine at its own pace (mode decoupled, Laminar §3, §4): what it begins, and
when it takes other weights.

A trajectory is bound to the weights that it began with, and to an engine that has them,
its home. An engine begins trajectories while its weights are the newest, and a whole
batch under each version that it has; when the last of them is over, or repack has moved
the rest away, it takes newer weights, by itself. What a lost engine leaves goes to
another one with the same weights, or waits for the next that is free to load them: from
memory, or from a checkpoint (Laminar §3.3).

Invariant: an engine changes its weights only while no trajectory's home is there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from rollweave.core import weights
from rollweave.core.policy.staleness import acceptable
from rollweave.core.run import Run
from rollweave.core.state import Engine, EngineStatus, Stage, Trajectory
from rollweave.schema.base import EngineId
from rollweave.schema.work import Purpose

BATCH_PER_SLOT = 2
"""Trajectories of one engine by its slots, unless set: while the environments of half
of them work, the others have turns.
"""


def assigned_count(run: Run, engine: Engine) -> int:
    """Trajectories under way whose home it is."""
    load = run.length_index.loads.get(engine.id)
    return len(load.remaining) if load is not None else 0


def batch_size(run: Run, engine: Engine) -> int:
    """Trajectories that it has at once, and begins at least under each version: no more
    than its share of all.
    """
    return _batch_sizes(run)[engine.id]


def _batch_sizes(run: Run) -> dict[EngineId, int]:
    """Of all engines."""
    if run.fleet.batch_sizes is None:
        rollout, engines = run.config.rollout, run.state.engines
        share = -(-rollout.max_running // max(1, len(engines)))
        run.fleet.batch_sizes = {
            engine.id: max(1, min(rollout.engine_batch or BATCH_PER_SLOT * engine.max_slots, share))
            for engine in engines.values()
        }
    return run.fleet.batch_sizes


def _with_capacity(run: Run) -> list[Engine]:
    """Engines that serve, and have fewer than that.

    Every event asks, so nothing else is looked at for all engines.
    """
    engines, loads, batches = run.state.engines, run.length_index.loads, _batch_sizes(run)
    return [
        engines[one]
        for one in run.fleet.loads
        if one not in loads or len(loads[one].remaining) < batches[one]
    ]


# What an engine begins.


def free_capacity(run: Run) -> int:
    """Training trajectories that engines would begin now, as far as environments may be
    alive.
    """
    batches = _batch_sizes(run)
    free = sum(batches[engine.id] - assigned_count(run, engine) for engine in _launching(run))
    alive = len(run.state.in_init) + len(run.state.in_run) + len(run.state.closing)
    return max(0, min(free, run.config.rollout.max_running - alive))


def buffer_capacity(run: Run) -> int:
    """Groups that may be buffered or on their way: a batch to take, and another or what
    engines work on at once.
    """
    rollout, size = run.config.rollout, min(run.group_sizes.values())
    held = min(rollout.max_running, sum(_batch_sizes(run).values()))
    return run.config.buffer.groups or rollout.groups_per_step + max(
        rollout.groups_per_step, -(-held // size)
    )


def buffer_limit(run: Run) -> int:
    """Groups that may be buffered at all.

    Each that was begun in time has a place: tails are long, not worth less.
    """
    return buffer_capacity(run) + run.config.rollout.max_running


def engine_for(run: Run, purpose: Purpose) -> Engine | None:
    """The engine that begins a trajectory now: the emptiest of those that may."""
    batches = _batch_sizes(run)
    found = _taking_episodes(run) if purpose is Purpose.EVAL else _launching(run)
    return min(
        found, key=lambda engine: assigned_count(run, engine) / batches[engine.id], default=None
    )


def begin_load(run: Run, engine: Engine) -> None:
    """Under the newest weights it may begin a batch; others it takes for those that
    wait for them alone.
    """
    engine.launched = (
        0 if engine.loading_id == weights.newest(run, engine) else batch_size(run, engine)
    )


def launch_on(run: Run, trajectory: Trajectory, engine: Engine) -> None:
    """The trajectory is launched there."""
    trajectory.assigned_engine, trajectory.weights_id = engine.id, engine.weights_id
    engine.launched += 1


def _launching(run: Run) -> list[Engine]:
    """Those of them that begin training trajectories now."""
    other, batches = awaited_weights(run), _batch_sizes(run)
    next_version, window, published = run.next_version(), run.mode.window, run.state.published_id
    return [
        engine
        for engine in _with_capacity(run)
        if not engine.leaving
        and acceptable(engine.version, next_version, window)
        and (
            engine.launched < batches[engine.id]
            or (
                (engine.weights_id == published or engine.weights_id == weights.newest(run, engine))
                and (other is None or not weights.is_loadable(run, engine, other))
            )
        )
    ]


def _taking_episodes(run: Run) -> list[Engine]:
    """Those of them that take an evaluation's episodes now."""
    evaluation = run.state.evaluation
    if evaluation is None:
        return []
    return [
        engine
        for engine in _with_capacity(run)
        if not engine.leaving and engine.weights_id == evaluation.weights_id
    ]


def _serves(engine: Engine) -> bool:
    return engine.status is EngineStatus.SERVING and not engine.draining


# Which weights an engine takes.


def is_bound(run: Run, engine: Engine) -> bool:
    """What began with its weights is not over, or KV is on its way from it or to it."""
    return assigned_count(run, engine) > 0 or engine.id in _in_transfer(run)


def _in_transfer(run: Run) -> frozenset[EngineId | None]:
    """Engines that KV leaves or comes to."""
    return frozenset(end for m in run.state.migrations.values() for end in (m.source, m.target))


@dataclass(frozen=True, slots=True)
class _Demand:
    """What all engines together decide about which weights one of them takes."""

    other: int | None
    """Weights that somebody waits for."""
    holder: EngineId | None
    """The engine that keeps the weights of an evaluation."""
    moving: frozenset[EngineId | None]

    @classmethod
    def of(cls, run: Run) -> Self:
        return cls(
            other=awaited_weights(run), holder=_evaluation_holder(run), moving=_in_transfer(run)
        )


def wanted_weights(run: Run, engine: Engine) -> int | None:
    """The weights that it is to load now; None to leave it as it is, as while KV is on
    its way from it or to it.
    """
    return _wanted_weights(run, engine, _Demand.of(run))


def updates(run: Run) -> Iterator[tuple[Engine, int]]:
    """Engines that are to load other weights now, each with these.

    What is done about one counts for the next.
    """
    wishes, loads = _Demand.of(run), run.length_index.loads
    for engine in [engine for engine in run.state.engines.values() if engine.id not in loads]:
        if not engine.departing and engine.status in (EngineStatus.STALE, EngineStatus.SERVING):
            target = _wanted_weights(run, engine, wishes)
            if target is not None:
                yield engine, target
                wishes = _Demand.of(run)


def _wanted_weights(run: Run, engine: Engine, wishes: _Demand) -> int | None:
    if assigned_count(run, engine) or engine.id == wishes.holder or engine.id in wishes.moving:
        return None
    other, newest = wishes.other, weights.newest(run, engine)
    if other is not None and weights.is_loadable(run, engine, other):
        return other
    if newest is None or newest == engine.weights_id:
        return None
    # What was published while it loaded has to wait until it has begun something, or it
    # might load for ever.
    fresh = (
        engine.status is EngineStatus.SERVING
        and engine.launched == 0
        and engine.since >= run.state.published_at
    )
    return None if fresh else newest


def awaited_weights(run: Run) -> int | None:
    """Weights that no engine has or loads, and that an evaluation or homeless
    trajectories wait for.
    """
    state = run.state
    evaluated = [state.evaluation.weights_id] if state.evaluation is not None else []
    bound = (
        sorted(trajectory.weights_id for trajectory in _unassigned(run)) if state.unassigned else []
    )
    return next(
        (
            found
            for found in (*evaluated, *bound)
            if weights.is_obtainable(run, found) and not is_loaded_or_loading(run, found)
        ),
        None,
    )


def _evaluation_holder(run: Run) -> EngineId | None:
    """The first engine with the weights of an evaluation keeps them while episodes of
    it are yet to begin.
    """
    state, evaluation = run.state, run.state.evaluation
    if evaluation is None:
        return None
    first = next(
        (one.id for one in state.engines.values() if one.weights_id == evaluation.weights_id), None
    )
    waiting = any(state.groups[group_id].task is None for group_id in evaluation.pending) or any(
        state.groups[state.trajectories[member].group_id].purpose is Purpose.EVAL
        for member in state.init_queue
    )
    return first if not evaluation.started or evaluation.to_draw or waiting else None


def is_loaded_or_loading(run: Run, weights_id: int) -> bool:
    """An engine has these weights, or is loading them."""
    return weights_id in run.fleet.expected_weights_ids


# What a lost engine leaves.


def assign(run: Run, trajectory: Trajectory, avoid: Sequence[EngineId] = ()) -> None:
    """Its home is the emptiest engine with its weights, rather none of `avoid`, or that
    leaves; or it is homeless.
    """
    found = [
        engine for engine in run.state.engines.values() if serves_version_of(engine, trajectory)
    ]
    rather = [engine for engine in found if engine.id not in avoid] or found
    wanted = [engine for engine in rather if not engine.leaving] or rather
    trajectory.kv_resident = False
    trajectory.assigned_engine = (
        min(wanted, key=lambda engine: assigned_count(run, engine) / batch_size(run, engine)).id
        if wanted
        else None
    )
    if trajectory.assigned_engine is None:
        run.state.unassigned[trajectory.id] = None
    run.reindex(trajectory)


def serves_version_of(engine: Engine, trajectory: Trajectory) -> bool:
    """The engine takes turns, under the weights that the trajectory began with."""
    return _serves(engine) and engine.weights_id == trajectory.weights_id


def unassign_engine(run: Run, engine: Engine) -> None:
    """The engine has lost its weights, or is gone: whoever had his home there has none."""
    load = run.length_index.loads.get(engine.id)
    for _, trajectory_id in list(load.remaining) if load is not None else ():
        assign(run, run.state.trajectories[trajectory_id])


def reassign(run: Run) -> list[Trajectory]:
    """Reassign unassigned trajectories to engines that now serve their version. Return
    those whose version can no longer be loaded anywhere.
    """
    stranded = []
    for trajectory in _unassigned(run) if run.state.unassigned else ():
        assign(run, trajectory)
        lost = not weights.is_obtainable(run, trajectory.weights_id) and not is_loaded_or_loading(
            run, trajectory.weights_id
        )
        if trajectory.assigned_engine is None and lost:
            stranded.append(trajectory)
    return stranded


def needed_checkpoints(run: Run) -> set[int]:
    """Steps of those that an engine is reading, or that somebody without a home waits
    for.
    """
    state = run.state
    reading = [
        engine.loading_step
        for engine in state.engines.values()
        if engine.status is EngineStatus.LOADING
    ]
    waiting = (
        [state.checkpointed_versions.get(trajectory.weights_id) for trajectory in _unassigned(run)]
        if state.unassigned
        else []
    )
    return {step for step in (*reading, *waiting) if step is not None}


def _unassigned(run: Run) -> list[Trajectory]:
    """Those who still are; the others are struck off the list."""
    state = run.state
    listed = [
        state.trajectories[member] for member in state.unassigned if member in state.trajectories
    ]
    found = [
        one
        for one in listed
        if one.assigned_engine is None and one.stage in (Stage.INIT, Stage.RUN)
    ]
    state.unassigned = {trajectory.id: None for trajectory in found}
    return found
