"""Prices from finished turns: exact where the turns determine them, whatever else was
slow, and those of the prior where they do not.
"""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.core.mechanisms.lengths.work import rate
from rollweave.core.policy import turn_times
from rollweave.core.policy.turn_times import (
    FIRST_TURNS,
    PRIOR,
    Cost,
    DomainProfile,
    Fit,
    Prices,
    TurnTime,
    TurnTimes,
    Worked,
    cost,
    estimate,
    fit,
    non_negative_ridge,
    renewed,
    step_times,
    together,
    token_costs,
)
from tests.support.properties import examples

PRICES = st.builds(
    Prices,
    fixed_s=st.floats(0.5, 5.0),
    sequence_s=st.floats(0.02, 0.2),
    context_s=st.floats(2e-6, 2e-5),
    prompt_s=st.floats(0.005, 0.1),
)


def turn(random_: random.Random, prices: Prices, *, error: float = 0.0) -> TurnTime:
    """A turn of an engine whose load, contexts and prompts vary."""
    batch = random_.uniform(1, 32)
    context = random_.choice([500.0, 4000.0, 20_000.0])
    output, prompts = random_.randint(20, 400), random_.choice([0, 300, 5000])
    exact = output * prices.step_s(batch, context) + prompts * prices.prompt_s
    return TurnTime(
        seconds=exact * random_.uniform(1 - error, 1 + error),
        output_tokens=output,
        prompt_tokens=prompts,
        batch=batch,
        context=context,
    )


def off(estimated: Prices, prices: Prices) -> float:
    """The greatest relative error of a step's time, and of a prompt token's."""
    steps = [
        estimated.step_s(batch, context) / prices.step_s(batch, context)
        for batch in (1, 8, 32)
        for context in (500, 20_000)
    ]
    return max(abs(ratio - 1) for ratio in (*steps, estimated.prompt_s / prices.prompt_s))


@settings(max_examples=examples(100))
@given(prices=PRICES, seed=st.integers(0, 999))
def test_turns_that_determine_the_prices_yield_them(prices: Prices, seed: int) -> None:
    chance = random.Random(seed)
    assert off(estimate([turn(chance, prices) for _ in range(100)]), prices) < 0.01


@settings(max_examples=examples(100))
@given(prices=PRICES, seed=st.integers(0, 999), factor=st.sampled_from([0.05, 3.0, 100.0]))
def test_a_fifth_of_the_turns_may_be_outliers(prices: Prices, seed: int, factor: float) -> None:
    chance = random.Random(seed)
    turns = [turn(chance, prices, error=0.05) for _ in range(200)]
    slow = [
        TurnTime(
            seconds=one.seconds * (factor if number % 5 == 0 else 1),
            output_tokens=one.output_tokens,
            prompt_tokens=one.prompt_tokens,
            batch=one.batch,
            context=one.context,
        )
        for number, one in enumerate(turns)
    ]
    assert off(estimate(slow), prices) < 0.25


@settings(max_examples=examples(100))
@given(seed=st.integers(0, 999), scale=st.floats(1e-3, 1e3), count=st.integers(1, 40))
def test_an_engine_that_is_slower_throughout_has_higher_prices(
    seed: int, scale: float, count: int
) -> None:
    chance = random.Random(seed)
    turns = [turn(chance, PRIOR, error=0.3) for _ in range(count)]
    estimated = estimate(turns)
    scaled = estimate(
        [
            TurnTime(
                seconds=scale * one.seconds,
                output_tokens=one.output_tokens,
                prompt_tokens=one.prompt_tokens,
                batch=one.batch,
                context=one.context,
            )
            for one in turns
        ]
    )
    for name in Prices.__struct_fields__:
        assert getattr(scaled, name) == pytest.approx(scale * getattr(estimated, name), rel=1e-6)


@pytest.mark.parametrize("count", [1, 50])
def test_equal_turns_have_the_proportions_of_the_prior(count: int) -> None:
    """They say what a batch of 8 costs, and nothing of others."""
    equal = TurnTime(seconds=40.0, output_tokens=10, prompt_tokens=0, batch=8.0, context=100.0)
    estimated = estimate([equal] * count)
    assert estimated.step_s(8, 100) == pytest.approx(4.0)
    assert estimated.step_s(32, 100) / estimated.step_s(1, 100) == pytest.approx(
        PRIOR.step_s(32, 100) / PRIOR.step_s(1, 100), rel=1e-3
    )


def test_estimates_need_a_turn() -> None:
    with pytest.raises(ValueError, match="at least one finished turn"):
        estimate([])


