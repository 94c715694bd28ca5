"""Costs of domains follow from their tokens and the prices of engines."""

import pytest

from rollweave.core.policy.profile import (
    Cost,
    DomainProfile,
    Worked,
    cost,
    together,
    token_costs,
)
from rollweave.core.policy.turn_times import Fit, Prices, TurnTime

PRICES = Prices(fixed_s=0.01, sequence_s=1e-4, context_s=1e-8, prompt_s=2e-5)
FIT = Fit(
    prices=PRICES,
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
