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


def residents(run: Run, engine: Engine) -> int:
    """Trajectories under way whose home it is."""
    load = run.order.loads.get(engine.id)
    return len(load.left) if load is not None else 0


def batch_of(run: Run, engine: Engine) -> int:
    """Trajectories that it has at once, and begins at least under each version: no more
    than its share of all.
    """
    return _batches(run)[engine.id]


def _batches(run: Run) -> dict[EngineId, int]:
    """Of all engines."""
    if run.fleet.batches is None:
        rollout, engines = run.config.rollout, run.state.engines
        share = -(-rollout.max_running // max(1, len(engines)))
        run.fleet.batches = {
            engine.id: max(1, min(rollout.engine_batch or BATCH_PER_SLOT * engine.max_slots, share))
            for engine in engines.values()
        }
    return run.fleet.batches


def _with_room(run: Run) -> list[Engine]:
    """Engines that serve, and have fewer than that.

    Every event asks, so nothing else is looked at for all engines.
    """
    engines, loads, batches = run.state.engines, run.order.loads, _batches(run)
    return [
        engines[one]
        for one in run.fleet.loads
        if one not in loads or len(loads[one].left) < batches[one]
    ]


# What an engine begins.


def seats(run: Run) -> int:
    """Training trajectories that engines would begin now, as far as environments may be
    alive.
    """
    batches = _batches(run)
    free = sum(batches[engine.id] - residents(run, engine) for engine in _beginning(run))
    alive = len(run.state.in_init) + len(run.state.in_run) + len(run.state.closing)
    return max(0, min(free, run.config.rollout.max_running - alive))


def places(run: Run) -> int:
    """Groups that may be buffered or on their way: a batch to take, and another or what
    engines work on at once.
    """
    rollout, size = run.config.rollout, min(run.group_sizes.values())
    held = min(rollout.max_running, sum(_batches(run).values()))
    return run.config.buffer.groups or rollout.groups_per_step + max(
        rollout.groups_per_step, -(-held // size)
    )


def most(run: Run) -> int:
    """Groups that may be buffered at all.

    Each that was begun in time has a place: tails are long, not worth less.
    """
    return places(run) + run.config.rollout.max_running


def engine_for(run: Run, purpose: Purpose) -> Engine | None:
    """The engine that begins a trajectory now: the emptiest of those that may."""
    batches = _batches(run)
    found = _evaluating(run) if purpose is Purpose.EVAL else _beginning(run)
    return min(found, key=lambda engine: residents(run, engine) / batches[engine.id], default=None)


def loads(run: Run, engine: Engine) -> None:
    """Under the newest weights it may begin a batch; others it takes for those that
    wait for them alone.
    """
    engine.begun = 0 if engine.loading_id == weights.newest(run, engine) else batch_of(run, engine)


def begin(run: Run, trajectory: Trajectory, engine: Engine) -> None:
    """The trajectory is launched there."""
    trajectory.home, trajectory.weights_id = engine.id, engine.weights_id
    engine.begun += 1


def _beginning(run: Run) -> list[Engine]:
    """Those of them that begin training trajectories now."""
    other, batches = other_weights(run), _batches(run)
    next_version, window, published = run.next_version(), run.mode.window, run.state.published_id
    return [
        engine
        for engine in _with_room(run)
        if not engine.leaving
        and acceptable(engine.version, next_version, window)
        and (
            engine.begun < batches[engine.id]
            or (
                (engine.weights_id == published or engine.weights_id == weights.newest(run, engine))
                and (other is None or not weights.loadable(run, engine, other))
            )
        )
    ]


def _evaluating(run: Run) -> list[Engine]:
    """Those of them that take an evaluation's episodes now."""
    evaluation = run.state.evaluation
    if evaluation is None:
        return []
    return [
        engine
        for engine in _with_room(run)
        if not engine.leaving and engine.weights_id == evaluation.weights_id
    ]


def _serves(engine: Engine) -> bool:
    return engine.status is EngineStatus.SERVING and not engine.draining


# Which weights an engine takes.


def is_bound(run: Run, engine: Engine) -> bool:
    """What began with its weights is not over, or KV is on its way from it or to it."""
    return residents(run, engine) > 0 or engine.id in _moving(run)


def _moving(run: Run) -> frozenset[EngineId | None]:
    """Engines that KV leaves or comes to."""
    return frozenset(end for m in run.state.migrations.values() for end in (m.source, m.target))


@dataclass(frozen=True, slots=True)
class _Wishes:
    """What all engines together decide about which weights one of them takes."""

    other: int | None
    """Weights that somebody waits for."""
    holder: EngineId | None
    """The engine that keeps the weights of an evaluation."""
    moving: frozenset[EngineId | None]

    @classmethod
    def of(cls, run: Run) -> Self:
        return cls(other=other_weights(run), holder=_holder(run), moving=_moving(run))


def wanted(run: Run, engine: Engine) -> int | None:
    """The weights that it is to load now; None to leave it as it is, as while KV is on
    its way from it or to it.
    """
    return _wanted(run, engine, _Wishes.of(run))


def updates(run: Run) -> Iterator[tuple[Engine, int]]:
    """Engines that are to load other weights now, each with these.

    What is done about one counts for the next.
    """
    wishes, loads = _Wishes.of(run), run.order.loads
    for engine in [engine for engine in run.state.engines.values() if engine.id not in loads]:
        if not engine.going and engine.status in (EngineStatus.STALE, EngineStatus.SERVING):
            target = _wanted(run, engine, wishes)
            if target is not None:
                yield engine, target
                wishes = _Wishes.of(run)


def _wanted(run: Run, engine: Engine, wishes: _Wishes) -> int | None:
    if residents(run, engine) or engine.id == wishes.holder or engine.id in wishes.moving:
        return None
    other, newest = wishes.other, weights.newest(run, engine)
    if other is not None and weights.loadable(run, engine, other):
        return other
    if newest is None or newest == engine.weights_id:
        return None
    # What was published while it loaded has to wait until it has begun something, or it
    # might load for ever.
    fresh = (
        engine.status is EngineStatus.SERVING
        and engine.begun == 0
        and engine.since >= run.state.published_at
    )
    return None if fresh else newest


def other_weights(run: Run) -> int | None:
    """Weights that no engine has or loads, and that an evaluation or homeless
    trajectories wait for.
    """
    state = run.state
    evaluated = [state.evaluation.weights_id] if state.evaluation is not None else []
    bound = sorted(trajectory.weights_id for trajectory in _homeless(run)) if state.homeless else []
    return next(
        (
            found
            for found in (*evaluated, *bound)
            if weights.anywhere(run, found) and not somewhere(run, found)
        ),
        None,
    )


def _holder(run: Run) -> EngineId | None:
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
    return first if not evaluation.begun or evaluation.to_draw or waiting else None


def somewhere(run: Run, weights_id: int) -> bool:
    """An engine has these weights, or is loading them."""
    return weights_id in run.fleet.to_have


# What a lost engine leaves.


def find_home(run: Run, trajectory: Trajectory, avoid: Sequence[EngineId] = ()) -> None:
    """Its home is the emptiest engine with its weights, rather none of `avoid`, or that
    leaves; or it is homeless.
    """
    found = [engine for engine in run.state.engines.values() if has_weights_of(engine, trajectory)]
    rather = [engine for engine in found if engine.id not in avoid] or found
    wanted = [engine for engine in rather if not engine.leaving] or rather
    trajectory.resident = False
    trajectory.home = (
        min(wanted, key=lambda engine: residents(run, engine) / batch_of(run, engine)).id
        if wanted
        else None
    )
    if trajectory.home is None:
        run.state.homeless[trajectory.id] = None
    run.order_changed(trajectory)


def has_weights_of(engine: Engine, trajectory: Trajectory) -> bool:
    """The engine takes turns, under the weights that the trajectory began with."""
    return _serves(engine) and engine.weights_id == trajectory.weights_id


def left(run: Run, engine: Engine) -> None:
    """The engine has lost its weights, or is gone: whoever had his home there has none."""
    load = run.order.loads.get(engine.id)
    for _, trajectory_id in list(load.left) if load is not None else ():
        find_home(run, run.state.trajectories[trajectory_id])


def settle(run: Run) -> list[Trajectory]:
    """Reassign unassigned trajectories to engines that now serve their version. Return
    those whose version can no longer be loaded anywhere.
    """
    stranded = []
    for trajectory in _homeless(run) if run.state.homeless else ():
        find_home(run, trajectory)
        lost = not weights.anywhere(run, trajectory.weights_id) and not somewhere(
            run, trajectory.weights_id
        )
        if trajectory.home is None and lost:
            stranded.append(trajectory)
    return stranded


def checkpoints(run: Run) -> set[int]:
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
        [state.saved.get(trajectory.weights_id) for trajectory in _homeless(run)]
        if state.homeless
        else []
    )
    return {step for step in (*reading, *waiting) if step is not None}


def _homeless(run: Run) -> list[Trajectory]:
    """Those who still are; the others are struck off the list."""
    state = run.state
    listed = [
        state.trajectories[member] for member in state.homeless if member in state.trajectories
    ]
    found = [one for one in listed if one.home is None and one.stage in (Stage.INIT, Stage.RUN)]
    state.homeless = {trajectory.id: None for trajectory in found}
    return found
