"""Advantages equal slow, obvious definitions; flat groups give zeros; only output
tokens get any.
"""

import math
import random
import statistics

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import given, settings

from rollweave.schema import work
from rollweave.schema.config.training import AlgorithmConfig
from rollweave.train.advantages import overlong_penalty, token_advantages
from tests.support.properties import examples
from tests.support.trainers import make_group, make_sequence, make_trajectory

REWARDS = st.lists(st.sampled_from([-0.1, 0.0, 0.001, 0.2, 1.0]), min_size=1, max_size=6)


def groups_of(rewards: list[list[float]], seed: int) -> list[work.ScoredGroup]:
    rng = random.Random(seed)
    return [make_group(f"g{index}", row, rng) for index, row in enumerate(rewards)]


def value_of(trajectory: work.Trajectory, tensors: list[torch.Tensor]) -> float:
    """Return the advantage that all output tokens share; check that the others have
    0.
    """
    values = set()
    for sequence, tensor in zip(trajectory.sequences, tensors, strict=True):
        for sampled, value in zip(sequence.output_mask(), tensor.tolist(), strict=True):
            if sampled:
                values.add(value)
            else:
                assert value == 0
    assert len(values) == 1
    return float(values.pop())


@settings(max_examples=examples(60))
@given(rewards=st.lists(REWARDS, min_size=1, max_size=4), seed=st.integers(0, 99))
@pytest.mark.parametrize(
    "estimator", ["grpo", "grpo_no_std", "rloo", "reinforce_pp", "reinforce_pp_baseline"]
)
def test_trajectory_estimators(rewards: list[list[float]], seed: int, estimator: str) -> None:
    groups = groups_of(rewards, seed)
    advantages = token_advantages(groups, AlgorithmConfig(advantage=estimator))  # type: ignore[arg-type]
    flat = [reward for row in rewards for reward in row]
    differences = [reward - statistics.fmean(row) for row in rewards for reward in row]
    expected = []
    for row in rewards:
        for index, reward in enumerate(row):
            others = row[:index] + row[index + 1 :]
            match estimator:
                case "grpo":
                    deviation = statistics.pstdev(row)
                    expected.append(
                        (reward - statistics.fmean(row)) / deviation if deviation > 1e-6 else 0.0
                    )
                case "grpo_no_std":
                    expected.append(reward - statistics.fmean(row))
                case "rloo":
                    expected.append(reward - statistics.fmean(others) if others else 0.0)
                case "reinforce_pp_baseline":
                    deviation = statistics.pstdev(differences)
                    difference = reward - statistics.fmean(row)
                    expected.append(difference / deviation if deviation > 1e-6 else 0.0)
                case _:
                    deviation = statistics.pstdev(flat)
                    expected.append(
                        (reward - statistics.fmean(flat)) / deviation if deviation > 1e-6 else 0.0
                    )
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    values = [
        value_of(trajectory, tensors)
        for trajectory, tensors in zip(trajectories, advantages, strict=True)
    ]
    assert values == pytest.approx(expected, abs=1e-5)


