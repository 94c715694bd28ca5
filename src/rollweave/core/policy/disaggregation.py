"""Decide for each turn whether its prompt is computed at a prefill engine, from which
its KV moves to the engine that samples, or at the engine that samples (RollArt §6.3,
§7.4). A prompt that is computed next to other turns delays all of them. A prompt that
is computed elsewhere waits for the prompts before it, and for the transfer of its KV.
The choice is the one with the smaller sum of delays, in seconds:

    here    missing · price · (1 + beside)
    there   (ahead + missing there) · price there + missing · move

So a short suffix stays where its prefix is, and a prefill engine that is behind gets
only prompts for which waiting pays.
"""

from collections.abc import Sequence

from rollweave.schema.base import EngineId, Struct
from rollweave.schema.config.engines import BLOCK_TOKENS

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
