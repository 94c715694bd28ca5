"""Which engine runs this turn (ProRL §3.3.2): cache affinity first, then least load, else wait.

A trajectory's next turn finds its prefix in the cache of the engine that ran the turn before, so affinity saves the prefill.
It is given up when that engine has no free slot: waiting would cost more than recomputing.
"""

from collections.abc import Sequence

from rollweave.schema.base import EngineId, Noun


class EngineLoad(Noun, frozen=True, kw_only=True):
    """An engine that may take a turn: `active` turns of at most `slots`."""

    id: EngineId
    active: int
    slots: int


def choose(engines: Sequence[EngineLoad], *, affine: EngineId | None, avoid: Sequence[EngineId] = ()) -> EngineId | None:
    """The engine for a turn, or None to keep it waiting.

    `affine` ran the trajectory's last turn. `avoid` failed this very turn before: they are a last resort.
    """
    free = [engine for engine in engines if engine.active < engine.slots]
    if not free:
        return None
    wanted = [engine for engine in free if engine.id not in avoid] or free
    for engine in wanted:
        if engine.id == affine:
            return engine.id
    return min(wanted, key=lambda engine: engine.active / engine.slots).id
