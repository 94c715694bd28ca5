"""The pools of the task domains as they are learned (RollArt §9): domains begin in
their declared pools, and after each step move to the pools with which the fleet would
be done earliest. `core/policy/turn_times` computes what a domain needs and what it
costs in each pool, and `mechanisms/pools/shares` divides domains among pools. An
attempt keeps the pool that it was given, so that its prefix cache is not lost; new
attempts follow the shares, in the same order whenever the events are the same.

Invariant: the shares of a domain sum to 1.
"""

import statistics
from collections.abc import Mapping

import msgspec

from rollweave.core.mechanisms.costs.rates import Costs, Kind, kind_of, learns_pools
from rollweave.core.mechanisms.lengths.index import reindex
from rollweave.core.mechanisms.pools.shares import Shares, assign, makespan
from rollweave.core.policy.routing import next_pool, serving_pool
from rollweave.core.policy.scheduling import has_learned_pools
from rollweave.core.policy.turn_times import (
    FIRST_TURNS,
    Cost,
    DomainProfile,
    Fit,
    TokenCosts,
    Worked,
    cost,
    fit,
    renewed,
    together,
    token_costs,
)
from rollweave.core.run import Mechanism, Run, TrainerMove, TurnMove
from rollweave.core.state import Engine, Stage, State, Trajectory, Turn
from rollweave.schema.events import TurnDone

NAME = "pools"
"""Key of the part in `State.mechanisms`."""


class Pools(msgspec.Struct):
    """The part of the state."""

    profiles: dict[str, DomainProfile] = {}  # by task domain
    # task domain → pool → its share of the trajectories; none before the first change
    shares: dict[str, dict[str, float]] = {}
    trial: dict[str, dict[str, float]] = {}  # shares until the next plan, instead of these
    given: dict[str, dict[str, int]] = {}  # trajectories that were given to pools since
    fits: dict[str, dict[int, Fit]] = {}  # prices, by class of engines and degree
    worked: dict[str, dict[int, Worked]] = {}  # by the same
    # task domain → pool → the cost of its tokens there, as of the last plan
    token_costs: dict[str, dict[str, TokenCosts]] = {}
    planned_at: int = 0  # step of the last plan


def pools_of(state: State) -> Pools | None:
    """Return the part of the state; None if pools are not learned."""
    part = state.mechanisms.get(NAME)
    return part if isinstance(part, Pools) else None


MIN_GAIN = 0.05
"""Minimum share of the predicted makespan that other pools must save: trajectories that
are under way stay, and estimates are uncertain by a few percent.
"""

TRIAL = 1 / 32
"""Minimum share of the domains' attempts that try better pools for one step if the gain
is uncertain. The turns of these attempts show whether it is real.
"""

KNOWN_TURNS = 4
"""Number of turns that a domain must have had in a pool before more than a trial moves
there. Half of the turns are forgotten with each step.
"""

LEAST_TURNS = 0.01
"""Number of remembered turns below which a domain has no work: its last turn was seven
steps ago.
"""


def learn_turn(
    run: Run, trajectory: Trajectory, turn: Turn, engine: Engine, event: TurnDone
) -> None:
    """Learn what a domain needs from a finished turn that `costs` has learned from."""
    if event.replayed or not learns_pools(run):
        return
    name, time = run.state.groups[trajectory.group_id].name, run.part(Costs).newest
    profile = run.part(Pools).profiles.setdefault(name, DomainProfile())
    output = max(1, event.output_tokens)
    prompt = max(0, turn.context_tokens - event.cached_tokens)
    context = turn.context_tokens + output / 2
    batch = None if time is None else time.batch
    profile.add(engine.seat.pool, prompt=prompt, output=output, batch=batch, context=context)
    if time is not None:  # its seconds are comparable with other turns' seconds
        hardware, degree = kind_of(run, engine)
        worked = run.part(Pools).worked.setdefault(hardware, {}).setdefault(degree, Worked())
        worked.add(time, prompt=prompt, context=context)


