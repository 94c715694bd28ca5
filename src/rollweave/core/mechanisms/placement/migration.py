"""The decision to migrate a trajectory, with its KV, to the engine for its new rank,
while its environment works (Heddle §5.3; `placement/transfers` moves it).

The partition of the last plan is scaled to the trajectories that are left, so that a
rank keeps its engine as other trajectories end. Heddle moves a trajectory whenever the
engine of its rank is not its present engine; `gain` also requires that the slower of
the two engines would be done sooner, by more than the transfer delays the next turn.
"""

from rollweave.core import dispatching
from rollweave.core.dispatching import pool_for
from rollweave.core.mechanisms.costs.rates import rate_of
from rollweave.core.mechanisms.lengths.index import (
    EngineWork,
    domain_of,
    index_of,
    reindex,
    work_of,
)
from rollweave.core.mechanisms.placement import assignment, first_dispatch, transfers
from rollweave.core.mechanisms.placement.assignment import Placement, migration_of
from rollweave.core.run import Run
from rollweave.core.state import Engine, Queued, Trajectory, Turn
from rollweave.schema.events import TurnDone

GAIN = 0.05
"""Minimum share of an engine's time that a move must save: estimates err, and a moved
trajectory's KV takes room from others.
"""

UNEVEN = 1.25
"""Minimum ratio of an engine's work to the least loaded engine's work for a trajectory
to move only to balance the two: estimates err by about this ratio.
"""


def turn_done(
    run: Run, trajectory: Trajectory, turn: Turn, _engine: Engine, _event: TurnDone
) -> None:
    """Consider a move while the environment works. With a predictor that answers in
    time, `revised` does so when its prediction for this interval comes.
    """
    if not run.scheduling.assigns:
        return
    predicted_at = work_of(run, trajectory).predicted_at_turn
    if predicted_at >= 0 and (run.part(Placement).silent or predicted_at < turn.number):
        dispatching.release(run, consider(run, trajectory))


def revised(run: Run, trajectory: Trajectory, turn: Turn | None) -> None:
    """Act on the trajectory's new estimate."""
    if not run.scheduling.assigns:
        return
    partition = run.part(Placement).partitions.get(run.preferred_pool(trajectory))
    if partition is not None and (turn is None or trajectory.turns_requested <= 1):
        partition.predictions += 1  # one for each turn, not its correction
    if turn is None:
        dispatching.release(run, consider(run, trajectory))
    elif (
        isinstance(turn.place, Queued)
        and trajectory.turns_requested <= 1
        and run.pacing.interchangeable
    ):
        work_of(run, trajectory).assigned_engine = None  # no engine has KV of it yet
        reindex(run, trajectory)
    first_dispatch.revised(run, trajectory)


def consider(run: Run, trajectory: Trajectory) -> list[Trajectory]:
    """Decide whether the trajectory, whose estimate has changed in a tool interval,
    should move. Return the trajectories whose turns wait no longer, as `begin` does.
    """
    assigned = work_of(run, trajectory).assigned_engine
    if (
        run.scheduling.migration == "never"
        or migration_of(run, trajectory) is not None
        or assigned is None
        or not assignment.is_usable(run, assigned)
    ):
        return []
    source = run.state.engines[assigned]
    if not source.abilities.moves_kv:
        return []
    target = _target(run, trajectory, source)
    if target is None:
        return []
    transfers.plan(run, trajectory, source.id, target.id)
    return transfers.begin(run)


def _target(run: Run, trajectory: Trajectory, source: Engine) -> Engine | None:
    """Return the engine for the trajectory's rank. With migration by gain, return the
    least loaded engine instead if moving to the former does not pay and moving to the
    latter does. The source must be able to move KV.
    """
    by_rank = run.state.engines[assignment.engine_of_rank(run, trajectory)]
    if run.scheduling.migration == "rank":
        can_take = by_rank.abilities.moves_kv and transfers.can_take(source, by_rank)
        return by_rank if by_rank is not source and can_take else None
    in_pool = pool_for(run, trajectory) is not None
    idlest = assignment.least_loaded(
        run, [engine.id for engine in assignment.usable(run, trajectory)] if in_pool else None
    )
    assert idlest is not None, "the source takes turns"
    uneven = assignment.work_s(run, source) > UNEVEN * assignment.work_s(run, idlest)
    for target in (by_rank, idlest) if uneven else (by_rank,):
        if (
            target is not source
            and target.abilities.moves_kv
            and transfers.can_take(source, target)
            and _is_worthwhile(run, trajectory, source, target)
        ):
            return target
    return None


def _is_worthwhile(run: Run, trajectory: Trajectory, source: Engine, target: Engine) -> bool:
    own, other = (
        index_of(run).loads.get(source.id, EngineWork()),
        index_of(run).loads.get(target.id, EngineWork()),
    )
    left = next((-key[0] for key in own.remaining if key[1] != trajectory.id), 0)
    mine = work_of(run, trajectory)
    work, held = mine.estimate, mine.kv_token_steps
    there = max(other.longest, work)
    transfer_s = trajectory.context_tokens * run.part(Placement).migrations.token_s
    return worth_it(
        _seconds(
            run,
            source,
            (own.longest, own.tokens, own.occupied),
            (left, own.tokens - work, own.occupied - held),
        ),
        _seconds(
            run,
            target,
            (other.longest, other.tokens, other.occupied),
            (there, other.tokens + work, other.occupied + held),
        ),
        exposed_s=max(0.0, transfer_s - (domain_of(run, trajectory).tool_s or 0.0)),
    )


def worth_it(
    source_s: tuple[float, float], target_s: tuple[float, float], *, exposed_s: float
) -> bool:
    """Return whether the move lets the engine that ends last end earlier, by `GAIN` of
    its time and by more than the move delays the trajectory. The seconds to the end of
    an engine's work are given without and with the move (`mechanisms/lengths/work`);
    tools are not counted.
    """
    before = max(source_s[0], target_s[0])
    return before - max(source_s[1], target_s[1]) > exposed_s + GAIN * before


def _seconds(run: Run, engine: Engine, *loads: tuple[int, int, int]) -> tuple[float, float]:
    """Seconds until the engine's work is done, before the move and after it."""
    cost = rate_of(run, engine)
    before, after = (
        cost.seconds(longest=longest, tokens=tokens, occupied=held)
        for longest, tokens, held in loads
    )
    return before, after
