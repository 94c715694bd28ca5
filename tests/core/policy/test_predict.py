"""The predictor against a slow reference, with regressors that fail in every way, and
its measures against their sentences.
"""

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.core.policy.predict import (
    ATTEMPT_CONTEXTS,
    DOMAINS,
    LOG_PROMPT,
    MIN_PAIRS,
    NUMBERS,
    OUTPUT,
    PLAN_BUCKETS,
    PLAN_TOKENS,
    PRIOR_TOKENS,
    PROMPT,
    PROMPT_BUCKETS,
    SIBLING_MEAN,
    TURN,
    WIDTH,
    Lengths,
    ProgressivePredictor,
    Rows,
    row,
    state_of,
)
from rollweave.schema.serving import STATE_WIDTH
from rollweave.schema.training import PROMPT_TOKENS, LengthContext
from tests.support.properties import examples

anything = st.floats(allow_nan=True, allow_infinity=True)
count = st.integers(0, 2**40)
contexts = st.builds(
    LengthContext,
    domain=st.text(max_size=3),
    prompt_tokens=count,
    turn=st.integers(0, 1000),
    output_tokens=count,
    last_output_tokens=count,
    observation_tokens=count,
    tool_s=anything,
    siblings=st.integers(0, 64),
    sibling_mean=anything,
    sibling_longest=count,
    reward=anything,
    plan=st.lists(st.integers(0, 2**32), max_size=300).map(tuple),
    prompt=st.lists(st.integers(0, 2**32), max_size=300).map(tuple),
    state=st.lists(anything, min_size=STATE_WIDTH, max_size=STATE_WIDTH).map(tuple) | st.just(()),
)


def full_context(**changes: object) -> LengthContext:
    values: dict[str, object] = {
        "domain": "a",
        "prompt_tokens": 100,
        "turn": 2,
        "output_tokens": 60,
        "last_output_tokens": 20,
        "observation_tokens": 7,
        "tool_s": 0.5,
        "siblings": 3,
        "sibling_mean": 90.0,
        "sibling_longest": 120,
    }
    return LengthContext(**{**values, **changes})  # type: ignore[arg-type]


@given(context=contexts, slot=st.none() | st.integers(0, DOMAINS - 1))
def test_a_row_is_finite_and_the_same_for_the_same_context(
    context: LengthContext, slot: int | None
) -> None:
    values = row(context, slot)
    assert values.shape == (WIDTH,)
    assert np.isfinite(values).all()
    assert (values == row(context, slot)).all()
    domains = values[NUMBERS : NUMBERS + DOMAINS]
    assert domains.tolist() == [float(index == slot) for index in range(DOMAINS)]


@given(context=contexts)
def test_a_state_is_finite_and_in_float16_or_empty(context: LengthContext) -> None:
    state = state_of(context)
    assert (state.dtype, len(state)) == (np.float16, len(context.state))
    expected = [
        value if math.isfinite(value) and abs(value) < 65519 else 0.0 for value in context.state
    ]
    assert state.tolist() == pytest.approx(expected, rel=1e-3, abs=1e-7)


@pytest.mark.parametrize("width", [1, STATE_WIDTH - 1, STATE_WIDTH + 1])
def test_a_state_of_another_width_is_none(width: int) -> None:
    assert len(state_of(full_context(state=(1.0,) * width))) == 0


@given(
    plan=st.lists(st.integers(0, 200_000), max_size=2 * PLAN_TOKENS),
    prompt=st.lists(st.integers(0, 200_000), max_size=2 * PROMPT_TOKENS),
)
def test_texts_are_the_shares_of_their_tokens_in_each_bucket(
    plan: list[int], prompt: list[int]
) -> None:
    """Of a plan the first tokens count, of a prompt the last ones."""
    values = row(full_context(plan=tuple(plan), prompt=tuple(prompt)), 0)
    for first, read, count in (
        (NUMBERS + DOMAINS, plan[:PLAN_TOKENS], PLAN_BUCKETS),
        (PROMPT, prompt[-PROMPT_TOKENS:], PROMPT_BUCKETS),
    ):
        slow = [0.0] * count
        for token in read:
            slow[int((token * 2654435761) % 2**32 / 2**32 * count)] += 1 / len(read)
        assert values[first : first + count].tolist() == pytest.approx(slow, abs=1e-6)


