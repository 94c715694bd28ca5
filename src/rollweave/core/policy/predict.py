"""Predict how many more tokens a trajectory will sample (Heddle §4.1). A regressor
learns from ended trajectories and is queried at each turn.

A trajectory's context is encoded as a row of `WIDTH` finite numbers, which depend only
on the context and its domain's slot. Columns, in order: `NUMBERS` about lengths and
time, as logarithms if their tail is long and plain if the remaining length grows with
them (the target is the plain length); one column per domain slot, which is 1 for the
context's domain; `PLAN_BUCKETS` columns for the text of the first turn's plan, each
with the share of the plan's tokens whose ids hash to this bucket; `PROMPT_BUCKETS`
columns for the text of the first turn's prompt in the same way. Beside the row, a
context may have a state: what the policy itself computed last (`LengthContext.state`).

Invariants: a prediction is a finite number of at least 1, whatever the regressor does;
a failed prediction is counted, and running statistics replace it. A failed fit is
counted, and the previous regressor stays. Memory is bounded, even for attempts that are
queried and never observed. The same calls give the same answers.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollweave.schema.serving import STATE_WIDTH
from rollweave.schema.training import PROMPT_TOKENS, LengthContext

LOG_PROMPT, TURN, OUTPUT, SIBLING_MEAN = 0, 1, 2, 3
"""Columns that simple regressors read: log(1 + prompt tokens); turns, sampled tokens
and the siblings' mean without a transformation.
"""

NUMBERS = 25

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

PROMPT_BUCKETS = 32
"""Number of hash buckets for a prompt: the prompts of a task differ in few words."""

PROMPT = NUMBERS + DOMAINS + PLAN_BUCKETS
"""The first column of the prompt's text."""

WIDTH = PROMPT + PROMPT_BUCKETS

_HASH = 2654435761
"""Knuth's multiplier, 2³² over the golden ratio: neighboring ids fall into different
buckets.
"""

Table = NDArray[np.float32]
State = NDArray[np.float16]

NO_STATE: State = np.zeros(0, np.float16)


class Rows(NamedTuple):
    """The input of regressors for n contexts: `table` of shape (n, WIDTH), the prompts
    and plans themselves for regressors that read tokens, and the states, each of
    `STATE_WIDTH` finite numbers, or empty.
    """

    table: Table
    prompts: Sequence[tuple[int, ...]]
    plans: Sequence[tuple[int, ...]]
    states: Sequence[State]


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
        float(context.answered),
    ]
    domains = [0.0] * DOMAINS
    if slot is not None:
        domains[slot] = 1.0
    plan = _buckets(context.plan[:PLAN_TOKENS], PLAN_BUCKETS)
    prompt = _buckets(context.prompt[-PROMPT_TOKENS:], PROMPT_BUCKETS)
    row = np.array([*numbers, *domains, *plan, *prompt])
    with np.errstate(over="ignore"):
        return _finite(row.astype(np.float32))


def state_of(context: LengthContext) -> State:
    """Return the context's state, which is empty unless it has `STATE_WIDTH` values."""
    if len(context.state) != STATE_WIDTH:
        return NO_STATE
    with np.errstate(over="ignore"):
        return _finite(np.array(context.state).astype(np.float16))


def _finite(values: NDArray[Any]) -> NDArray[Any]:
    finite = np.isfinite(values)
    return values if finite.all() else np.where(finite, values, values.dtype.type(0))


def _log(value: float) -> float:
    return math.log1p(value) if value > 0 else 0.0


def _buckets(text: Sequence[int], count: int) -> Sequence[float]:
    shares, share = [0.0] * count, 1 / max(1, len(text))
    for token in text:
        shares[(token * _HASH % (1 << 32)) * count >> 32] += share
    return shares


Lengths = NDArray[np.float64]

WINDOW = 1 << 17
"""Maximum number of pairs to learn from, the newest: two batches of 8,192 trajectories
of eight turns. A window below one batch would hold only the trajectories of a batch
that end last, which are the longest: with a quarter of a batch, predictions were twice
the truth.
"""

OPEN_ATTEMPTS = 16_384
"""Maximum number of attempts that are remembered before they end, twice the largest
batch; beyond this number the oldest attempt is forgotten.
"""

ATTEMPT_CONTEXTS = 128
"""Maximum number of contexts remembered per attempt, the newest: more turns than a
trajectory of our families takes.
"""

MIN_PAIRS = 64
"""Minimum number of pairs for the first fit: two for each three columns of a row, most
of which are small shares of texts.
"""

PRIOR_TOKENS = 512.0
"""Predicted tokens without any data. Any constant will do: a prediction that is equal
for all trajectories changes no order.
"""


class Regressor(Protocol):
    """Learns the remaining tokens of n contexts. `fit` is called once, before
    `predict`; both may raise anything.

    The target is the number of tokens itself, not its logarithm: errors at the long end
    cost time, and there linear models of the logarithm were measured to be far off,
    with down to a third of the correlation, because `log(1 + 0)` of ended trajectories
    is an outlier to them. Tree regressors did equally well with both targets.
    """

    def fit(self, rows: Rows, remaining: Lengths, /) -> None:
        """Learn from n rows and their remaining tokens, shape (n,)."""

    def predict(self, rows: Rows, /) -> Lengths:
        """Return the remaining tokens of n rows, shape (n,)."""


class Question(NamedTuple):
    """A remembered context without its state, its row, and its state."""

    context: LengthContext
    row: Table
    state: State