@settings(max_examples=examples(200))
@given(seed=st.integers(0, 9999), rows=st.integers(1, 12), ridge=st.sampled_from([1e-4, 0.1, 1.0]))
def test_no_other_non_negative_point_is_better(seed: int, rows: int, ridge: float) -> None:
    """The slow reference descends coordinate by coordinate until nothing changes but by
    rounding errors, which may alternate forever.
    """
    chance = np.random.default_rng(seed)
    columns, weights = chance.normal(size=(rows, 3)), chance.uniform(0, 1, size=rows)

    def error(x: np.ndarray) -> float:
        missed = weights @ np.square(columns @ x - 1)
        return float(missed + ridge * np.square(x - 1).sum())

    slow = np.ones(3)
    for _ in range(5000):
        before = slow.copy()
        for at in range(3):
            rest = columns @ slow - columns[:, at] * slow[at] - 1
            curvature = weights @ np.square(columns[:, at]) + ridge
            slow[at] = max(0.0, (ridge - weights @ (columns[:, at] * rest)) / curvature)
        if np.abs(slow - before).max() <= 1e-13:
            break
    solution = non_negative_ridge(columns, weights, ridge)
    assert (solution >= 0).all()
    assert error(solution) <= error(slow) + 1e-9


@settings(max_examples=examples(50))
@given(batches=st.lists(st.floats(1, 40), min_size=1, max_size=400))
def test_the_newest_turns_of_each_batch_size_are_kept(batches: list[float]) -> None:
    times, added = TurnTimes(), []
    for number, batch in enumerate(batches):
        one = TurnTime(
            seconds=1.0 + number, output_tokens=1, prompt_tokens=0, batch=batch, context=1.0
        )
        times.add(one, most=4)
        added.append(one)
    sizes = [(1 << power, 2 << power) for power in range(6)]
    kept = [[one for one in added if low <= one.batch < high][-4:] for low, high in sizes]
    assert times.turns == list(itertools.chain.from_iterable(kept))
    assert times.count == len(batches)


def test_estimates_are_due_when_half_of_the_turns_are_new() -> None:
    times, due = TurnTimes(), []
    for number in range(200):
        one = TurnTime(seconds=1.0, output_tokens=1, prompt_tokens=0, batch=1.0, context=1.0)
        if times.add(one):
            times.estimated_at = times.count
            due.append(number + 1)
    assert due[:3] == [FIRST_TURNS, 2 * FIRST_TURNS, 3 * FIRST_TURNS]
    assert all(after - before == FIRST_TURNS for before, after in itertools.pairwise(due))


def test_the_profile_is_that_of_an_engine_with_these_prices() -> None:
    chance, times = random.Random(3), TurnTimes()
    prices = Prices(fixed_s=2.0, sequence_s=0.1, context_s=1e-5, prompt_s=0.02)
    for _ in range(100):
        times.add(turn(chance, prices))
    profile, prompt_s = step_times(times, slots=24)
    assert sorted({point.batch for point in profile}) == [1, 2, 4, 8, 16, 24]
    fitted = rate(profile, slots=24, kv_tokens=10**6)
    assert fitted.fixed_s == pytest.approx(prices.fixed_s, rel=0.02)
    assert fitted.sequence_s == pytest.approx(prices.sequence_s, rel=0.02)
    assert fitted.context_s == pytest.approx(prices.context_s, rel=0.02)
    assert prompt_s == pytest.approx(prices.prompt_s, rel=0.02)


def test_a_step_always_takes_time() -> None:
    """These turns are explained by their prompts alone."""
    turns = [
        TurnTime(seconds=number, output_tokens=1, prompt_tokens=number, batch=1.0, context=1.0)
        for number in range(100, 200)
    ]
    assert estimate(turns).step_s(1, 1) > 0
    assert turn_times.LEAST_SHARE > 0


def mixed_turns(prices: Prices, *, prompts: bool, seed: int = 1) -> list[TurnTime]:
    """Turns with an error of two percent, with prompts or without."""
    random_ = random.Random(seed)
    made = []
    for _ in range(200):
        one = turn(random_, prices, error=0.02)
        if not prompts:
            without = one.seconds - one.prompt_tokens * prices.prompt_s
            one = TurnTime(
                seconds=without,
                output_tokens=one.output_tokens,
                prompt_tokens=0,
                batch=one.batch,
                context=one.context,
            )
        made.append(one)
    return made


TRUE = Prices(fixed_s=1.0, sequence_s=0.05, context_s=1e-5, prompt_s=0.01)


def test_a_fit_says_what_the_turns_do_not_determine() -> None:
    both, without = (fit(mixed_turns(TRUE, prompts=prompts)) for prompts in (True, False))
    error = both.covariance[3][3] ** 0.5
    assert abs(both.prices.prompt_s - TRUE.prompt_s) < 4 * error
    assert error < 0.1 * TRUE.prompt_s
    assert without.covariance[3][3] ** 0.5 > 10 * error
    assert without.covariance[0][0] ** 0.5 < 0.1 * TRUE.fixed_s


def test_prices_that_newer_turns_do_not_show_are_kept() -> None:
    former = known = fit(mixed_turns(TRUE, prompts=True))
    for seed in range(5):
        known = renewed(known, fit(mixed_turns(TRUE, prompts=False, seed=seed)))
    assert known.prices.prompt_s == pytest.approx(TRUE.prompt_s, rel=0.2)
    assert known.covariance[3][3] > former.covariance[3][3], "less certain with time"
    assert known.covariance[0][0] < former.covariance[0][0], "seen again"