def give_pool(run: Run, trajectory: Trajectory) -> None:
    """Give an attempt that is launched a pool, by the shares of its domain; "" if the
    domain has no shares, or no engine of its pools serves.
    """
    affinity, name = run.part(Pools), run.state.groups[trajectory.group_id].name
    shares = affinity.trial.get(name) or affinity.shares.get(name, {})
    live = {pool: share for pool, share in shares.items() if pool in run.fleet.live_pools}
    trajectory.pool = ""
    if learns_pools(run) and live:
        given = affinity.given.setdefault(name, {})
        trajectory.pool = next_pool(live, given)
        given[trajectory.pool] = given.get(trajectory.pool, 0) + 1
    reindex(run, trajectory)


def plan(run: Run) -> None:
    """Move the domains to better pools after each trained step, if they save time."""
    affinity = run.part(Pools)
    if not learns_pools(run) or run.state.trainer.step == affinity.planned_at:
        return
    affinity.planned_at = run.state.trainer.step
    affinity.trial = {}
    costs = _learn_costs(run)
    if len({pool for by_pool in costs.values() for pool in by_pool}) > 1:
        _move(run, costs)
    for profile in affinity.profiles.values():
        profile.forget()
    for by_degree in affinity.worked.values():
        for worked in by_degree.values():
            worked.forget()


def _move(run: Run, costs: Mapping[str, Mapping[str, Cost]]) -> None:
    affinity, now = run.part(Pools), shares_now(run)
    seconds = {
        domain: {pool: needed.seconds for pool, needed in by_pool.items()}
        for domain, by_pool in costs.items()
    }
    late = {
        domain: {
            pool: costs[domain][pool].seconds + costs[domain][pool].error_s for pool in by_pool
        }
        for domain, by_pool in seconds.items()
    }
    best = assign(seconds)
    enough = (1 - MIN_GAIN) * makespan(seconds, now)
    if best.makespan_s > enough:
        return
    certain = makespan(late, best.shares) <= enough and all(
        affinity.profiles[domain].turns_in.get(pool, 0.0) >= KNOWN_TURNS
        for domain, shares in best.shares.items()
        for pool in shares
    )
    for domain, shares in best.shares.items():
        if shares == now[domain]:
            continue
        if certain:
            affinity.shares[domain] = shares
            run.state.counters.scheduling.moved_domains += 1
        elif now[domain]:  # otherwise it has turns in all pools
            turns = affinity.profiles[domain].turns
            affinity.trial[domain] = _with_trial(now[domain], shares, turns)
        affinity.given[domain] = {}


def _with_trial(
    now: Mapping[str, float], wanted: Mapping[str, float], turns: float
) -> dict[str, float]:
    """Return the present shares, with a trial of the pools that are to have more.
    `turns` are the domain's remembered turns: half are forgotten with each step, so
    they are at most twice the turns of a step. A trial's share suffices to make its
    pool known in one step, if at least as much stays in the domain's present pools.
    """
    tried = [pool for pool, share in wanted.items() if share > now.get(pool, 0.0)]
    needed = max(TRIAL, 2 * KNOWN_TURNS / turns)
    trial = min(needed, 1 / (len(tried) + 1))
    kept = 1 - trial * len(tried)
    shares = {pool: kept * share for pool, share in now.items()}
    return shares | {pool: shares.get(pool, 0.0) + trial for pool in tried}


def shares_now(run: Run) -> Shares:
    """Return the shares of each domain, without trials; none for a domain that any
    engine serves.
    """
    shares: dict[str, Mapping[str, float]] = {}
    live = run.fleet.live_pools
    for name, task in run.tasks.items():
        own = run.part(Pools).shares.get(name, {})
        present = {pool: share for pool, share in own.items() if pool in live}
        declared = serving_pool(run.config.pools_of(task.pool), live)
        if present:
            whole = sum(present.values())
            shares[name] = {pool: share / whole for pool, share in present.items()}
        else:
            shares[name] = {} if declared is None else {declared: 1.0}
    return shares


