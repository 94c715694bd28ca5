"""The assignment of trajectories to engines: planned for all trajectories under way,
then kept by rank as trajectories end (Heddle §5).

Trajectories whose task domains name a pool are ranked among themselves, over the
engines of the pool that serves them; all others are ranked over all engines. Invariant:
a partition names only engines that have weights and do not drain; it is cleared when
the set of such engines changes.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

import msgspec

from rollweave.core.dispatching import pool_for
from rollweave.core.mechanisms.costs.placement import place_groups
from rollweave.core.mechanisms.costs.rates import groups_of, kind_of, numbers_of, rate_of
from rollweave.core.mechanisms.lengths.index import domain_of, index_of, reindex, work_of
from rollweave.core.mechanisms.placement import elastic
from rollweave.core.policy.scheduling import overdue_rank
from rollweave.core.run import Run
from rollweave.core.state import Engine, Trajectory
from rollweave.schema.base import EngineId, TrajectoryId


class Migration(msgspec.Struct):
    """A migration of a trajectory's KV.

    `since` is None while it waits for its transfer epoch.
    """

    number: int
    trajectory_id: TrajectoryId
    attempt: int
    source: EngineId
    target: EngineId
    since: float | None = None
    # the trajectory leaves for good, with its open turn, so that the source can load
    # new weights
    vacates: bool = False
    prompt: bool = False  # a prefill engine has computed the prompt of its open turn


class Migrations(msgspec.Struct):
    """The migrations of trajectories."""

    open: dict[int, Migration] = {}  # planned or under way
    next_number: int = 0
    token_s: float = 0.0  # mean seconds for the transfer of a token's KV


class Share(msgspec.Struct):
    """A share of the partition: the engine has the next `size` trajectories by
    predicted length.
    """

    engine_id: EngineId
    size: int


class Partition(msgspec.Struct):
    """The assignment of ranks to engines, longest first, as planned for `planned`
    trajectories.
    """

    shares: list[Share] = []
    planned: int = 0
    predictions: int = 0  # received since the plan was made, one for each turn
    dispatched: int = 0  # attempts dispatched for the first time since then
    step: int = 0  # the training step during which the plan was made


class Placement(msgspec.Struct):
    """The part of the state."""

    trajectories: dict[TrajectoryId, int] = {}  # the migration that the trajectory has
    migrations: Migrations = msgspec.field(default_factory=Migrations)
    partitions: dict[str, Partition] = {}  # by the pool that trajectories prefer, "" for none
    planned_at: int = 0  # step of the last plan of degrees
    # degree of running engines whose costs are unknown → step since when
    awaited: dict[int, int] = {}
    # first turns that wait for a prediction → since when (placement/first_dispatch)
    held: dict[TrajectoryId, float] = {}
    # those that have one, and wait for the other first turns of the batch
    ready: dict[TrajectoryId, float] = {}
    silent: bool = False  # the predictor has let such a turn wait in vain, and not answered since


def migration_of(run: Run, trajectory: Trajectory) -> int | None:
    """Return the number of the trajectory's migration, from its planning to its end."""
    return run.part(Placement).trajectories.get(trajectory.id)


KV_KEPT_TURNS = 4
"""Number of mean turns for which KV is kept while a trajectory's environment works.
With 1, simulated software engineering, whose tools have a long tail, took up to 1 %
longer.
"""

REPLAN_GROWTH = 1.5
"""A new plan is made when the trajectories under way, or the predictions received since
the plan, reach this multiple of the trajectories planned for.
"""


def queue_of(run: Run, trajectory: Trajectory, avoid: Sequence[EngineId]) -> EngineId | None:
    """The engine for which the trajectory's turns wait; None if they wait for no
    engine.
    """
    if not run.pacing.assign(run, trajectory, avoid):
        assign_usable(run, trajectory, avoid)
    return work_of(run, trajectory).assigned_engine


def assign_usable(run: Run, trajectory: Trajectory, avoid: Sequence[EngineId]) -> None:
    """Assign the trajectory to another engine unless its own is usable."""
    assigned = work_of(run, trajectory).assigned_engine
    if run.scheduling.by_finish and trajectory.turn is not None:
        engines, loads = usable(run, trajectory), run.fleet.loads
        serving = [
            engine
            for engine in engines
            if engine.id in loads
            and engine.id not in avoid
            and (engine.open or not engine.abilities.lent)
        ]
        # An engine that loads weights is waited for only where no other engine serves.
        # A borrowed engine may take no turns for long, and is never waited for.
        others = [engine for engine in engines if not engine.abilities.lent]
        wanted = serving or _wanted(others, avoid)
        _assign(run, trajectory, elastic.engine_for(run, trajectory, wanted))
        return
    if assigned is None or assigned in avoid or not is_usable(run, assigned):
        _assign(run, trajectory, _choose_engine(run, trajectory, avoid))