def test_prices_follow_engines_that_become_slower() -> None:
    slow = Prices(fixed_s=3.0, sequence_s=0.15, context_s=3e-5, prompt_s=0.03)
    known = fit(mixed_turns(TRUE, prompts=True))
    for seed in range(40):
        known = renewed(known, fit(mixed_turns(slow, prompts=True, seed=seed)))
    assert off(known.prices, slow) < 0.1
    assert known.times(2.0).prices.prompt_s == 2 * known.prices.prompt_s


def test_the_shortest_contexts_are_halved_too() -> None:
    times = TurnTimes()
    times.add(TurnTime(seconds=1.0, output_tokens=5, prompt_tokens=0, batch=1.0, context=2.0))
    profile, _ = step_times(times, slots=1)
    assert [point.context for point in profile] == [1, 4]


KNOWN_PRICES = Prices(fixed_s=0.01, sequence_s=1e-4, context_s=1e-8, prompt_s=2e-5)
FIT = Fit(
    prices=KNOWN_PRICES,
    covariance=(
        (1e-6, 0.0, 0.0, 0.0),
        (0.0, 1e-10, 0.0, 0.0),
        (0.0, 0.0, 1e-18, 0.0),
        (0.0, 0.0, 0.0, 4e-12),
    ),
)


def profile(turns: int = 10, *, prompt: int = 1000, output: int = 50) -> DomainProfile:
    made = DomainProfile()
    for _ in range(turns):
        made.add("p", prompt=prompt, output=output, batch=8.0, context=2000.0)
    return made


def test_a_domain_costs_its_tokens() -> None:
    mean_cost = cost(profile(), FIT, batch=8.0)
    step_s = 0.01 / 8 + 1e-4 + 2000 * 1e-8
    assert mean_cost.seconds == pytest.approx(10 * (1000 * 2e-5 + 50 * step_s))
    amounts = (500 / 8, 500, 500 * 2000, 10_000)
    errors = (1e-3, 1e-5, 1e-9, 2e-6)
    variance = sum((one * of) ** 2 for one, of in zip(amounts, errors, strict=True))
    assert mean_cost.error_s == pytest.approx(variance**0.5)


def test_tokens_cost_what_their_domain_does() -> None:
    made = profile()
    tokens = token_costs(made, FIT, batch=8.0)
    all_s = made.prompt_tokens * tokens.prompt.seconds + made.output_tokens * tokens.output.seconds
    assert all_s == pytest.approx(cost(made, FIT, batch=8.0).seconds)
    assert tokens.prompt == Cost(seconds=2e-5, error_s=pytest.approx(2e-6))


def test_a_domain_that_grows_tenfold_is_known_within_three_steps() -> None:
    made = profile(100)
    for _ in range(10):
        made.forget()
        for _ in range(100):
            made.add("p", prompt=1000, output=50, batch=8.0, context=2000.0)
    known = []
    for _ in range(3):
        made.forget()
        for _ in range(100):
            made.add("p", prompt=10_000, output=50, batch=8.0, context=2000.0)
        known.append(made.prompt_tokens / made.turns)
    assert known == sorted(known)
    assert known[0] > 5000
    assert known[2] > 8500
    assert made.context == pytest.approx(2000)
    assert made.turns_in["p"] == pytest.approx(made.turns)


def test_a_domain_without_output_has_no_context() -> None:
    assert DomainProfile().context == 0.0


def test_engines_that_divide_work_are_done_at_once() -> None:
    mean_cost = together([Cost(seconds=10.0, error_s=1.0), Cost(seconds=30.0, error_s=3.0)])
    assert mean_cost.seconds == pytest.approx(7.5)
    assert mean_cost.error_s == pytest.approx(0.75)
    alone = Cost(seconds=10.0, error_s=1.0)
    assert together([alone]) == alone


def test_prices_are_scaled_to_the_seconds_worked() -> None:
    worked = Worked()
    time = TurnTime(seconds=8.0, output_tokens=50, prompt_tokens=0, batch=4.0, context=2000.0)
    for _ in range(3):
        worked.add(time, prompt=1000, context=2000.0)
    assert worked.seconds == 6
    by_prices = 3 * (1000 * 2e-5 + 50 * (0.01 / 4 + 1e-4 + 2000 * 1e-8))
    scaled = worked.scaled(FIT)
    assert scaled.prices.prompt_s == pytest.approx(2e-5 * 6 / by_prices)
    assert scaled.covariance[3][3] == pytest.approx(4e-12 * (6 / by_prices) ** 2)
    assert Worked().scaled(FIT) == FIT
    idle = Worked(amounts=[1.0, 1.0, 1.0, 1.0])
    assert idle.scaled(FIT) == FIT
    worked.forget()
    assert worked.scaled(FIT).prices.prompt_s == pytest.approx(scaled.prices.prompt_s)
