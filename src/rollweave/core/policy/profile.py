"""Profiles of task domains: the tokens that an engine computes for their turns, and the
seconds that these tokens take on each kind of engine (RollArt §9: "per-domain
prefill/decode latency").

A step of an engine computes tokens of many turns, so a turn's seconds show the cost of
its batch, not of its domain. Prices are therefore learned by kind of engine, from the
turns of all domains (`core/policy/turn_times`), and tokens by domain. Together they
give the seconds of each domain on each kind, also where none of its turns has run:

    of a prompt's token   prompt
    of an output token    fixed / batch + sequence + context · per_context

Earlier steps are forgotten exponentially. After a change, the first step that follows
makes up half of a profile, and the first three steps make up seven eighths.
"""

import math
from collections.abc import Sequence

import msgspec

from rollweave.core.policy.turn_times import Fit, TurnTime
from rollweave.schema.base import Struct

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
