"""Estimate what an engine's steps cost from the turns that it has finished, for engines
that do not measure themselves, and what the turns of a task domain cost there (RollArt
§9: "per-domain prefill/decode latency").

A turn takes a step for each token that it samples, and the time in which prompts are
computed while it runs:

    seconds = tokens · (fixed + batch · (sequence + context · per_context))
              + prompts · prompt

`batch` is the mean number of turns on the engine meanwhile, `context` the mean length
of their contexts, and `prompts` the number of prompt tokens computed. The four prices
are the three of `mechanisms/lengths/work.Rate` and the price of a prompt token. They
are fitted without negative prices, by relative errors, to the newest turns of each
batch size, so that a fleet that is full most of the time still knows its empty steps.

- *Outliers* (a server that paused, a request that waited inside it) have no weight:
  Tukey's biweight over the median error, iterated.
- *Few turns, or turns that are all alike*, do not determine four prices. A prior with
  the usual proportions, scaled to the median turn, decides what the turns leave open:
  it weighs as much as one turn would if the turns had no error.

Invariants: an estimate is a function of the kept turns, whatever their order within a
batch size; if all turns take k times as long, so do the estimated steps.

A step of an engine computes tokens of many turns, so a turn's seconds show the cost of
its batch, not of its domain. Prices are therefore learned by kind of engine, from the
turns of all domains, and tokens by domain. Together they give the seconds of each
domain on each kind, also where none of its turns has run:

    of a prompt's token   prompt
    of an output token    fixed / batch + sequence + context · per_context

Earlier steps are forgotten exponentially. After a change, the first step that follows
makes up half of a profile, and the first three steps make up seven eighths.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt

from rollweave.schema.base import Struct
from rollweave.schema.events import StepTime

KEPT = 32
"""Maximum number of turns that are kept for each batch size (by powers of two)."""

KEPT_OF_DOMAINS = 256
"""The same where task domains are compared: the turns of domains differ, and fewer of
the newest turns might all belong to one domain.
"""

FIRST_TURNS = 16
"""Number of turns before the first estimate: the median of fewer turns can be an
outlier.
"""

ROUNDS = 8
"""Number of times that the weights of turns are computed: afterwards they hardly
change.
"""

BIWEIGHT = 4.685
"""Error, in standard deviations, from which a turn has no weight: 95 % efficiency for
normal errors (Tukey).
"""

MIN_ERROR = 0.01
"""Minimum standard deviation assumed for relative errors: a turn's time is no more
precise than the controller's notice of the turn's end.
"""

PRIOR_ERROR = 2.0
"""Standard deviation assumed for the prior's proportions, relative to the proportions.
"""

LEAST_SHARE = 1e-3
"""Minimum fixed price as a share of the prior's, so that no step takes no time."""

REMEMBERED = 0.9
"""Weight of earlier fits in the next one: the proportions of prices, which depend on
the hardware, are known from about the last ten fits.
"""


class TurnTime(Struct, frozen=True, kw_only=True):
    """A finished turn: it sampled `output_tokens` in `seconds`, during which the engine
    computed `prompt_tokens` of prompts, this turn's and others', and had on average
    `batch` turns with `context` tokens each.
    """

    seconds: float
    output_tokens: int
    prompt_tokens: int
    batch: float
    context: float


class TurnTimes(msgspec.Struct):
    """The newest turns by power of two of their batch, and the number of all turns."""

    kept: dict[int, list[TurnTime]] = {}
    count: int = 0
    estimated_at: int = 0  # the number of turns when the last estimate was made

    def add(self, turn: TurnTime, *, most: int = KEPT) -> bool:
        """Add a turn, and keep at most `most` turns for each batch size. Return whether
        a new estimate is due, because half of the kept turns are new.
        """
        newest = self.kept.setdefault(int(turn.batch).bit_length(), [])
        newest.append(turn)
        if len(newest) > most:
            del newest[0]
        self.count += 1
        kept = sum(len(turns) for turns in self.kept.values())
        needed = max(FIRST_TURNS, kept / 2)
        return self.count - self.estimated_at >= needed

    @property
    def turns(self) -> list[TurnTime]:
        return [turn for batch in sorted(self.kept) for turn in self.kept[batch]]


class Prices(Struct, frozen=True, kw_only=True):
    """The seconds of a step, of a sequence in it, of a token of the sequences'
    contexts, and of a token of a prompt.
    """

    fixed_s: float
    sequence_s: float
    context_s: float
    prompt_s: float

    @classmethod
    def of(cls, prices: Iterable[float]) -> Self:
        """Return the prices in their order."""
        return cls(**dict(zip(cls.__struct_fields__, map(float, prices), strict=True)))

    @property
    def as_tuple(self) -> tuple[float, float, float, float]:
        return self.fixed_s, self.sequence_s, self.context_s, self.prompt_s

    def step_s(self, batch: float, context: float) -> float:
        return self.fixed_s + batch * (self.sequence_s + context * self.context_s)


