"""The project does not grow beyond its budgets."""

from tests.support.budgets import BUDGETS


def test_no_measure_is_above_its_ceiling() -> None:
    found = {budget.name: (budget.measure(), budget.ceiling) for budget in BUDGETS}
    assert {name: pair for name, pair in found.items() if pair[0] > pair[1]} == {}


def test_no_ceiling_is_below_the_aim() -> None:
    assert [budget.name for budget in BUDGETS if budget.ceiling < budget.aim] == []
