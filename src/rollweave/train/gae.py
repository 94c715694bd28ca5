"""Generalized advantage estimation (GAE, arXiv:1506.02438 eq. 16) with the values of a
critic, token by token or turn by turn.

Invariants: a value is the value of the state in which a token is sampled; the state
after the last turn has the value 0; `gamma` discounts between turns, never within a
turn.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from rollweave.schema.work import Trajectory, TurnSpan
from rollweave.train.advantages import MIN_DEVIATION, reward_of, turn_rewards, turns_of
from rollweave.train.rows import Row


class Estimate(NamedTuple):
    """The estimates at the output tokens of one row, each [M].

    `valued` are the tokens at which the critic is to predict `returns`; `covered` are
    the tokens that belong to a turn.
    """

    advantages: torch.Tensor
    returns: torch.Tensor
    valued: torch.Tensor
    covered: torch.Tensor


def estimate(
    trajectory: Trajectory,
    rows: Sequence[Row],
    values: Sequence[torch.Tensor],
    *,
    gae_lambda: float,
) -> list[Estimate]:
    """Return the estimates of a trajectory's rows from the values [M] at their tokens.

    - `gae`: each token is a step, and the last one of a turn has the turn's reward.
      A_t = δ_t + γ λ A_{t+1} with δ_t = r_t + γ V_{t+1} - V_t, where γ is 1 within a
      turn.
    - `gae_turn`: each turn is a step with the value of its first token; all its tokens
      have its advantage, and the critic learns at the first one.

    A turn without output tokens is not a step, but its reward and discount count.
    """
    algorithm = rows[0].algorithm
    by_turn = algorithm.advantage == "gae_turn"
    estimates = [
        Estimate(
            advantages=torch.zeros(row.outputs),
            returns=torch.zeros(row.outputs),
            valued=torch.zeros(row.outputs, dtype=torch.bool),
            covered=torch.zeros(row.outputs, dtype=torch.bool),
        )
        for row in rows
    ]
    place_of = {row.sequence: place for place, row in enumerate(rows)}
    spans = turns_of(trajectory)
    rewards = turn_rewards(reward_of(trajectory, algorithm), spans)
    next_value = next_advantage = 0.0
    for (sequence, span), reward in zip(reversed(spans), reversed(rewards), strict=True):
        place = place_of.get(sequence)
        inside = [] if place is None else _inside(rows[place], span)
        if place is None or not inside:  # no state: its reward belongs to the turn before it
            next_value = reward + algorithm.gamma * next_value
            next_advantage *= algorithm.gamma
            continue
        made = estimates[place]
        for number, index in enumerate(reversed(inside[:1] if by_turn else inside)):
            value = float(values[place][index])
            discount = algorithm.gamma if number == 0 else 1.0
            delta = (reward if number == 0 else 0.0) + discount * next_value - value
            next_advantage = delta + discount * gae_lambda * next_advantage
            next_value = value
            made.advantages[index] = next_advantage
            made.returns[index] = next_advantage + value
            made.valued[index] = True
        if by_turn:
            made.advantages[inside] = next_advantage
        made.covered[inside] = True
    return estimates


def _inside(row: Row, span: TurnSpan) -> list[int]:
    """Return the places of a turn's tokens among the output tokens of its row."""
    targets = row.example.targets
    found: list[int] = ((targets >= span.start) & (targets < span.end)).nonzero().flatten().tolist()
    return found


def standardized(estimates: Mapping[int, Estimate]) -> dict[int, torch.Tensor]:
    """Return advantages by row, minus their mean over the tokens of all turns and
    divided by their standard deviation, as PPO's implementations do.
    """
    flat = torch.cat([of_row.advantages[of_row.covered] for of_row in estimates.values()])
    mean, deviation = flat.mean(), flat.std(correction=0)
    scale = 0.0 if float(deviation) <= MIN_DEVIATION else 1 / float(deviation)
    return {
        index: torch.where(each.covered, (each.advantages - mean) * scale, 0.0)
        for index, each in estimates.items()
    }