def test_named_columns_have_their_values() -> None:
    values = row(full_context(), None)
    assert values[LOG_PROMPT] == pytest.approx(math.log(101))
    assert (values[TURN], values[OUTPUT], values[SIBLING_MEAN]) == (2, 60, 90)
    assert (values[NUMBERS:] == 0).all()


def test_numbers_are_lengths_differences_to_siblings_and_logarithms() -> None:
    """A trajectory of 2 turns and 60 tokens, whose siblings took 90 on average."""
    numbers = row(full_context(reward=0.25), None)[:NUMBERS].tolist()
    assert numbers[1:13] == pytest.approx(
        [2, 60, 90, 120, 30, 60, 20, 30, 30 / 3, 60 / 3, 0.25, 1.0], rel=1e-6
    )
    logarithms = [numbers[0], *numbers[13:-1]]
    values = [100, 2, 60, 20, 30, 7, 0.5, 3, 90, 120, 30, 60]
    assert [math.expm1(value) for value in logarithms] == pytest.approx(values, rel=1e-5)


def test_one_sibling_is_enough_to_tell() -> None:
    numbers = row(full_context(siblings=1), None)[:NUMBERS].tolist()
    assert (numbers[3], numbers[4], numbers[12]) == (90, 120, 1.0)


def test_a_trajectory_that_is_longer_than_its_siblings_leaves_nothing_of_theirs() -> None:
    numbers = row(full_context(output_tokens=200), None)[:NUMBERS].tolist()
    assert numbers[5:7] == numbers[22:24] == [0.0, 0.0]


def test_before_its_first_turn_a_trajectory_has_no_mean() -> None:
    numbers = row(full_context(turn=0, output_tokens=0, last_output_tokens=0), None)[
        :NUMBERS
    ].tolist()
    assert [numbers[index] for index in (1, 2, 7, 8, 9, 10, 13, 14, 15, 16)] == [0.0] * 10


def test_siblings_count_once_one_has_ended() -> None:
    without_siblings = row(full_context(siblings=0, sibling_mean=0.0, sibling_longest=0), 1)
    assert (
        row(full_context(siblings=0, sibling_mean=33.0, sibling_longest=44), 1) == without_siblings
    ).all()


@pytest.mark.parametrize(
    "field",
    sorted({*LengthContext.__struct_fields__} - {"domain", "siblings", "state"}),
)
def test_every_field_is_in_the_row(field: str) -> None:
    values: dict[str, object] = {"plan": (1, 2, 3), "prompt": (1, 2, 3), "answered": False}
    changed = full_context(**{field: values.get(field, 1)})
    assert (row(full_context(), 0) != row(changed, 0)).any()


def context(
    output: int,
    *,
    domain: str = "a",
    turn: int = 1,
    siblings: int = 0,
    mean: float = 0.0,
    text: tuple[int, ...] = (),
    state: tuple[float, ...] = (),
) -> LengthContext:
    return LengthContext(
        domain=domain,
        prompt_tokens=10,
        turn=turn,
        output_tokens=output,
        last_output_tokens=1,
        observation_tokens=0,
        tool_s=0.0,
        siblings=siblings,
        sibling_mean=mean,
        sibling_longest=int(mean),
        plan=text,
        prompt=text * 2,
        state=state,
    )


class Spy:
    """Keeps what it was fitted to; predicts by `answer`."""

    def __init__(
        self, answer: Callable[[Rows], Lengths] = lambda rows: rows.table[:, 2].astype(np.float64)
    ) -> None:
        self.answer = answer
        self.fitted: list[tuple[Rows, Lengths]] = []

    def fit(self, rows: Rows, remaining: Lengths) -> None:
        self.fitted.append((rows, remaining))

    def predict(self, rows: Rows) -> Lengths:
        return self.answer(rows)


class Unfit:
    """Cannot learn."""

    def fit(self, rows: Rows, remaining: Lengths) -> None:
        raise ArithmeticError("no luck")

    def predict(self, rows: Rows) -> Lengths:
        raise AssertionError("it was never fitted")


