"""Generalized advantages equal the sums of their definition, step by step."""

import random
import statistics
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings

from rollweave.schema.base import GroupId
from rollweave.schema.config.training import AlgorithmConfig
from rollweave.schema.work import (
    Batch,
    ScoredGroup,
    Segment,
    SegmentKind,
    TokenSequence,
    Trajectory,
    TurnSpan,
)
from rollweave.train.critic import Estimate, estimate, standardized
from rollweave.train.rows import batch_rows
from tests.support.properties import examples
from tests.support.trainers import make_trajectory


def sequence_of(rng: random.Random) -> TokenSequence:
    """Build one to four turns, with or without an observation between two of them. An
    engine that returns text only leaves no output tokens; a token may follow the last
    turn.
    """
    segments: list[Segment] = []
    turns: list[TurnSpan] = []

    def add(count: int, kind: SegmentKind = SegmentKind.OBSERVATION) -> None:
        start = segments[-1].end if segments else 0
        version = 0 if kind is SegmentKind.OUTPUT else -1
        if count:
            segments.append(Segment(start=start, end=start + count, kind=kind, version=version))

    add(rng.randint(1, 2), SegmentKind.PROMPT)
    for _ in range(rng.randint(1, 4)):
        add(rng.randint(0, 1))
        start = segments[-1].end
        add(rng.randint(1, 3), rng.choice([SegmentKind.OUTPUT] * 3 + [SegmentKind.OBSERVATION]))
        reward = rng.choice([0.0, 1.0, -0.1])
        turns.append(TurnSpan(start=start, end=segments[-1].end, reward=reward))
    add(rng.choice([0, 0, 1]), SegmentKind.OUTPUT)
    length = segments[-1].end
    return TokenSequence(
        tokens=tuple(range(4, 4 + length)),
        segments=tuple(segments),
        logprobs=(0.0,) * length,
        turns=tuple(turns),
    )


class State(NamedTuple):
    """A state with a value: the turn's number in the trajectory, and the places among
    the output tokens of its sequence that have its advantage.
    """

    turn: int
    sequence: int
    places: list[int]
    value: float


def by_definition(
    states: list[State], rewards: list[float], gamma: float, gae_lambda: float
) -> list[float]:
    """Return A_k = Σ_l λ^(l-k) γ^(turns from k to l) δ_l, where δ is the reward on the
    way to the next state, the discounted value there, minus the value.
    """
    deltas = []
    for state, after in zip(states, [*states, None][1:], strict=True):
        end = len(rewards) if after is None else after.turn
        on_the_way = sum(
            gamma ** (turn - state.turn) * rewards[turn] for turn in range(state.turn, end)
        )
        then = 0.0 if after is None else gamma ** (after.turn - state.turn) * after.value
        deltas.append(on_the_way + then - state.value)
    return [
        sum(
            gae_lambda**distance * gamma ** (states[k + distance].turn - states[k].turn) * delta
            for distance, delta in enumerate(deltas[k:])
        )
        for k in range(len(states))
    ]


def states_of(trajectory: Trajectory, values: dict[int, list[float]], by_turn: bool) -> list[State]:
    states, turn = [], 0
    for number, sequence in enumerate(trajectory.sequences):
        outputs = [at for at, sampled in enumerate(sequence.output_mask()) if sampled]
        for span in sequence.turns:
            inside = [place for place, at in enumerate(outputs) if span.start <= at < span.end]
            for place in inside[:1] if by_turn else inside:
                value = values[number][place]
                states.append(State(turn, number, inside if by_turn else [place], value))
            turn += 1
    return states


@settings(max_examples=examples(200))
@given(
    seed=st.integers(0, 100_000),
    gamma=st.sampled_from([0.5, 0.9, 1.0]),
    gae_lambda=st.sampled_from([0.0, 0.7, 1.0]),
    by_turn=st.booleans(),
)
def test_estimates(seed: int, gamma: float, gae_lambda: float, by_turn: bool) -> None:
    rng = random.Random(seed)
    algorithm = AlgorithmConfig(advantage="gae_turn" if by_turn else "gae", gamma=gamma)
    sequences = tuple(sequence_of(rng) for _ in range(rng.randint(1, 3)))
    rewards = [span.reward for sequence in sequences for span in sequence.turns]
    rewards[-1] += rng.choice([0.0, 2.0])  # a final evaluation, of which no turn knows
    trajectory = make_trajectory("t", sequences, sum(rewards))
    group = ScoredGroup(id=GroupId("g"), env="none", trajectories=(trajectory,))
    rows = batch_rows(Batch(step=0, version=0, part=0, parts=1, groups=(group,)), algorithm)
    assume(rows)
    values = {row.sequence: [rng.uniform(-1, 2) for _ in range(row.outputs)] for row in rows}
    states = states_of(trajectory, values, by_turn)
    advantages = by_definition(states, rewards, gamma, gae_lambda)

    given_values = [torch.tensor(values[row.sequence]) for row in rows]
    made = estimate(trajectory, rows, given_values, gae_lambda=gae_lambda)
    for row, each in zip(rows, made, strict=True):
        advantage, to_predict = [0.0] * row.outputs, {}
        covered = set()
        for state, expected in zip(states, advantages, strict=True):
            if state.sequence == row.sequence:
                for place in state.places:
                    advantage[place] = expected
                to_predict[state.places[0]] = expected + state.value
                covered.update(state.places)
        assert each.advantages.tolist() == pytest.approx(advantage, abs=1e-5)
        assert each.covered.nonzero().flatten().tolist() == sorted(covered)
        assert each.valued.nonzero().flatten().tolist() == sorted(to_predict)
        assert each.returns.tolist() == pytest.approx(
            [to_predict.get(place, 0.0) for place in range(row.outputs)], abs=1e-5
        )


@settings(max_examples=examples(100))
@given(
    rows=st.dictionaries(
        st.integers(0, 9),
        st.lists(
            st.tuples(st.sampled_from([-1.0, 0.2, 3.0]), st.sampled_from(["", "c", "vc"])),
            min_size=1,
            max_size=4,
        ),
        min_size=1,
        max_size=3,
    ).filter(lambda rows: any(kind for row in rows.values() for _, kind in row))
)
def test_standardized_over_the_tokens_of_turns(rows: dict[int, list[tuple[float, str]]]) -> None:
    made = standardized(
        {
            index: Estimate(
                advantages=torch.tensor([value for value, _ in row]),
                returns=torch.zeros(len(row)),
                valued=torch.tensor(["v" in kind for _, kind in row]),
                covered=torch.tensor(["c" in kind for _, kind in row]),
            )
            for index, row in rows.items()
        }
    )
    flat = [value for row in rows.values() for value, kind in row if kind]
    mean, deviation = statistics.fmean(flat), statistics.pstdev(flat)
    for index, row in rows.items():
        assert made[index].tolist() == pytest.approx(
            [(value - mean) / deviation if kind and deviation else 0.0 for value, kind in row],
            abs=1e-5,
        )