def _learn_costs(run: Run) -> dict[str, dict[str, Cost]]:
    """Return the seconds in which all engines of each pool together would do all known
    work of each domain; empty while no prices of engines are known. Record what a token
    costs there.
    """
    affinity, fits = run.part(Pools), _fits(run)
    profiles = {name: one for name, one in affinity.profiles.items() if one.turns >= LEAST_TURNS}
    if not fits or not profiles:
        return {}
    sampled = sum(profile.output_tokens for profile in profiles.values())
    batch = sum(profile.sequences for profile in profiles.values()) / sampled
    by_pool = _engines_by_pool(run)
    costs: dict[str, dict[str, Cost]] = {}
    for name, profile in profiles.items():
        costs[name], affinity.token_costs[name] = {}, {}
        for pool, engines in by_pool.items():
            sizes = {engine.id: _batch_on(engine, profile, batch) for engine in engines}
            costs[name][pool] = together(
                [_cost_on(run, engine, profile, fits, sizes[engine.id]) for engine in engines]
            )
            own = fits.get(kind_of(run, engines[0]))
            if own is not None:
                affinity.token_costs[name][pool] = token_costs(
                    profile, own, batch=sizes[engines[0].id]
                )
    return costs


def _fits(run: Run) -> dict[Kind, Fit]:
    """Learn and return the prices of the kinds of engines that have finished enough
    turns.
    """
    fits = run.part(Pools).fits
    for hardware, by_degree in run.part(Costs).turn_times.items():
        known = fits.setdefault(hardware, {})
        for degree, times in by_degree.items():
            if times.count >= FIRST_TURNS:
                newer = fit(times.turns)
                known[degree] = renewed(known[degree], newer) if degree in known else newer
    return {
        (hardware, degree): run.part(Pools).worked[hardware][degree].scaled(one)
        for hardware, by_degree in fits.items()
        for degree, one in by_degree.items()
    }


def _engines_by_pool(run: Run) -> dict[str, list[Engine]]:
    """Return the engines that serve, or will when they have loaded weights."""
    by_pool: dict[str, list[Engine]] = {}
    for engine in run.state.engines.values():
        takes_turns = engine.samples and engine.version >= 0 and not engine.draining
        if takes_turns and engine.seat.pool in run.fleet.live_pools:
            by_pool.setdefault(engine.seat.pool, []).append(engine)
    return by_pool


def _batch_on(engine: Engine, profile: DomainProfile, batch: float) -> float:
    """Return the number of turns of this domain that the engine would run at the same
    time, where other engines run `batch` turns.
    """
    fitting = engine.abilities.kv_tokens / max(1.0, profile.context)
    return max(1.0, min(batch, engine.abilities.max_slots, fitting))


def _cost_on(
    run: Run, engine: Engine, profile: DomainProfile, fits: Mapping[Kind, Fit], batch: float
) -> Cost:
    """Return the cost of all work of a domain on one engine.

    An engine whose prices are unknown is assumed to cost the mean of the other engines,
    with an uncertainty from nothing to twice the mean.
    """
    own = fits.get(kind_of(run, engine))
    if own is not None:
        return cost(profile, own, batch=batch)
    mean = statistics.fmean(cost(profile, fit, batch=batch).seconds for fit in fits.values())
    return Cost(seconds=mean, error_s=mean)


def check(run: Run) -> None:
    """Assert that domains whose pools are learned are divided whole, and that an
    attempt was given a pool with engines.
    """
    part, pools = run.part(Pools), {group.pool for group in run.config.engines}
    for name, shares in (*part.shares.items(), *part.trial.items()):
        assert abs(sum(shares.values()) - 1) < 1e-9, f"{name}: {shares}"
        assert min(shares.values()) >= 0, f"{name}: {shares}"
        assert pools >= shares.keys(), f"{name}: {shares}"
    for trajectory in run.state.trajectories.values():
        assert not trajectory.pool or (learns_pools(run) and trajectory.pool in pools), trajectory


MECHANISM = Mechanism(
    name=NAME,
    used=has_learned_pools,
    state=Pools,
    follows={
        Stage.INIT: give_pool,
        TurnMove.DONE: learn_turn,
        TrainerMove.TRAINED: plan,
    },
    check=check,
)
