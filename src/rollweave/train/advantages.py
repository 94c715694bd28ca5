"""Advantages: how much better the choice of each output token was than the expectation
of its group.

Invariants: every output token of a trajectory gets a finite number and every other
token 0; a group whose values are all equal gives zeros, never NaN; a trajectory's
`reward` is its total, the sum of its turns' rewards plus the reward of a final
evaluation, which counts as reward of the last turn.
"""

import math
from collections.abc import Sequence

import torch

from rollweave.schema.config.training import OF_CRITIC, AlgorithmConfig
from rollweave.schema.work import ScoredGroup, StopReason, Trajectory, TurnSpan
from rollweave.train.losses import MAX_LOG_RATIO

MIN_DEVIATION = 1e-6
"""Standard deviation (of rewards of order one) below which a difference is rounding,
and the values count as equal.
"""

OVERLONG_CACHE = 0.2
"""Share of a trajectory's maximum length over which its punishment grows (DAPO §4.1:
4,096 of 20,480 tokens).
"""


def token_advantages(
    groups: Sequence[ScoredGroup], algorithm: AlgorithmConfig
) -> list[list[torch.Tensor]]:
    """Compute advantages [T] in float32 per trajectory (in the order of `groups`) and
    sequence, 0 outside output tokens.

    - `grpo` (DeepSeekMath, arXiv:2402.03300 §4.1): (reward - group mean) / group
      standard deviation (of the population, as printed).
    - `grpo_no_std` (Dr. GRPO, arXiv:2503.20783): reward - group mean.
    - `rloo`: reward - mean of the group's other members.
    - `reinforce_pp` (REINFORCE++, arXiv:2501.03262): (reward - batch mean) / batch
      standard deviation, no group baseline.
    - `reinforce_pp_baseline` (its variant with a baseline): (reward - group mean) /
      standard deviation of these differences over the batch.
    - `gigpo` (GiGPO §4, its step level only): per turn. G_t = r_t + γ G_{t+1}; the
      advantage of all tokens of turn t is (G_t - mean of G over the group's turns with
      the same `state_key`) / standard deviation of G over all turns of the group. A
      turn whose key no other turn shares gets 0; turns without a key share one
      baseline. A sequence without turns is one turn.
    - `gigpo_no_std`: the same without the division.
    - `distill` (on-policy distillation, MiniLLM arXiv:2306.08543, GKD
      arXiv:2306.13649): log p of the teacher - log p with which the engine sampled, for
      each token alone, within ±`MAX_LOG_RATIO`, plus `reward_weight` times (reward -
      group mean). - `gae`, `gae_turn`: 0, until `train/critic.py` replaces them by the
      critic's advantages.

    A reward includes `overlong_penalty` where `algorithm.overlong` is `punish`.

    Raises `ValueError` for a trajectory without a reward, or, with `distill`, without
    the teacher's log-probs.
    """
    for group in groups:
        for trajectory in group.trajectories:
            if trajectory.reward is None:
                raise ValueError(
                    f"trajectory {trajectory.id} of group {group.id} has no reward to train on"
                )
    if algorithm.advantage in OF_CRITIC:
        return [_constant(member, 0.0) for group in groups for member in group.trajectories]
    if algorithm.advantage in ("gigpo", "gigpo_no_std"):
        scaled = algorithm.advantage == "gigpo"
        return [
            advantages for group in groups for advantages in _gigpo(group, algorithm, scaled=scaled)
        ]
    rewards = [
        [reward_of(trajectory, algorithm) for trajectory in group.trajectories] for group in groups
    ]
    if algorithm.advantage == "distill":
        return [
            _distilled(trajectory, algorithm.reward_weight * value)
            for group, row in zip(groups, rewards, strict=True)
            for trajectory, value in zip(
                group.trajectories, _relative(row, "grpo_no_std"), strict=True
            )
        ]
    if algorithm.advantage == "reinforce_pp":
        values = _standardized([reward for row in rewards for reward in row])
    else:
        values = [value for row in rewards for value in _relative(row, algorithm.advantage)]
    if algorithm.advantage == "reinforce_pp_baseline":
        values = _standardized(values)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    return [
        _constant(trajectory, value) for trajectory, value in zip(trajectories, values, strict=True)
    ]


def _distilled(trajectory: Trajectory, value: float) -> list[torch.Tensor]:
    """Return the teacher's log-ratio of each output token, plus `value`."""
    advantages = []
    for sequence in trajectory.sequences:
        mask = torch.tensor(sequence.output_mask(), dtype=torch.float32)
        if not sequence.teacher and mask.any():
            raise ValueError(f"trajectory {trajectory.id} has no log-probs of the teacher")
        ratio = torch.zeros(len(sequence.tokens), dtype=torch.float64)
        if sequence.teacher:
            ratio = torch.tensor(sequence.teacher, dtype=torch.float64) - torch.tensor(
                sequence.logprobs, dtype=torch.float64
            )
        advantages.append((ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).float() + value) * mask)
    return advantages


