"""Choose the engine of a turn that is bound to no engine (ProRL §3.3.2).

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
"""

import math
from collections.abc import Mapping, Sequence

from rollweave.schema.base import EngineId, Struct

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
