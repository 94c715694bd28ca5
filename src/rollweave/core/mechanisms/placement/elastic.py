"""The engine on which a turn should finish first, from what the core knows about the
engines and the trajectory (`mechanisms/placement/policy/elastic`).

An engine's cache should have the context that it computed last of the trajectory, and
the prompt of its group (`costs/caches`). The cost of a prompt's token is learned from
the times of finished turns (`costs/rates`); while it is unknown, a prompt's token is
assumed to cost as much as a sampled token.
"""

from collections.abc import Mapping, Sequence

from rollweave.core.mechanisms.costs import caches
from rollweave.core.mechanisms.costs.state import costs_of
from rollweave.core.mechanisms.lengths.state import domain_of, work_of
from rollweave.core.mechanisms.placement.policy.elastic import Site, earliest
from rollweave.core.run import Run
from rollweave.core.state import Engine, Trajectory
from rollweave.schema.base import EngineId

FIRST_TOKENS = 64.0
"""Tokens of a turn, as long as no turn of its task domain is finished."""


def engine_for(run: Run, trajectory: Trajectory, engines: Sequence[Engine]) -> EngineId | None:
    """Return the engine among `engines` on which the trajectory's turn should finish
    first; None without engines.
    """
    tokens, cached = _tokens(run, trajectory), caches.cached_by_engine(run, trajectory)
    sites = [
        _site(
            run,
            trajectory,
            engine,
            ahead=run.turn_queues.count(engine.id, but=trajectory.id),
            cached=cached,
        )
        for engine in engines
    ]
    return earliest(sites, tokens=tokens, affine=trajectory.engine)


def gains(run: Run, trajectory: Trajectory, engine: Engine) -> bool:
    """Return whether the queued turn of a trajectory would finish earlier on `engine`,
    which has a free slot, than on the engine for which it waits. An engine that
    takes no turns now, for example because it loads weights, is not waited for.
    """
    assigned = run.state.engines.get(work_of(run, trajectory).assigned_engine or EngineId(""))
    if assigned is None or assigned.id not in run.fleet.loads:
        return True
    if costs_of(run, assigned).rate is None:
        return True
    tokens, cached = _tokens(run, trajectory), caches.cached_by_engine(run, trajectory)
    here = _site(run, trajectory, engine, ahead=0, cached=cached).finish_s(tokens)
    ahead = run.turn_queues.count(
        assigned.id, but=trajectory.id, before=trajectory.open_turn.arrival
    )
    return here < _site(run, trajectory, assigned, ahead=ahead, cached=cached).finish_s(tokens)


def _tokens(run: Run, trajectory: Trajectory) -> float:
    known = domain_of(run, trajectory).turn_tokens
    return FIRST_TOKENS if known is None else known


def _site(
    run: Run, trajectory: Trajectory, engine: Engine, *, ahead: int, cached: Mapping[EngineId, int]
) -> Site:
    turn, rate = trajectory.open_turn, costs_of(run, engine).rate
    context = turn.context_tokens + turn.output_tokens
    slots, active = max(1, engine.abilities.max_slots), len(engine.active)
    batch = min(slots, active + 1)
    token_s = turn_s = price_s = 0.0
    if rate is not None:
        token_s = rate.fixed_s + batch * (rate.sequence_s + context * rate.context_s)
        price = caches.sampling_price(run, engine)
        price_s = token_s / batch if price is None else price
        turn_s = domain_of(run, trajectory).turn_s or _tokens(run, trajectory) * token_s
    return Site(
        id=engine.id,
        active=active,
        slots=slots,
        ahead=ahead,
        missing=max(0, context - cached.get(engine.id, 0)),
        price_s=price_s,
        token_s=token_s,
        turn_s=turn_s,
        borrowed=engine.abilities.lent,
    )
