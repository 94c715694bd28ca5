"""The time that an engine takes for a group of trajectories, by their work: an
alternative to the cost of eq. 2 that is closer to real engines.

Eq. 2 describes a group by its size and its longest member. Here a step has a fixed
part, a part per sequence, and a part per token of their contexts, and the number of
steps is the largest of three: the steps of the longest member; the steps for all tokens
in batches of `slots`; the steps for which the KV cache suffices, where each token
occupies its context for a step. Batches that shrink as members end, queueing beyond the
slots, and contexts beyond the KV cache are all covered, in closed form.

A group's cost never falls when a member is added, nor when members grow;
`mechanisms/costs/placement` needs this to find the best partition into groups that are
contiguous by length. (A partition that mixes lengths may be better still: work can be
divided more evenly than contiguous groups allow.)
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence

import numpy as np

from rollweave.schema.base import Struct
from rollweave.schema.events import StepTime


class Rate(Struct, frozen=True, kw_only=True):
    """The speed of an engine: a step takes `fixed_s`, `sequence_s` per sequence, and
    `context_s` per token of their contexts.

    It has at most `slots` sequences, and their contexts fit `kv_tokens`.
    """

    fixed_s: float
    sequence_s: float
    context_s: float
    slots: int
    kv_tokens: int

    def seconds(self, *, longest: float, tokens: float, occupied: float) -> float:
        """Return the seconds for a group, from the tokens of its longest member, of all
        members, and the sum over all tokens of the context that each occupies.
        """
        steps = max(longest, tokens / self.slots, occupied / self.kv_tokens)
        return steps * self.fixed_s + tokens * self.sequence_s + occupied * self.context_s


def rate(profile: Sequence[StepTime], *, slots: int, kv_tokens: int) -> Rate:
    """Return the rate that fits measured step times best, by relative errors, without
    negative parts.

    Raises ValueError for a profile without measurements, and for a rate without slots
    or KV.
    """
    if not profile:
        raise ValueError("profile must have at least one measured step, got none")
    if slots < 1 or kv_tokens < 1:
        raise ValueError(f"slots and kv_tokens must be at least 1, got {slots} and {kv_tokens}")
    seconds = np.array([point.seconds for point in profile])
    columns = (
        np.array([(1, point.batch, point.batch * point.context) for point in profile])
        / seconds[:, None]
    )
    best, least = np.zeros(3), np.inf
    # The best non-negative fit is the unconstrained fit of the columns that it uses, so
    # all choices of three columns are tried.
    for used in itertools.product((True, False), repeat=3):
        prices = np.zeros(3)
        prices[list(used)] = np.linalg.lstsq(columns[:, used], np.ones(len(seconds)), rcond=None)[0]
        error = float(np.square(columns @ prices - 1).sum())
        if (prices >= 0).all() and error < least - 1e-9:
            best, least = prices, error
    fixed, sequence, context = (float(price) for price in best)
    return Rate(
        fixed_s=fixed, sequence_s=sequence, context_s=context, slots=slots, kv_tokens=kv_tokens
    )


def occupied(tokens: float, *, context: float, growth: float) -> float:
    """Return the context summed over `tokens` tokens to sample, starting at `context`,
    which grows by `growth` per token.
    """
    return tokens * (context + growth * tokens / 2)


class ByWork:
    """Groups of trajectories by their work: the `Groups` that
    `mechanisms/costs/placement` searches.
    """

    def __init__(self, works: Sequence[tuple[int, int]], rates: Mapping[int, Rate]) -> None:
        """`works` are the tokens to sample and the contexts that they occupy, the
        longest first; `rates` are by parallel degree.

        Raises ValueError for works that are not positive or not in order, and for an
        empty list.
        """
        if not works:
            raise ValueError("works must have at least one trajectory, got none")
        for index, (tokens, held) in enumerate(works):
            if tokens < 1 or held < 0:
                raise ValueError(
                    f"works[{index}] must be at least one token, and no negative "
                    f"context, got {(tokens, held)}"
                )
            if index and tokens > works[index - 1][0]:
                raise ValueError(
                    f"works must descend, got {tokens} tokens after {works[index - 1][0]}"
                )
        self.total = len(works)
        self._lengths = [tokens for tokens, _ in works]
        self._tokens = [0, *itertools.accumulate(tokens for tokens, _ in works)]
        self._held = [0, *itertools.accumulate(held for _, held in works)]
        self._rates = dict(rates)
        self._limits = {degree: self._sums(rate) for degree, rate in rates.items()}

    def _sums(self, rate: Rate) -> tuple[list[float], ...]:
        """Return, by the group's end, the seconds of each of the three needs for groups
        that begin with the list, without the longest member's own steps.
        """
        both = list(zip(self._tokens, self._held, strict=True))
        parts = [tokens * rate.sequence_s + held * rate.context_s for tokens, held in both]
        slots = [
            part + rate.fixed_s * tokens / rate.slots
            for part, (tokens, _) in zip(parts, both, strict=True)
        ]
        cache = [
            part + rate.fixed_s * held / rate.kv_tokens
            for part, (_, held) in zip(parts, both, strict=True)
        ]
        return parts, slots, cache

    def seconds(self, degree: int, start: int, end: int) -> float:
        """See `Groups`."""
        return self._rates[degree].seconds(
            longest=self._lengths[start],
            tokens=self._tokens[end] - self._tokens[start],
            occupied=self._held[end] - self._held[start],
        )

    def reach(self, degree: int, start: int, bound: float) -> tuple[int, float]:
        """See `Groups`.

        Each need bounds the end by one search in its sums; the cost itself corrects
        rounding.
        """
        parts, slots, cache = self._limits[degree]
        alone = bound - self._rates[degree].fixed_s * self._lengths[start]
        end = start
        if alone >= 0:
            ends = (
                bisect_right(sums, sums[start] + room)
                for sums, room in ((parts, alone), (slots, bound), (cache, bound))
            )
            end = max(start, min(ends) - 1)
        while end > start and self.seconds(degree, start, end) > bound:
            end -= 1
        beyond = math.inf
        while end < self.total:
            beyond = self.seconds(degree, start, end + 1)
            if beyond > bound:
                return end, beyond
            end += 1
        return end, math.inf