def random_group(rng: random.Random, size: int) -> work.ScoredGroup:
    """Build trajectories of one or two sequences with rewards by turn and a final
    addition.
    """
    trajectories = []
    for index in range(size):
        sequences = []
        for _ in range(rng.randint(1, 2)):
            turns = rng.randint(1, 4)
            sequences.append(
                make_sequence(
                    rng, turns=turns, rewards=[rng.choice([0.0, 1.0, -0.1]) for _ in range(turns)]
                )
            )
        total = sum(span.reward for sequence in sequences for span in sequence.turns) + rng.choice(
            [0.0, 2.0]
        )
        trajectories.append(make_trajectory(f"t{index}", tuple(sequences), total))
    return work.ScoredGroup(
        id=trajectories[0].group_id, env="none", trajectories=tuple(trajectories)
    )


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 10_000),
    size=st.integers(1, 5),
    gamma=st.sampled_from([0.5, 0.9, 1.0]),
    scaled=st.booleans(),
)
def test_gigpo(seed: int, size: int, gamma: float, scaled: bool) -> None:
    group = random_group(random.Random(seed), size)
    turns = []  # (trajectory, sequence, span, return)
    for which, trajectory in enumerate(group.trajectories):
        spans = [
            (index, span)
            for index, sequence in enumerate(trajectory.sequences)
            for span in sequence.turns
        ]
        rewards = [span.reward for _, span in spans]
        assert trajectory.reward is not None
        rewards[-1] += trajectory.reward - sum(rewards)
        for turn, (index, span) in enumerate(spans):
            discounted = sum(reward * gamma**delay for delay, reward in enumerate(rewards[turn:]))
            turns.append((which, index, span, discounted))
    deviation = statistics.pstdev([discounted for *_, discounted in turns])
    algorithm = AlgorithmConfig(advantage="gigpo" if scaled else "gigpo_no_std", gamma=gamma)
    advantages = token_advantages([group], algorithm)
    for which, index, span, discounted in turns:
        alike = [other for _, _, another, other in turns if another.state_key == span.state_key]
        divisor = deviation if scaled else 1.0
        expected = (discounted - statistics.fmean(alike)) / divisor if deviation > 1e-6 else 0.0
        assert advantages[which][index][span.start : span.end].tolist() == pytest.approx(
            [expected] * (span.end - span.start), abs=1e-5
        )
    for trajectory, tensors in zip(group.trajectories, advantages, strict=True):
        for sequence, tensor in zip(trajectory.sequences, tensors, strict=True):
            assert not tensor[~torch.tensor(sequence.output_mask())].any()


def test_gigpo_without_turns_takes_a_sequence_for_one_turn() -> None:
    rng = random.Random(0)
    bare = [msgspec.structs.replace(make_sequence(rng), turns=()) for _ in range(2)]
    trajectories = tuple(
        make_trajectory(f"t{i}", (sequence,), float(i)) for i, sequence in enumerate(bare)
    )
    group = work.ScoredGroup(id=trajectories[0].group_id, env="none", trajectories=trajectories)
    advantages = token_advantages([group], AlgorithmConfig(advantage="gigpo"))
    assert [value_of(t, tensors) for t, tensors in zip(trajectories, advantages, strict=True)] == [
        -1.0,
        1.0,
    ]


@settings(max_examples=examples(40))
@given(reward=st.floats(-10, 10), size=st.integers(1, 6), seed=st.integers(0, 99))
@pytest.mark.parametrize(
    "estimator", ["grpo", "grpo_no_std", "rloo", "reinforce_pp", "reinforce_pp_baseline"]
)
def test_a_flat_group_gives_zeros(reward: float, size: int, seed: int, estimator: str) -> None:
    groups = groups_of([[reward] * size], seed)
    for tensors in token_advantages(groups, AlgorithmConfig(advantage=estimator)):  # type: ignore[arg-type]
        for tensor in tensors:
            assert not math.isnan(float(tensor.sum()))
            assert float(tensor.abs().max()) < 1e-6


ESTIMATORS = [
    "grpo",
    "grpo_no_std",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "gigpo",
    "gigpo_no_std",
    "distill",
]


def punished_by(trajectory: work.Trajectory) -> float:
    """Return the punishment of docs/ALGORITHMS.md, in tokens: L of the longest
    sequence, M at most, a cache C of a fifth of M.
    """
    length = max([len(sequence.tokens) for sequence in trajectory.sequences], default=0)
    most = trajectory.task.limits.max_tokens
    cache = most / 5
    if trajectory.stop_reason is work.StopReason.MAX_TOKENS or length >= most:
        return -1.0
    return 0.0 if length <= most - cache else (most - cache - length) / cache