PRIOR = Prices(fixed_s=1.0, sequence_s=1.0 / 32, context_s=1.0 / (1 << 17), prompt_s=1.0 / 32)
"""Usual proportions: a batch of 32 takes twice as long as one sequence, and so do
contexts of 131,072 tokens, whose KV is then as large as the weights (16 GB at 128 KB a
token). A token of a prompt takes as long as a token of another sequence.
"""


class Fit(Struct, frozen=True, kw_only=True):
    """Estimated prices, in the order of `Prices`, and the covariance of their errors,
    given the turns and the prior. The covariance is large for prices that the turns do
    not determine.
    """

    prices: Prices
    covariance: tuple[tuple[float, ...], ...]

    def times(self, factor: float) -> "Fit":
        """Return the fit for engines that take this many times as long."""
        return Fit(
            prices=Prices.of(factor * price for price in self.prices.as_tuple),
            covariance=tuple(tuple(factor**2 * value for value in row) for row in self.covariance),
        )


def estimate(turns: Sequence[TurnTime]) -> Prices:
    """Return the prices that fit these turns best. Raises ValueError without turns."""
    return fit(turns).prices


def fit(turns: Sequence[TurnTime], *, weight: float = 1.0) -> Fit:
    """Return the prices that fit these turns best, with their uncertainty, if the prior
    weighs as much as `weight` turns. Raises ValueError without turns.
    """
    if not turns:
        raise ValueError("turns must have at least one finished turn, got none")
    rows = np.array([_features(turn) for turn in turns])
    rows /= np.array([turn.seconds for turn in turns])[:, None]
    prior = np.array(PRIOR.as_tuple)
    prior /= float(np.median(rows @ prior))
    columns = rows * prior
    shares = np.ones(len(prior))  # of the prior's prices
    for _ in range(ROUNDS):
        errors = columns @ shares - 1
        deviation = max(MIN_ERROR, 1.4826 * float(np.median(np.abs(errors))))
        weights = np.clip(1 - np.square(errors / (BIWEIGHT * deviation)), 0, None) ** 2
        ridge = weight * (deviation / PRIOR_ERROR) ** 2
        shares = non_negative_ridge(columns, weights, ridge)
    shares[0] = max(shares[0], LEAST_SHARE)
    known = (columns.T * weights) @ columns + ridge * np.eye(len(prior))
    covariance = deviation**2 * np.linalg.inv(known) * np.outer(prior, prior)
    return Fit(
        prices=Prices.of(shares * prior),
        covariance=tuple(tuple(float(value) for value in row) for row in covariance),
    )


def renewed(former: Fit, newer: Fit) -> Fit:
    """Return the prices by both fits, each weighted by its certainty; the former fit
    has lost some of its certainty since. So prices that the newer turns do not show are
    kept, such as the price of prompts on engines that now run only long outputs. This
    is least squares with exponential forgetting.
    """
    old, new = np.linalg.inv(former.covariance) * REMEMBERED, np.linalg.inv(newer.covariance)
    covariance = np.linalg.inv(old + new)
    both = covariance @ (old @ former.prices.as_tuple + new @ newer.prices.as_tuple)
    least = LEAST_SHARE * min(former.prices.fixed_s, newer.prices.fixed_s)
    return Fit(
        prices=Prices.of((max(both[0], least), *(max(0.0, price) for price in both[1:]))),
        covariance=tuple(tuple(float(value) for value in row) for row in covariance),
    )


def _features(turn: TurnTime) -> tuple[float, float, float, float]:
    sequences = turn.output_tokens * turn.batch
    return turn.output_tokens, sequences, sequences * turn.context, turn.prompt_tokens


def non_negative_ridge(
    columns: npt.NDArray[np.float64], weights: npt.NDArray[np.float64], ridge: float
) -> npt.NDArray[np.float64]:
    """Return the non-negative x with the least Σ weights · (columns · x − 1)² +
    ridge · Σ (x − 1)², for a `ridge` above 0.
    """
    weighted = columns.T * weights
    size = columns.shape[1]
    matrix = weighted @ columns + ridge * np.eye(size)
    target = weighted.sum(axis=1) + ridge
    best, least = np.zeros(size), np.inf
    # The best x is the unconstrained solution for the columns that it uses, so all
    # choices of columns are tried, beginning with all columns: if that solution is not
    # negative, it is the best.
    for used in itertools.product((True, False), repeat=size):
        chosen = list(used)
        x = np.zeros(size)
        x[chosen] = np.linalg.solve(matrix[np.ix_(chosen, chosen)], target[chosen])
        error = float(x @ matrix @ x - 2 * target @ x)
        if (x >= 0).all() and error < least:
            best, least = x, error
            if all(used):
                break
    return best


def step_times(turns: TurnTimes, *, slots: int) -> tuple[tuple[StepTime, ...], float]:
    """Return the estimated profile of an engine, in the form that an engine which
    measures itself would report, and the seconds of a token of a prompt. The profile
    has steps of 1, 2, 4, … sequences up to `slots`, at half the mean context and at
    twice the mean context.
    """
    kept = turns.turns
    prices = estimate(kept)
    context = float(np.median([turn.context for turn in kept]))
    contexts = sorted({max(1, round(context / 2)), max(2, round(2 * context))})
    batches = sorted({*(1 << power for power in range(slots.bit_length())), slots})
    profile = tuple(
        StepTime(batch=batch, context=length, seconds=prices.step_s(batch, length))
        for length in contexts
        for batch in batches
    )
    return profile, prices.prompt_s


