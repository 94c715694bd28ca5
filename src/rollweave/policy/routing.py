"""Which engine runs this turn (ProRL §3.3.2): cache affinity first, then least load, else wait.

A trajectory's next turn finds its prefix in the cache of the engine that ran the turn before, so affinity saves the prefill.
It is given up when that engine has no free slot: waiting would cost more than recomputing.
"""

from collections.abc import Mapping, Sequence

from rollweave.schema.base import EngineId, Noun


class EngineLoad(Noun, frozen=True, kw_only=True):
    """An engine that may take a turn: `active` turns of at most `slots`."""

    id: EngineId
    active: int
    slots: int


def choose(
    engines: Mapping[EngineId, EngineLoad], *, affine: EngineId | None, avoid: Sequence[EngineId] = ()
) -> EngineId | None:
    """The engine for a turn, or None to keep it waiting.

    `affine` ran the trajectory's last turn. `avoid` failed this very turn before: they are a last resort.
    """
    home = engines.get(affine) if affine is not None and affine not in avoid else None
    if home is not None and home.active < home.slots:
        return home.id  # the usual case, without a look at the others
    free = [engine for engine in engines.values() if engine.active < engine.slots]
    if not free:
        return None
    wanted = [engine for engine in free if engine.id not in avoid] if avoid else free
    if not wanted:
        return affine if any(engine.id == affine for engine in free) else _least(free)
    return _least(wanted)


def _least(engines: Sequence[EngineLoad]) -> EngineId:
    return min(engines, key=lambda engine: engine.active / engine.slots).id