class ProgressivePredictor:
    """Predicts and learns continually. `make` returns a fresh regressor for every
    fit.
    """

    def __init__(
        self,
        make: Callable[[], Regressor],
        *,
        window: int = WINDOW,
        open_attempts: int = OPEN_ATTEMPTS,
    ) -> None:
        self._make, self._window, self._open_attempts = make, window, open_attempts
        self._regressor: Regressor | None = None
        self._open: OrderedDict[Hashable, deque[Question]] = OrderedDict()
        self._texts: OrderedDict[tuple[int, ...], tuple[int, ...]] = OrderedDict()
        self._harvest: deque[tuple[Question, int]] = deque()
        # remaining tokens and pairs of the harvest, by domain
        self._sums: dict[str, tuple[int, int]] = {}
        self._slots: dict[str, int] = {}
        self.fits = 0
        self.failed_fits = 0
        self.failed_predictions = 0

    @property
    def pairs(self) -> int:
        """The number of pairs that the next fit learns from."""
        return len(self._harvest)

    @property
    def open(self) -> int:
        """The number of attempts that may yet be observed."""
        return len(self._open)

    def predict(self, key: Hashable, context: LengthContext) -> float:
        """Return the remaining tokens of the attempt `key`, at least 1."""
        return self.estimate([self.remember(key, context)])[0]

    def remember(self, key: Hashable, context: LengthContext) -> Question:
        """Remember the context until the attempt is observed.

        `estimate` then answers the question, together with other waiting questions.
        """
        questions = self._open.get(key)
        if questions is None:
            if len(self._open) >= self._open_attempts:
                self._open.popitem(last=False)
            questions = self._open[key] = deque(maxlen=ATTEMPT_CONTEXTS)
        kept = msgspec.structs.replace(
            context, plan=self._once(context.plan), prompt=self._once(context.prompt), state=()
        )
        question = Question(kept, row(context, self._slot(context.domain)), state_of(context))
        questions.append(question)
        return question

    def _once(self, text: tuple[int, ...]) -> tuple[int, ...]:
        """Return one object for equal texts, of all turns and of all members of a
        group: those off the wire would be the bulk of memory.
        """
        if text not in self._texts and len(self._texts) >= 2 * self._open_attempts:
            self._texts.popitem(last=False)
        return self._texts.setdefault(text, text)

    def estimate(self, questions: Sequence[Question]) -> list[float]:
        """Return the remaining tokens for each question, at least 1."""
        if not questions:
            return []
        if self._regressor is None:
            return [self._usual(question.context) for question in questions]
        try:
            predicted = self._regressor.predict(_rows(questions))
            if predicted.shape != (len(questions),):
                raise ValueError(
                    f"a regressor must give one number for each of {len(questions)} "
                    f"rows, got {predicted.shape}"
                )
            values: list[float] = predicted.tolist()
        except Exception:  # whatever a regressor does, the run continues
            values = [math.nan] * len(questions)
        return [
            max(1.0, value) if math.isfinite(value) else self._replaced(question.context)
            for question, value in zip(questions, values, strict=True)
        ]

    def observe(self, key: Hashable, output_tokens: int | None) -> None:
        """Record that the attempt ended after `output_tokens` sampled tokens; None
        discards an attempt that was cut off.
        """
        questions = self._open.pop(key, None)
        if questions is None or output_tokens is None:
            return
        for question in questions:
            if len(self._harvest) >= self._window:
                former, tokens = self._harvest.popleft()
                self._count(former.context.domain, -tokens, -1)
            remaining = max(0, output_tokens - question.context.output_tokens)
            self._harvest.append((question, remaining))
            self._count(question.context.domain, remaining, 1)

    def fit(self) -> None:
        """Fit a new regressor, if there are at least `MIN_PAIRS` pairs."""
        if len(self._harvest) < MIN_PAIRS:
            return
        rows = _rows([question for question, _ in self._harvest])
        remaining = np.array([tokens for _, tokens in self._harvest], dtype=np.float64)
        try:
            regressor = self._make()
            regressor.fit(rows, remaining)
        except Exception:  # as above
            self.failed_fits += 1
        else:
            self._regressor = regressor
            self.fits += 1

    def _slot(self, domain: str) -> int | None:
        slot = self._slots.get(domain)
        if slot is None and len(self._slots) < DOMAINS:
            slot = self._slots[domain] = len(self._slots)
        return slot

    def _replaced(self, context: LengthContext) -> float:
        self.failed_predictions += 1
        return self._usual(context)

    def _usual(self, context: LengthContext) -> float:
        """Return the mean of the attempt's siblings, else of its domain, else a
        constant.
        """
        if context.siblings > 0:
            left = context.sibling_mean - context.output_tokens
            return max(1.0, left) if math.isfinite(left) else PRIOR_TOKENS
        tokens, count = self._sums.get(context.domain, (0, 0))
        return max(1.0, tokens / count) if count else PRIOR_TOKENS

    def _count(self, domain: str, tokens: int, pairs: int) -> None:
        former_tokens, former_pairs = self._sums.pop(domain, (0, 0))
        if former_pairs + pairs:
            self._sums[domain] = (former_tokens + tokens, former_pairs + pairs)


def _rows(questions: Sequence[Question]) -> Rows:
    return Rows(
        np.stack([question.row for question in questions]),
        [question.context.prompt for question in questions],
        [question.context.plan for question in questions],
        [question.state for question in questions],
    )
