"""Choose the engine of a turn that is bound to no engine (ProRL §3.3.2), the pool of
engines that serves a task domain, and the engine that computes a turn's prompt.

A trajectory's next turn finds its prefix in the cache of the engine that ran the turn
before, so affinity saves the prefill. `affinity` gives up the prefix if that engine has
no free slot: waiting would cost more than recomputing. A turn without such an engine
goes to the engine with the fewest outstanding tokens per slot, the tokens that engines
hold in KV and read at each step. (ProRL counts all tasks that an engine was ever given:
an engine with long tasks gets as many new tasks as the others, and a new engine gets
all tasks until it has caught up. Here a new engine gets turns until it has as many
tokens as the others have now.) Unresponsive engines are not candidates
(`core/engines`). The other policies are the baselines of Heddle §7: `least_load`
ignores the cache, and `hybrid` prefers the engine with the cached prefix until loads
differ too much. Both measure load in turns.

A task domain names the hardware that suits it (RollArt §5.2): a domain whose prompts
cost most prefers GPUs with much computing power, a domain that mostly samples prefers
memory bandwidth.

A turn's prompt is computed at a prefill engine, from which its KV moves to the engine
that samples, or at the engine that samples (RollArt §6.3, §7.4). A prompt that is
computed next to other turns delays all of them. A prompt that is computed elsewhere
waits for the prompts before it, and for the transfer of its KV. The choice is the one
with the smaller sum of delays, in seconds:

    here    missing · price · (1 + beside)
    there   (ahead + missing there) · price there + missing · move

So a short suffix stays where its prefix is, and a prefill engine that is behind gets
only prompts for which waiting pays.
"""

import math
from collections.abc import Collection, Mapping, Sequence

from rollweave.schema.base import EngineId, Struct
from rollweave.schema.config.engines import BLOCK_TOKENS

SKEW = 32.0
"""Maximum ratio of the greatest to the least load, beyond which `hybrid` uses the least
loaded engine (Heddle §7, Verl*).
"""


class EngineLoad(Struct, frozen=True, kw_only=True):
    """An engine that may take a turn: it has `active` turns and runs at most `slots` of
    them. `lowest` is the lowest rank among the running turns; infinite if no turn takes
    another turn's slot. `tokens` is the total context of the active turns. A `borrowed`
    engine is used where no dedicated engine has room (ROSE §4.3).
    """

    id: EngineId
    active: int
    slots: int
    tokens: int = 0
    lowest: float = -math.inf
    borrowed: bool = False

    def runs(self, rank: float, *, preempts: bool) -> bool:
        """Return whether a turn of this rank would run immediately."""
        return self.active < self.slots or (preempts and rank > self.lowest)


def choose(
    engines: Mapping[EngineId, EngineLoad],
    *,
    affine: EngineId | None,
    avoid: Sequence[EngineId] = (),
    placement: str = "affinity",
    rank: float = 0.0,
    preempts: bool = False,
) -> EngineId | None:
    """Return the engine for a turn, or None to keep it waiting.

    `affine` ran the trajectory's last turn. The engines `avoid` failed this turn
    before: they are a last resort, and borrowed engines, which gave the turn back, are
    used only if there are no others.
    """
    preferred = engines.get(affine) if affine is not None and affine not in avoid else None
    if placement == "least_load" or (placement == "hybrid" and _skewed(engines)):
        preferred = None
    if preferred is not None and preferred.active < preferred.slots:
        return preferred.id  # the usual case, without a look at the others
    others = any(engine.id not in avoid or not engine.borrowed for engine in engines.values())
    free = [
        engine
        for engine in engines.values()
        if engine.active < engine.slots and not (engine.borrowed and engine.id in avoid and others)
    ]
    if not free and preempts:
        return _to_preempt(engines, preferred, avoid, rank)
    if not free:
        return None
    wanted = [engine for engine in free if engine.id not in avoid] if avoid else free
    if not wanted and any(engine.id == affine for engine in free):
        return affine
    load = _tokens if placement == "affinity" else _turns
    return min(wanted or free, key=lambda engine: (engine.borrowed, load(engine))).id


def _to_preempt(
    engines: Mapping[EngineId, EngineLoad],
    preferred: EngineLoad | None,
    avoid: Sequence[EngineId],
    rank: float,
) -> EngineId | None:
    """Return the engine on which a turn of this rank would preempt another, since every
    slot is taken.
    """
    if preferred is not None and rank > preferred.lowest:
        return preferred.id
    lower = [
        engine for engine in engines.values() if rank > engine.lowest and engine.id not in avoid
    ]
    return min(lower, key=lambda engine: engine.lowest).id if lower else None


def _skewed(engines: Mapping[EngineId, EngineLoad]) -> bool:
    loads = [engine.active for engine in engines.values()]
    return bool(loads) and max(loads) > SKEW * max(1, min(loads))


def _turns(engine: EngineLoad) -> tuple[float, float]:
    return (engine.active / engine.slots, 0.0)


def _tokens(engine: EngineLoad) -> tuple[float, float]:
    return (engine.tokens / engine.slots, engine.active / engine.slots)


def serving_pool(preferred: Sequence[str], live: Collection[str]) -> str | None:
    """Return the first of the `preferred` pools that is `live`, or None, which stands
    for any engine.

    `preferred` are the domain's pool and its fallbacks, in order. A pool is live if one
    of its engines takes turns, or will once it has loaded other weights.
    """
    return next((pool for pool in preferred if pool in live), None)


def next_pool(shares: Mapping[str, float], given: Mapping[str, int]) -> str:
    """Return the pool for the next trajectory of a domain: among the pools with a
    share, the pool that would lack most of its share. `given` are the trajectories that
    the pools have had. At any time, each pool has had its share of the trajectories to
    within one trajectory per pool. Raises ValueError without shares.
    """
    total = 1 + sum(given.get(pool, 0) for pool in shares)
    whole = sum(shares.values())
    return max(shares, key=lambda pool: shares[pool] / whole * total - given.get(pool, 0))


LEAST_TOKENS = 2 * BLOCK_TOKENS
"""Minimum missing tokens of a prompt that is computed elsewhere: KV moves in whole
blocks, and the last block of a context never does.
"""

TRIAL = 32
"""One of this number of turns goes the other way, so that the prices of both ways
remain known.
"""


class PrefillSite(Struct, frozen=True, kw_only=True):
    """A prefill engine that can take a prompt now: it has to compute `ahead` tokens of
    other prompts and `missing` tokens of this prompt, at `price` seconds per token.
    """

    id: EngineId
    ahead: int
    missing: int
    price: float

    @property
    def seconds(self) -> float:
        """Seconds until the prompt is computed."""
        return (self.ahead + self.missing) * self.price


def prefill_site(
    sites: Sequence[PrefillSite],
    *,
    missing: int,
    price: float,
    beside: int,
    move: float,
    trial: bool = False,
) -> EngineId | None:
    """Return the prefill engine that computes the prompt of a turn; None for the engine
    that samples the turn. There, `missing` tokens are not cached, a token costs `price`
    seconds, and `beside` other turns are sampled or wait for their KV. The KV of a
    token moves in `move` seconds. With `trial`, the choice is the other one.
    """
    if missing < LEAST_TOKENS or not sites:
        return None
    best = min(sites, key=lambda site: (site.seconds, site.id))
    here = missing * price * (1 + beside)
    there = best.seconds + missing * move
    return best.id if (there < here) is not trial else None