KEPT_SHARE = 0.5
"""Weight of everything learned before a step, relative to the step's own turns."""


class DomainProfile(msgspec.Struct):
    """The turns of a task domain, summed up: their number, the tokens of prompts that
    were computed for them, the sampled tokens and, summed over the sampled tokens, the
    other turns on the engine and the tokens of the context.
    """

    turns: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    sequences: float = 0.0
    context_tokens: float = 0.0
    turns_in: dict[str, float] = {}  # by pool

    def add(
        self, pool: str, *, prompt: int, output: int, batch: float | None, context: float
    ) -> None:
        """Add a turn that ran in this pool, in a batch of this mean size. A batch of
        None means the mean size of the other turns' batches.
        """
        self.turns_in[pool] = self.turns_in.get(pool, 0.0) + 1
        if batch is None:
            batch = self.sequences / self.output_tokens if self.output_tokens else 1.0
        self.turns += 1
        self.prompt_tokens += prompt
        self.output_tokens += output
        self.sequences += output * batch
        self.context_tokens += output * context

    def forget(self) -> None:
        """Give less weight to what is known: a step is over."""
        self.turns *= KEPT_SHARE
        self.prompt_tokens *= KEPT_SHARE
        self.output_tokens *= KEPT_SHARE
        self.sequences *= KEPT_SHARE
        self.context_tokens *= KEPT_SHARE
        self.turns_in = {pool: KEPT_SHARE * turns for pool, turns in self.turns_in.items()}

    @property
    def context(self) -> float:
        """Mean tokens of context at an output token."""
        return self.context_tokens / self.output_tokens if self.output_tokens else 0.0


class Worked(msgspec.Struct):
    """The seconds for which engines of a kind worked on finished turns (a turn's
    seconds, divided by the number of turns in its batch), and the amounts of work in
    the same turns, one for each price.
    """

    seconds: float = 0.0
    amounts: list[float] = msgspec.field(default_factory=lambda: [0.0] * 4)

    def add(self, time: TurnTime, *, prompt: int, context: float) -> None:
        """Add a turn, for which `prompt` tokens of a prompt were computed."""
        output = time.output_tokens
        self.seconds += time.seconds / time.batch
        more = (output / time.batch, output, output * context, prompt)
        self.amounts = [old + new for old, new in zip(self.amounts, more, strict=True)]

    def forget(self) -> None:
        """Give less weight to what is known: a step is over."""
        self.seconds *= KEPT_SHARE
        self.amounts = [KEPT_SHARE * amount for amount in self.amounts]

    def scaled(self, fit: Fit) -> Fit:
        """Return the fit with prices that sum up to the seconds worked. Prices that are
        best for single turns may leave out a part of the engine's whole work.
        """
        expected = sum(
            price * amount for price, amount in zip(fit.prices.as_tuple, self.amounts, strict=True)
        )
        return fit.times(self.seconds / expected) if expected and self.seconds else fit


class Cost(Struct, frozen=True, kw_only=True):
    """Seconds, and the standard deviation of their error."""

    seconds: float
    error_s: float


class TokenCosts(Struct, frozen=True, kw_only=True):
    """The cost of a token of a prompt, and of an output token."""

    prompt: Cost
    output: Cost


def cost(profile: DomainProfile, fit: Fit, *, batch: float) -> Cost:
    """Return the seconds for which an engine with these prices, and batches of this
    size, works for the turns of the profile.
    """
    return _cost(
        fit,
        (
            profile.output_tokens / batch,
            profile.output_tokens,
            profile.context_tokens,
            profile.prompt_tokens,
        ),
    )


def token_costs(profile: DomainProfile, fit: Fit, *, batch: float) -> TokenCosts:
    """Return what the tokens of the profile's turns cost on such an engine."""
    return TokenCosts(
        prompt=_cost(fit, (0.0, 0.0, 0.0, 1.0)),
        output=_cost(fit, (1 / batch, 1.0, profile.context, 0.0)),
    )


def _cost(fit: Fit, amounts: tuple[float, float, float, float]) -> Cost:
    prices = fit.prices.as_tuple
    variance = sum(
        one * other * covariance
        for one, row in zip(amounts, fit.covariance, strict=True)
        for other, covariance in zip(amounts, row, strict=True)
    )
    return Cost(
        seconds=sum(price * amount for price, amount in zip(prices, amounts, strict=True)),
        error_s=math.sqrt(max(0.0, variance)),
    )


def together(costs: Sequence[Cost]) -> Cost:
    """Return the cost of work that engines divide so that all are done at the same
    time, from the cost of all the work on each engine alone. Errors are assumed to be
    correlated.
    """
    seconds = 1 / sum(1 / alone.seconds for alone in costs)
    return Cost(
        seconds=seconds,
        error_s=seconds * sum(alone.error_s / alone.seconds**2 for alone in costs) * seconds,
    )