def _assign(run: Run, trajectory: Trajectory, engine_id: EngineId | None) -> None:
    if work_of(run, trajectory).assigned_engine != engine_id or engine_id is None:
        reassign(run, trajectory, engine_id)


def reassign(run: Run, trajectory: Trajectory, engine_id: EngineId | None) -> None:
    """Assign the trajectory to this engine, which computes its context again."""
    work = work_of(run, trajectory)
    work.assigned_engine, work.kv_resident = engine_id, False
    reindex(run, trajectory)


def keep_resident(run: Run, trajectory: Trajectory) -> None:
    """Record that the assigned engine holds the trajectory's KV, or will."""
    work = work_of(run, trajectory)
    if not work.kv_resident:
        work.kv_resident = True
        reindex(run, trajectory)


def is_usable(run: Run, engine_id: EngineId) -> bool:
    """True if the engine serves, or will when it has loaded new weights."""
    engine = run.state.engines.get(engine_id)
    return engine is not None and _takes_turns(engine)


def _takes_turns(engine: Engine) -> bool:
    return engine.samples and not engine.draining and engine.version >= 0


def usable(run: Run, trajectory: Trajectory) -> list[Engine]:
    """Return the engines to which the trajectory may be assigned now: the engines of
    the pool that serves its domain, if they take turns or will take turns.
    """
    pool = pool_for(run, trajectory)
    return [
        engine
        for engine in run.state.engines.values()
        if _takes_turns(engine) and pool in (None, engine.seat.pool)
    ]


def _wanted(engines: Sequence[Engine], avoid: Sequence[EngineId]) -> list[Engine]:
    """Return the engines that have not failed the turn. If all have failed it, return
    the engines that are not lent, or all engines if all are lent: a lent engine gave
    the turn back to be run elsewhere.
    """
    wanted = [engine for engine in engines if engine.id not in avoid]
    return wanted or [engine for engine in engines if not engine.abilities.lent] or list(engines)


def _choose_engine(run: Run, trajectory: Trajectory, avoid: Sequence[EngineId]) -> EngineId | None:
    wanted = _wanted(usable(run, trajectory), avoid)
    if not wanted:
        return None
    # Without a prediction for the trajectory its rank is meaningless, and members of a
    # group would gather on one engine. A prediction from the prompt alone is the same
    # for the group, too; the paper ranks by it.
    predicted = work_of(run, trajectory).predicted_at_turn
    if run.scheduling.by_rank and predicted >= (0 if run.scheduling.plans_once else 1):
        target = engine_of_rank(run, trajectory, first=trajectory.turns_requested <= 1)
        if any(engine.id == target for engine in wanted):
            return target
    return min(wanted, key=lambda engine: work_s(run, engine)).id


def fits_in_kv(run: Run, trajectory: Trajectory, engine: Engine) -> bool:
    """True if the KV cache has room for the trajectory's context in addition to the
    contexts of residents with an earlier claim. Later residents give way. So contexts
    stay cached while environments work, and are not computed repeatedly, which pays
    where environments are quicker than turns on average. No KV is kept for a trajectory
    whose environment takes KV_KEPT_TURNS times as long.
    """
    turn = trajectory.turn
    if (
        not run.scheduling.reserves_kv
        or work_of(run, trajectory).predicted_at_turn < 0
        or (turn is not None and turn.rank >= overdue_rank(turn.arrival))
    ):
        return True
    stats = domain_of(run, trajectory)
    turn_s = stats.turn_s or 0.0
    if (stats.tool_s or 0.0) > turn_s:
        return True
    before, room = (
        index_of(run).ahead_of(trajectory, engine.id),
        engine.abilities.kv_tokens - work_of(run, trajectory).kv_demand,
    )
    if not before or sum(place[3] for place in before) <= room:
        return True
    since = run.now - KV_KEPT_TURNS * turn_s
    kept = [
        claims
        for _, _, resident, claims in before
        if not _is_away(run.state.trajectories[resident], since)
    ]
    return not kept or sum(kept) <= room


def _is_away(trajectory: Trajectory, since: float) -> bool:
    """True if the trajectory's environment has been at work since then or longer."""
    return trajectory.turn is None and trajectory.since < since


def least_loaded(run: Run, among: Iterable[EngineId] | None = None) -> Engine | None:
    """The engine whose assigned trajectories are done first, of all engines or of
    `among`; None if no engine takes turns. Called for most turns over all engines, so
    only work that is not cached is computed.
    """
    engines, loads = run.state.engines, index_of(run).loads
    best, least = None, math.inf
    for engine_id in engines if among is None else among:
        engine = engines[engine_id]
        if _takes_turns(engine):
            load = loads.get(engine_id)
            known = 0.0 if load is None else load.work_s
            seconds = work_s(run, engine) if known is None else known
            if seconds < least:
                best, least = engine, seconds
    return best


