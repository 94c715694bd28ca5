"""Generalized advantages equal the sums of their definition, step by step."""

import math
import random

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rollweave.schema.config.algorithm import AlgorithmConfig
from rollweave.schema.work import Batch, ScoredGroup
from rollweave.train.gae import Estimate, estimate, standardized
from rollweave.train.rows import Row, batch_rows
from tests.support.properties import examples
from tests.support.trainers import make_sequence, make_trajectory


def random_rows(rng: random.Random, algorithm: AlgorithmConfig) -> tuple[Batch, list[Row]]:
    """Build one trajectory of one or two sequences with rewards by turn and a final
    addition.
    """
    sequences = []
    for _ in range(rng.randint(1, 2)):
        turns = rng.randint(1, 4)
        rewards = [rng.choice([0.0, 1.0, -0.1]) for _ in range(turns)]
        sequences.append(make_sequence(rng, turns=turns, rewards=rewards))
    total = sum(span.reward for each in sequences for span in each.turns) + rng.choice([0.0, 2.0])
    trajectory = make_trajectory("t", tuple(sequences), total)
    group = ScoredGroup(id=trajectory.group_id, env="none", trajectories=(trajectory,))
    batch = Batch(step=0, version=0, part=0, parts=1, groups=(group,))
    return batch, batch_rows(batch, algorithm)


def by_definition(steps: list[tuple[float, float, float]], gae_lambda: float) -> list[float]:
    """Return A_t = Σ_l (Π γ λ) δ_{t+l} for steps of (reward, value, γ to the next)."""
    advantages = []
    for start in range(len(steps)):
        total, factor = 0.0, 1.0
        for place in range(start, len(steps)):
            reward, value, gamma = steps[place]
            after = steps[place + 1][1] if place + 1 < len(steps) else 0.0
            total += factor * (reward + gamma * after - value)
            factor *= gamma * gae_lambda
        advantages.append(total)
    return advantages


@settings(max_examples=examples(120))
@given(
    seed=st.integers(0, 10_000),
    gamma=st.sampled_from([0.5, 0.9, 1.0]),
    gae_lambda=st.sampled_from([0.0, 0.7, 0.95, 1.0]),
    by_turn=st.booleans(),
)
def test_estimates(seed: int, gamma: float, gae_lambda: float, by_turn: bool) -> None:
    rng = random.Random(seed)
    algorithm = AlgorithmConfig(advantage="gae_turn" if by_turn else "gae", gamma=gamma)
    batch, rows = random_rows(rng, algorithm)
    (trajectory,) = batch.groups[0].trajectories
    values = [torch.tensor([rng.uniform(-1, 2) for _ in range(row.outputs)]) for row in rows]
    made = estimate(trajectory, rows, values, gae_lambda=gae_lambda)

    spans = [(n, span) for n, each in enumerate(trajectory.sequences) for span in each.turns]
    rewards = [span.reward for _, span in spans]
    assert trajectory.reward is not None
    rewards[-1] += trajectory.reward - sum(rewards)
    steps, tokens = [], []
    for (number, span), reward in zip(spans, rewards, strict=True):
        inside = [rows[number].example.targets.tolist().index(at) for at in range(*bounds(span))]
        for index in inside[:1] if by_turn else inside:
            last = by_turn or index == inside[-1]
            value = float(values[number][index])
            steps.append((reward if last else 0.0, value, gamma if last else 1.0))
            tokens.append((number, inside if by_turn else [index]))
    advantages = by_definition(steps, gae_lambda)
    for (number, indices), advantage, (_, value, _) in zip(tokens, advantages, steps, strict=True):
        assert made[number].advantages[indices].tolist() == pytest.approx(
            [advantage] * len(indices), abs=1e-5
        )
        assert float(made[number].returns[indices[0]]) == pytest.approx(advantage + value, abs=1e-5)
    assert sum(int(each.valued.sum()) for each in made) == len(steps)
    assert all(bool(each.covered.all()) for each in made)


def bounds(span: object) -> tuple[int, int]:
    return span.start, span.end  # type: ignore[attr-defined]


def test_without_discount_and_with_lambda_1_the_return_is_what_remains() -> None:
    algorithm = AlgorithmConfig(advantage="gae")
    batch, rows = random_rows(random.Random(3), algorithm)
    (trajectory,) = batch.groups[0].trajectories
    values = [torch.rand(row.outputs) for row in rows]
    first = estimate(trajectory, rows, values, gae_lambda=1.0)[0]
    assert float(first.returns[0]) == pytest.approx(trajectory.reward, abs=1e-5)


def test_standardized_over_the_tokens_of_turns() -> None:
    def made(advantages: list[float], covered: list[bool]) -> Estimate:
        mask = torch.tensor(covered)
        return Estimate(torch.tensor(advantages), torch.zeros(len(mask)), mask, mask)

    values = standardized({3: made([1.0, 9.0], [True, False]), 5: made([3.0], [True])})
    assert {index: tensor.tolist() for index, tensor in values.items()} == {
        3: [-1.0, 0.0],
        5: [1.0],
    }
    flat = standardized({0: made([0.2, 0.2], [True, True])})
    assert flat[0].tolist() == [0.0, 0.0]
    assert not math.isnan(float(flat[0].sum()))