def taught(*regressors: object, pairs: int = MIN_PAIRS) -> ProgressivePredictor:
    """A predictor whose fits use these regressors in turn, with pairs of 100 remaining
    tokens each, and the first fit done.
    """
    left = list(regressors)
    predictor = ProgressivePredictor(lambda: left.pop(0))  # type: ignore[return-value, arg-type]
    for number in range(pairs):
        predictor.remember(number, context(0))
        predictor.observe(number, 100)
    predictor.fit()
    return predictor


class Slow:
    """The harvest, obviously: everything is kept, and looked through again each
    time.
    """

    def __init__(self, window: int, open_attempts: int) -> None:
        self.window, self.open_attempts = window, open_attempts
        self.requests: list[tuple[int, LengthContext]] = []
        self.keys: list[int] = []
        self.pairs: list[tuple[LengthContext, int]] = []

    def remember(self, key: int, request: LengthContext) -> None:
        if key not in self.keys:
            self.keys.append(key)
        self.requests.append((key, request))
        for old in self.keys[: max(0, len(self.keys) - self.open_attempts)]:
            self.observe(old, None)

    def observe(self, key: int, total: int | None) -> None:
        if total is not None:
            self.pairs += [
                (request, max(0, total - request.output_tokens))
                for owner, request in self.requests
                if owner == key
            ]
            self.pairs = self.pairs[-self.window :]
        self.requests = [(owner, request) for owner, request in self.requests if owner != key]
        self.keys = [owner for owner in self.keys if owner != key]

    def usual(self, request: LengthContext) -> float:
        if request.siblings:
            return max(1.0, request.sibling_mean - request.output_tokens)
        remaining = [tokens for other, tokens in self.pairs if other.domain == request.domain]
        return max(1.0, sum(remaining) / len(remaining)) if remaining else PRIOR_TOKENS


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 2**32), window=st.integers(1, 150), open_attempts=st.integers(1, 8))
def test_the_harvest_and_its_statistics_are_those_of_a_slow_reference(
    seed: int, window: int, open_attempts: int
) -> None:
    rng = random.Random(seed)
    spy = Spy()
    fast, slow = (
        ProgressivePredictor(lambda: spy, window=window, open_attempts=open_attempts),
        Slow(window, open_attempts),
    )
    for _ in range(300):
        key = rng.randrange(12)
        if rng.random() < 0.7:
            request = context(
                rng.randrange(500),
                domain=rng.choice("abc"),
                siblings=rng.randrange(2),
                mean=float(rng.randrange(600)),
                text=(rng.randrange(3),),
                state=rng.choice([(), (float(rng.randrange(9)),) * STATE_WIDTH]),
            )
            expected = slow.usual(request)
            slow.remember(key, request)
            assert fast.predict(key, request) == pytest.approx(expected)
        else:
            total = rng.choice([None, rng.randrange(600)])
            fast.observe(key, total)
            slow.observe(key, total)
        assert fast.pairs == len(slow.pairs) <= window
        assert fast.open == len(slow.keys) <= open_attempts
    fast.fit()
    assert fast.fits == (len(slow.pairs) >= MIN_PAIRS)
    for rows, remaining in spy.fitted:
        assert remaining.tolist() == [tokens for _, tokens in slow.pairs]
        assert (
            rows.table[:, :NUMBERS]
            == np.stack([row(request, 0) for request, _ in slow.pairs])[:, :NUMBERS]
        ).all()
        assert rows.plans == [request.plan for request, _ in slow.pairs]
        assert rows.prompts == [request.prompt for request, _ in slow.pairs]
        states = [request.state for request, _ in slow.pairs]
        assert [tuple(state.tolist()) for state in rows.states] == states


def test_the_regressor_answers_once_it_is_fitted() -> None:
    predictor = taught(Spy())
    assert (predictor.fits, predictor.failed_fits) == (1, 0)
    assert predictor.predict("k", context(77)) == 77
    wanted = [50, 51, 52]
    assert predictor.estimate([predictor.remember(n, context(50 + n)) for n in range(3)]) == wanted
    assert predictor.estimate([]) == []
    assert predictor.failed_predictions == 0