@settings(max_examples=examples(200))
@given(
    seed=st.integers(0, 10_000),
    most=st.integers(10, 60),
    reasons=st.lists(st.sampled_from(sorted(work.TRAINABLE)), min_size=1, max_size=4),
)
def test_overlong_trajectories_are_punished_as_defined(
    seed: int, most: int, reasons: list[work.StopReason]
) -> None:
    """A punishment changes what an estimator takes for the reward, and nothing else."""
    rng = random.Random(seed)
    limits = work.Limits(max_tokens=most, max_turn_tokens=7, max_turns=5)
    drawn = taught(random_group(rng, len(reasons)), rng)
    group = msgspec.structs.replace(
        drawn,
        trajectories=tuple(
            msgspec.structs.replace(
                each,
                task=msgspec.structs.replace(each.task, limits=limits),
                stop_reason=reason,
                sequences=each.sequences if rng.random() < 0.9 else (),
            )
            for each, reason in zip(drawn.trajectories, reasons, strict=True)
        ),
    )
    penalties = [punished_by(each) for each in group.trajectories]
    assert [overlong_penalty(each) for each in group.trajectories] == pytest.approx(penalties)
    changed = tuple(
        msgspec.structs.replace(each, reward=(each.reward or 0.0) + penalty)
        for each, penalty in zip(group.trajectories, penalties, strict=True)
    )
    rewarded = msgspec.structs.replace(group, trajectories=changed)

    def flat(of: work.ScoredGroup, estimator: str, overlong: str) -> list[float]:
        algorithm = AlgorithmConfig(
            advantage=estimator,  # type: ignore[arg-type]
            overlong=overlong,  # type: ignore[arg-type]
            gamma=0.9,
            reward_weight=0.5,
        )
        tensors = [tensor for each in token_advantages([of], algorithm) for tensor in each]
        return [value for tensor in tensors for value in tensor.tolist()]

    for estimator in ESTIMATORS:
        expected = flat(rewarded, estimator, "train")
        assert flat(group, estimator, "punish") == pytest.approx(expected, abs=1e-5)
        assert flat(group, estimator, "drop") == flat(group, estimator, "train")


def test_a_trajectory_without_reward_is_an_error() -> None:
    group = groups_of([[1.0, 0.0]], 0)[0]
    missing = msgspec.structs.replace(group.trajectories[0], reward=None)
    with pytest.raises(ValueError, match="no reward"):
        token_advantages(
            [msgspec.structs.replace(group, trajectories=(missing,))], AlgorithmConfig()
        )


def taught(group: work.ScoredGroup, rng: random.Random) -> work.ScoredGroup:
    """Return the group with log-probs of a teacher, a few of them far off."""

    def of(sequence: work.TokenSequence) -> work.TokenSequence:
        teacher = tuple(
            rng.choice([-rng.uniform(0.0, 8.0), -50.0]) if sampled else 0.0
            for sampled in sequence.output_mask()
        )
        return msgspec.structs.replace(sequence, teacher=teacher)

    trajectories = tuple(
        msgspec.structs.replace(each, sequences=tuple(map(of, each.sequences)))
        for each in group.trajectories
    )
    return msgspec.structs.replace(group, trajectories=trajectories)


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 10_000), size=st.integers(1, 4), weight=st.sampled_from([0.0, 0.5, 2.0]))
def test_distill(seed: int, size: int, weight: float) -> None:
    rng = random.Random(seed)
    groups = [taught(random_group(rng, size), rng) for _ in range(2)]
    algorithm = AlgorithmConfig(advantage="distill", reward_weight=weight)
    advantages = iter(token_advantages(groups, algorithm))
    for group in groups:
        mean = statistics.fmean(each.reward or 0.0 for each in group.trajectories)
        for trajectory in group.trajectories:
            for sequence, tensor in zip(trajectory.sequences, next(advantages), strict=True):
                for at, sampled in enumerate(sequence.output_mask()):
                    ratio = sequence.teacher[at] - sequence.logprobs[at]
                    difference = (trajectory.reward or 0.0) - mean
                    expected = max(-20.0, min(20.0, ratio)) + weight * difference
                    assert tensor[at].item() == pytest.approx(
                        expected if sampled else 0.0, abs=1e-5
                    )


def test_distill_needs_the_teacher() -> None:
    group = random_group(random.Random(0), 2)
    with pytest.raises(ValueError, match="trajectory t0 has no log-probs of the teacher"):
        token_advantages([group], AlgorithmConfig(advantage="distill"))
