"""A seed draws the same scenario for ever: a seed that is named somewhere shows what it
showed when it was named. A digest covers what the seed sets, not the defaults of other
settings.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable
from itertools import product
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from rollweave.schema.work import StopReason
from rollweave_sim import scenarios
from rollweave_sim.scenarios import MODES, FaultyWorkload, rates, serving_of
from rollweave_sim.workload import Plan, TurnPlan

SEEDS = range(200)


def digest(parts: Iterable[Any]) -> str:
    total = hashlib.blake2b(digest_size=6)
    for part in parts:
        total.update(msgspec.json.encode(part, order="sorted"))
    return total.hexdigest()


def test_a_seed_always_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    given = SimpleNamespace(model_validate=lambda data: data)
    monkeypatch.setattr(scenarios, "RunConfig", given)
    drawn: list[Any] = list(map(scenarios.scenario, SEEDS))
    modes = Counter(one["rollout"]["mode"] for one in drawn)
    assert [modes[mode] for mode in MODES] == [27, 31, 35, 30, 19, 58]
    assert digest(drawn) == "67f7c3087eab"
    assert digest(map(vars, map(rates, SEEDS))) == "340f7cd11a39"
    serving = (serving_of(seed).model_dump(exclude_unset=True) for seed in SEEDS)
    assert digest(serving) == "d8071f2c97de"


@pytest.mark.parametrize(
    ("rate", "count", "kinds", "expected"),
    [(0.0, 0, 0, "5d9814bfab14"), (0.3, 53, 5, "b6f6ecffd1ab"), (1.0, 150, 5, "0d7e925b2697")],
)
def test_an_attempt_always_has_the_same_fault(
    rate: float, count: int, kinds: int, expected: str
) -> None:
    turns = (TurnPlan(output_tokens=1, observation_tokens=1, env_s=1.0),) * 2
    plan = Plan(prompt_tokens=1, init_s=1.0, turns=turns, reward_s=1.0, reward=1.0, success=True)
    inner: Any = SimpleNamespace(plan=lambda **given: plan)
    faulty = FaultyWorkload(inner, rate, faults := Counter())
    plans = [
        faulty.plan(index=index, member=member, attempt=attempt, seed=seed)
        for index, member, attempt, seed in product(range(5), range(5), range(3), range(2))
    ]
    assert sum(one != plan for one in plans) == sum(faults.values()) == count
    assert (len(faults), digest(plans)) == (kinds, expected)


def test_a_plan_that_fails_has_no_further_fault() -> None:
    plan = Plan(
        prompt_tokens=1,
        init_s=1.0,
        turns=(),
        reward_s=1.0,
        reward=0.0,
        success=False,
        fails_in="init",
        stop=StopReason.ENV_ERROR,
    )
    inner: Any = SimpleNamespace(plan=lambda **given: plan)
    assert FaultyWorkload(inner, 1.0, Counter()).plan(index=0, member=0, attempt=0, seed=0) is plan