@pytest.mark.parametrize("value", [0.0, -5.0, 0.99])
def test_a_prediction_is_at_least_one_token(value: float) -> None:
    assert taught(Spy(lambda rows: np.full(len(rows.table), value))).predict("k", context(0)) == 1.0


def no_answer(rows: Rows) -> Lengths:
    raise RuntimeError("gone")


@pytest.mark.parametrize(
    "answer",
    [
        no_answer,
        lambda rows: np.full(len(rows.table), math.nan),
        lambda rows: np.full(len(rows.table), math.inf),
        lambda rows: np.zeros(len(rows.table) + 1),
        lambda rows: np.zeros((len(rows.table), 1)),
        lambda rows: None,
    ],
)
def test_a_regressor_that_cannot_answer_is_replaced_by_statistics_and_counted(
    answer: Callable[[Rows], Lengths],
) -> None:
    predictor = taught(Spy(answer))
    requests = [
        context(30, siblings=2, mean=50.0),
        context(30),
        context(30, domain="new"),
        context(90, siblings=2, mean=50.0),
    ]
    predictions = [predictor.predict(number, one) for number, one in enumerate(requests)]
    assert predictions == [20.0, 100.0, PRIOR_TOKENS, 1.0]
    assert predictor.failed_predictions == 4


def test_only_the_rows_without_a_number_are_replaced() -> None:
    predictor = taught(Spy(lambda rows: np.where(rows.table[:, 2] > 5, math.nan, 7.0)))
    assert predictor.estimate([predictor.remember(n, context(n)) for n in (4, 6)]) == [7.0, 100.0]
    assert predictor.failed_predictions == 1


def test_a_failed_fit_is_counted_and_the_former_regressor_stays() -> None:
    predictor = taught(Spy(), Unfit())
    predictor.fit()
    assert (predictor.fits, predictor.failed_fits) == (1, 1)
    assert predictor.predict("k", context(77)) == 77
    predictor.fit()  # the factory itself fails: no regressor is left
    assert (predictor.fits, predictor.failed_fits) == (1, 2)
    assert predictor.predict("k", context(78)) == 78


def test_before_enough_is_harvested_there_is_no_fit_and_no_failure() -> None:
    predictor = taught(Spy(), pairs=MIN_PAIRS - 1)
    assert (predictor.fits, predictor.failed_fits, predictor.failed_predictions) == (0, 0, 0)
    assert predictor.predict("k", context(0)) == 100.0


def test_of_a_long_attempt_the_newest_contexts_are_kept() -> None:
    predictor = ProgressivePredictor(Spy)
    for turn in range(ATTEMPT_CONTEXTS + 10):
        predictor.remember("k", context(turn))
    predictor.observe("k", 1000)
    assert predictor.pairs == ATTEMPT_CONTEXTS


def test_domains_beyond_the_slots_share_one_row() -> None:
    predictor = ProgressivePredictor(Spy)
    rows = [predictor.remember(n, context(0, domain=f"d{n}")).row for n in range(DOMAINS + 2)]
    assert len({tuple(columns.tolist()) for columns in rows}) == DOMAINS + 1
    assert all(columns.shape == (WIDTH,) for columns in rows)


def test_a_text_is_kept_once_for_all_turns_and_members_of_a_group() -> None:
    predictor = ProgressivePredictor(Spy, open_attempts=2)
    state = (0.5,) * STATE_WIDTH
    kept = [
        predictor.remember(key, context(turn, text=tuple(range(1000, 1009)), state=state))
        for turn, key in enumerate("kkmm")
    ]
    assert len({id(one.context.plan) for one in kept}) == 1
    assert len({id(one.context.prompt) for one in kept}) == 1
    assert [one.context.output_tokens for one in kept] == [0, 1, 2, 3]
    assert all((one.context.state, one.state.tolist()) == ((), [*state]) for one in kept)
    for other in range(9):
        predictor.remember("k", context(0, text=(other,)))
    assert len(predictor._texts) == 2 * 2, "texts are bounded as attempts are"
