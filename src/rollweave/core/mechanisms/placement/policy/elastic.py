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
"""

from collections.abc import Iterable

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
