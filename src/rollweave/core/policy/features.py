"""Encode a trajectory's context as a row of numbers, for regressors of its remaining
length (Heddle §4.1).

Invariants: a row has `WIDTH` finite numbers for any context, and depends only on the
context and its domain's slot. Columns, in order: `NUMBERS` about lengths and time, as
logarithms if their tail is long and plain if the remaining length grows with them (the
target is the plain length); one column per domain slot, which is 1 for the context's
domain; `PLAN_BUCKETS` columns for the text of the first turn's plan, each with the
share of the plan's tokens whose ids hash to this bucket.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollweave.schema.prediction import LengthContext

LOG_PROMPT, TURN, OUTPUT, SIBLING_MEAN = 0, 1, 2, 3
"""Columns that simple regressors read: log(1 + prompt tokens); turns, sampled tokens
and the siblings' mean without a transformation.
"""

NUMBERS = 24

DOMAINS = 8
"""Number of slots for task domains. Later domains share the row without a domain, and
what all domains have in common.
"""

PLAN_BUCKETS = 32
"""Number of hash buckets for a plan: enough to distinguish a few kinds of plans, and
few enough to learn from hundreds of trajectories.
"""

PLAN_TOKENS = 256
"""Maximum number of a plan's tokens that are read: an agent states its intentions
first.
"""

WIDTH = NUMBERS + DOMAINS + PLAN_BUCKETS

_HASH = 2654435761
"""Knuth's multiplier, 2³² over the golden ratio: neighboring ids fall into different
buckets.
"""

_NO_PLAN = (0.0,) * PLAN_BUCKETS

Table = NDArray[np.float32]


class Rows(NamedTuple):
    """The input of regressors for n contexts: `table` of shape (n, WIDTH), and the
    plans themselves for regressors that read tokens.
    """

    table: Table
    plans: Sequence[tuple[int, ...]]


def row(context: LengthContext, slot: int | None) -> Table:
    """Return the context as `WIDTH` numbers.

    `slot` is the slot of its domain, or None if all slots are taken.
    """
    turn, output = context.turn, context.output_tokens
    mean = output / turn if turn > 0 else 0.0
    known = context.siblings > 0
    sibling_mean, longest = (context.sibling_mean, context.sibling_longest) if known else (0.0, 0)
    mean_left, longest_left = max(0.0, sibling_mean - output), max(0, longest - output)
    numbers = [
        _log(context.prompt_tokens),
        turn,
        output,
        sibling_mean,
        longest,
        mean_left,
        longest_left,
        context.last_output_tokens,
        mean,
        mean / (1 + turn),
        output / (1 + turn),
        context.reward,
        float(known),
        _log(turn),
        _log(output),
        _log(context.last_output_tokens),
        _log(mean),
        _log(context.observation_tokens),
        _log(context.tool_s),
        _log(context.siblings),
        _log(sibling_mean),
        _log(longest),
        _log(mean_left),
        _log(longest_left),
    ]
    domains = [0.0] * DOMAINS
    if slot is not None:
        domains[slot] = 1.0
    row = np.array([*numbers, *domains, *_buckets(context.plan)])
    with np.errstate(over="ignore"):
        narrow = row.astype(np.float32)
    return (
        narrow
        if np.isfinite(narrow).all()
        else np.where(np.isfinite(narrow), narrow, np.float32(0.0))
    )


def _log(value: float) -> float:
    return math.log1p(value) if value > 0 else 0.0


def _buckets(plan: Sequence[int]) -> Sequence[float]:
    read = plan[:PLAN_TOKENS]
    if not read:
        return _NO_PLAN
    shares, share = [0.0] * PLAN_BUCKETS, 1 / len(read)
    for token in read:
        shares[(token * _HASH % (1 << 32)) * PLAN_BUCKETS >> 32] += share
    return shares