def work_s(run: Run, engine: Engine) -> float:
    """Seconds until the engine's assigned trajectories are done, without tools."""
    load = index_of(run).loads.get(engine.id)
    if load is None:
        return 0.0
    if load.work_s is None:
        load.work_s = rate_of(run, engine).seconds(
            longest=load.longest, tokens=load.tokens, occupied=load.occupied
        )
    return load.work_s


def is_plan_due(run: Run, trajectory: Trajectory) -> bool:
    """True if the first dispatch of the trajectory's attempt makes a plan.

    The plan of Heddle §5.2 is made once for a batch: the next one is due when a step
    was trained since, or, in a service, when as many attempts were dispatched as were
    planned.
    """
    pool = run.preferred_pool(trajectory)
    partition, active = run.part(Placement).partitions.get(pool), index_of(run).count(pool)
    if partition is None:
        return True
    if run.scheduling.plans_once:
        if run.state.serving:
            return partition.dispatched >= partition.planned
        return partition.step != run.state.trainer.step
    return max(active, partition.predictions) > REPLAN_GROWTH * partition.planned


def count_dispatch(run: Run, trajectory: Trajectory) -> None:
    """Count the first dispatch of an attempt."""
    partition = run.part(Placement).partitions.get(run.preferred_pool(trajectory))
    if partition is not None:
        partition.dispatched += 1


def engine_of_rank(run: Run, trajectory: Trajectory, *, first: bool = False) -> EngineId:
    """Return the engine for the trajectory's rank among the trajectories that prefer
    its pool. A plan that is made once is made at the `first` dispatch of an attempt.
    """
    order, pool = index_of(run), run.preferred_pool(trajectory)
    partition, active = run.part(Placement).partitions.get(pool), order.count(pool)
    plans = first or not run.scheduling.plans_once
    if partition is None or (plans and is_plan_due(run, trajectory)):
        # one length for the plan and the ranks, as in Heddle §5.2
        works = order.works(pool, whole=run.scheduling.plans_once)
        engines = usable(run, trajectory)
        partition = run.part(Placement).partitions[pool] = _plan(run, works, engines)
    sizes = [share.size for share in partition.shares]
    return partition.shares[
        retarget(sizes, rank=order.rank(trajectory.id), active=active)
    ].engine_id


def retarget(sizes: Sequence[int], *, rank: int, active: int) -> int:
    """Return the share to which the trajectory of this rank belongs, among the `active`
    trajectories that are left; rank 0 is the longest. The plan's `sizes` are scaled to
    `active`. Raises ValueError for a rank of `active` or more, and for shares without
    trajectories.
    """
    planned = sum(sizes)
    if planned < 1 or min(sizes) < 0:
        raise ValueError(f"sizes must be 0 or more and not all 0, got {list(sizes)}")
    if not 0 <= rank < active:
        raise ValueError(f"rank must be from 0 to {active - 1}, got {rank}")
    ends = list(accumulate(sizes))
    # Whole numbers, so that a boundary is not moved by rounding: rank / active < end /
    # planned.
    return bisect_right(ends, rank * planned // active)


def _plan(run: Run, works: Sequence[tuple[int, int]], engines: Sequence[Engine]) -> Partition:
    """Place trajectories on these engines (Heddle §5.2, exact)."""
    numbers = numbers_of(run, engines)
    numbered = sorted(
        ((numbers[kind_of(run, engine)], engine) for engine in engines), key=lambda one: -one[0]
    )[: len(works)]
    engines, workers = [engine for _, engine in numbered], [number for number, _ in numbered]
    kinds = {number: kind for kind, number in numbers.items() if number in workers}
    placement = place_groups(groups_of(run, works, kinds), workers)
    run.state.counters.scheduling.plans += 1
    taken = sorted(
        (start, end, engine.id)
        for (start, end), engine in zip(placement.spans, engines, strict=True)
        if end > start
    )
    return Partition(
        shares=[Share(engine_id=name, size=end - start) for start, end, name in taken],
        planned=len(works),
        step=run.state.trainer.step,
    )


def engines_changed(run: Run) -> None:
    """Clear the partitions: an engine joined, drains, is gone, or has other costs."""
    run.part(Placement).partitions = {}


def check(run: Run) -> None:
    """Assert that partitions name no engine that drains."""
    for engine in run.state.engines.values():
        assert not engine.draining or all(
            share.engine_id != engine.id
            for partition in run.part(Placement).partitions.values()
            for share in partition.shares
        ), f"a partition has {engine.id}, which drains"