def _relative(rewards: Sequence[float], estimator: str) -> list[float]:
    if estimator == "grpo":
        return _standardized(rewards)
    mean = _mean(rewards)
    size = len(rewards)
    # reward - mean of the others = (reward - mean of all) * n / (n - 1)
    factor = size / (size - 1) if estimator == "rloo" and size > 1 else 1.0
    return [(reward - mean) * factor for reward in rewards]


def _standardized(values: Sequence[float]) -> list[float]:
    mean, deviation = _mean(values), _deviation(values)
    return [(value - mean) / deviation if deviation > MIN_DEVIATION else 0.0 for value in values]


def is_overlong(trajectory: Trajectory) -> bool:
    """Return whether the maximum number of tokens cut the trajectory."""
    return trajectory.stop_reason is StopReason.MAX_TOKENS


def overlong_penalty(trajectory: Trajectory) -> float:
    """Return DAPO's soft punishment of long trajectories (arXiv:2503.14476 eq. 13): 0
    up to 1 - `OVERLONG_CACHE` of the maximum length, then falling linearly to -1 at the
    maximum, which a trajectory that was cut has reached.

    The length is the length of the longest sequence, including prompts and
    observations, since `max_tokens` bounds this length.
    """
    if is_overlong(trajectory):
        return -1.0
    most = trajectory.task.limits.max_tokens
    cache = OVERLONG_CACHE * most
    length = max((len(sequence.tokens) for sequence in trajectory.sequences), default=0)
    return max(-1.0, min(0.0, (most - cache - length) / cache))


def _gigpo(
    group: ScoredGroup, algorithm: AlgorithmConfig, *, scaled: bool
) -> list[list[torch.Tensor]]:
    turns = [turns_of(trajectory) for trajectory in group.trajectories]
    returns = [
        _returns(reward_of(trajectory, algorithm), spans, algorithm.gamma)
        for trajectory, spans in zip(group.trajectories, turns, strict=True)
    ]
    by_key: dict[str, list[float]] = {}
    for spans, values in zip(turns, returns, strict=True):
        for (_, span), value in zip(spans, values, strict=True):
            by_key.setdefault(span.state_key, []).append(value)
    baseline = {key: _mean(values) for key, values in by_key.items()}
    deviation = _deviation([value for values in returns for value in values])
    by_trajectory = []
    for trajectory, spans, values in zip(group.trajectories, turns, returns, strict=True):
        advantages = [torch.zeros(len(sequence.tokens)) for sequence in trajectory.sequences]
        if deviation > MIN_DEVIATION:
            for (index, span), value in zip(spans, values, strict=True):
                scale = deviation if scaled else 1.0
                advantages[index][span.start : span.end] = (
                    value - baseline[span.state_key]
                ) / scale
        masks = [
            torch.tensor(sequence.output_mask(), dtype=torch.bool)
            for sequence in trajectory.sequences
        ]
        by_trajectory.append(
            [values * mask for values, mask in zip(advantages, masks, strict=True)]
        )
    return by_trajectory


def turns_of(trajectory: Trajectory) -> list[tuple[int, TurnSpan]]:
    """Return the trajectory's turns in order, each with the index of its sequence."""
    turns: list[tuple[int, TurnSpan]] = []
    for index, sequence in enumerate(trajectory.sequences):
        spans = sequence.turns or (TurnSpan(start=0, end=len(sequence.tokens)),)
        turns.extend((index, span) for span in spans)
    return turns


def turn_rewards(total: float, spans: Sequence[tuple[int, TurnSpan]]) -> list[float]:
    """Return the reward of each turn; the last turn also gets the part of `total` that
    the turns lack.
    """
    rewards = [span.reward for _, span in spans]
    if rewards:
        rewards[-1] += total - math.fsum(rewards)
    return rewards


def _returns(total: float, spans: Sequence[tuple[int, TurnSpan]], gamma: float) -> list[float]:
    rewards = turn_rewards(total, spans)
    returns: list[float] = []
    value = 0.0
    for reward in reversed(rewards):
        value = reward + gamma * value
        returns.append(value)
    return returns[::-1]


def _constant(trajectory: Trajectory, value: float) -> list[torch.Tensor]:
    return [
        torch.tensor(sequence.output_mask(), dtype=torch.float32) * value
        for sequence in trajectory.sequences
    ]


def reward_of(trajectory: Trajectory, algorithm: AlgorithmConfig) -> float:
    """Return the trajectory's reward, with the punishment of its length if
    configured.
    """
    assert trajectory.reward is not None
    if algorithm.overlong == "punish":
        return trajectory.reward + overlong_penalty(trajectory)
    return trajectory.reward


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _deviation(values: Sequence[float]) -> float:
    mean = _mean(values)
    # hypot avoids squares that overflow
    return math.hypot(*(value - mean for value in values)) / math.sqrt(max(1, len(values)))
