"""Choose the engine on which a turn is predicted to finish first: its wait for a slot,
the part of its context that the engine has not cached, and its decoding.

ROSE's order (§4.3; `core/policy/routing`) takes the engine that has the turn's prefix
if it has room, and otherwise any engine that has room. While there are more turns than
slots, the engine whose slot becomes free is rarely the one with the prefix: nearly
every turn then computes its context again, and pinning a trajectory to an engine is
faster. While there are slots for all, prefixes are found, and pinning is slower. Both
orders are cases of one comparison, in seconds:

    wait + missing · price · (1 + beside) + tokens · step

where computing the `missing` tokens of the context also delays the turns `beside`. So a
turn may wait for an engine whose slots are taken, and an engine with a free slot takes
a turn that waits for another engine if the turn would finish earlier there.

An engine's cache should have the context that it computed last of the trajectory, and
the prompt of its group (`mechanisms/costs`). The cost of a prompt's token is learned
from the times of finished turns (`costs/rates`); while it is unknown, a prompt's token
is assumed to cost as much as a sampled token.
"""

from collections.abc import Iterable, Mapping, Sequence

from rollweave.core.mechanisms import costs
from rollweave.core.mechanisms.costs.rates import costs_of
from rollweave.core.mechanisms.lengths.index import domain_of, work_of
from rollweave.core.run import Run
from rollweave.core.state import Engine, Trajectory
from rollweave.schema.base import EngineId, Struct


class Site(Struct, frozen=True, kw_only=True):
    """An engine that may take a turn.

    It has `active` turns on `slots` slots, and `ahead` turns wait for it; each holds
    its slot for `turn_s` seconds. It lacks `missing` tokens of the turn's context, at
    `price_s` seconds each, and samples a token in `token_s` seconds. If it is borrowed,
    dedicated engines are preferred among equals.
    """

    id: EngineId
    active: int
    slots: int
    ahead: int = 0
    missing: int = 0
    price_s: float = 0.0
    token_s: float = 0.0
    turn_s: float = 0.0
    borrowed: bool = False

    @property
    def wait_s(self) -> float:
        """Seconds until the turn has a slot: slots become free one after the other."""
        before = self.active + self.ahead - self.slots + 1
        return max(0, before) * self.turn_s / max(1, self.slots)

    def finish_s(self, tokens: float) -> float:
        """Return the seconds until a turn that samples `tokens` tokens is finished."""
        beside = min(self.active, self.slots)
        prompt_s = self.missing * self.price_s * (1 + beside)
        return self.wait_s + prompt_s + tokens * self.token_s


def earliest(sites: Iterable[Site], *, tokens: float, affine: EngineId | None) -> EngineId | None:
    """Return the engine on which a turn of `tokens` tokens is predicted to finish
    first; None without sites. Among equals, the engine `affine` of the trajectory's
    last turn comes first, then dedicated engines before borrowed engines, then the
    engine with the fewest turns for each slot.
    """
    best = min(
        sites,
        key=lambda site: (
            site.finish_s(tokens),
            site.id != affine,
            site.borrowed,
            (site.active + site.ahead) / max(1, site.slots),
        ),
        default=None,
    )
    return None if best is None else best.id


FIRST_TOKENS = 64.0
"""Tokens of a turn, as long as no turn of its task domain is finished."""


def engine_for(run: Run, trajectory: Trajectory, engines: Sequence[Engine]) -> EngineId | None:
    """Return the engine among `engines` on which the trajectory's turn should finish
    first; None without engines.
    """
    tokens, cached = _tokens(run, trajectory), costs.cached_by_engine(run, trajectory)
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
    tokens, cached = _tokens(run, trajectory), costs.cached_by_engine(run, trajectory)
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
        price = costs.sampling_price(run, engine)
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
