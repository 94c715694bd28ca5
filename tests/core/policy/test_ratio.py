"""The ratio of prefill to decode engines: estimates against a simulated queue, and
moves against a reference that remembers everything.
"""

import heapq
import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.core.policy.ratio import (
    BAND,
    HORIZON,
    STEADY,
    Load,
    Patience,
    StepTimes,
    change,
    division,
    pays,
    speed,
    turns_per_s,
)
from tests.support.properties import examples

SECONDS = st.floats(0.001, 10.0)
LOADS = st.builds(
    Load,
    attempts=st.floats(1.0, 500.0),
    prompt_s=SECONDS,
    mixed_s=SECONDS,
    move_s=st.floats(0.0, 1.0),
    steps_s=SECONDS,
    sequence_s=st.floats(0.0, 1.0),
    between_s=st.floats(0.0, 10.0),
    slots=st.integers(1, 64),
)


@settings(max_examples=examples(150))
@given(load=LOADS, engines=st.integers(2, 12), first=st.integers(0, 11))
def test_under_a_constant_load_engines_move_one_way_and_then_no_more(
    load: Load, engines: int, first: int
) -> None:
    prefill, patience, ways = min(first, engines - 1), Patience(), list[int]()
    for _ in range(STEADY * (engines + 2)):
        way = change(load, prefill, engines - prefill).way
        if patience.ask(way):
            patience.moved(way)
            prefill += way
            ways.append(way)
            assert 0 <= prefill < engines
    assert len(set(ways)) <= 1, ways
    assert change(load, prefill, engines - prefill).way == 0, "it has come to rest"
    best = max(turns_per_s(load, number, engines - number) for number in range(engines))
    assert best <= (1 + BAND) * turns_per_s(load, prefill, engines - prefill) * (1 + 1e-9)


class Remembering:
    """A reference of `Patience`: all that steps have asked, and all moves."""

    def __init__(self) -> None:
        self.asked: list[int] = []  # since the last move
        self.moves: list[int] = []

    def ask(self, way: int) -> bool:
        self.asked.append(way)
        turns = sum(one != other for one, other in itertools.pairwise([*self.moves, way]))
        agreeing = itertools.takewhile(lambda one: one == way, reversed(self.asked))
        return way != 0 and sum(1 for _ in agreeing) >= STEADY * 2**turns

    def moved(self, way: int) -> None:
        self.asked.clear()
        self.moves.append(way)


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.sampled_from([-1, -1, 0, 1, 1]), st.integers(1, 40)), max_size=30))
def test_whatever_is_asked_the_direction_changes_ever_more_rarely(
    asked: list[tuple[int, int]],
) -> None:
    ours, reference = Patience(), Remembering()
    steps = [way for way, times in asked for _ in range(times)]
    for way in steps:
        moves = ours.ask(way)
        assert moves == reference.ask(way)
        if moves:
            ours.moved(way)
            reference.moved(way)
    turns = sum(one != other for one, other in itertools.pairwise(reference.moves))
    assert turns == ours.turns <= math.log2(1 + len(steps) / STEADY)


def simulated(load: Load, prefill: int, decode: int, *, turns: int = 4000) -> float:
    """Return the turns per second of attempts whose prompts are all computed by prefill
    engines, each a queue, and then sampled by engines that share their steps.
    """
    draw, now, done = random.Random(0), 0.0, 0
    # when each attempt comes for its prompt, or has it
    coming = [(draw.expovariate(1.0), False, number) for number in range(int(load.attempts))]
    heapq.heapify(coming)
    free, sampling = [0.0] * prefill, [dict[int, float]() for _ in range(decode)]
    while done < turns:
        steps = [load.steps_s + len(engine) * load.sequence_s for engine in sampling]
        ends = [
            now + min(engine.values(), default=math.inf) * step_s
            for engine, step_s in zip(sampling, steps, strict=True)
        ]
        first = min(range(decode), key=lambda number: ends[number])
        until = min(ends[first], coming[0][0] if coming else math.inf)
        for engine, step_s in zip(sampling, steps, strict=True):
            for number in engine:
                engine[number] -= (until - now) / step_s
        now = until
        if until == ends[first]:
            number = min(sampling[first], key=lambda one: sampling[first][one])
            del sampling[first][number]
            done += 1
            at = now + draw.expovariate(1.0) * load.between_s
            heapq.heappush(coming, (at, False, number))
            continue
        _, prompted, number = heapq.heappop(coming)
        if prompted:
            min(sampling, key=len)[number] = draw.expovariate(1.0)
        else:
            end = max(now, free[0]) + draw.expovariate(1.0) * load.prompt_s
            heapq.heapreplace(free, end)
            heapq.heappush(coming, (end + load.move_s, True, number))
    return done / now


@pytest.mark.parametrize("attempts", [4, 16, 64])
@pytest.mark.parametrize("prompt_s", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("prefill", [1, 3, 5])
def test_estimates_are_near_a_simulated_queue(attempts: int, prompt_s: float, prefill: int) -> None:
    load = Load(
        attempts=attempts,
        prompt_s=prompt_s,
        mixed_s=1e6,  # so that all prompts are computed by prefill engines
        move_s=0.01,
        steps_s=0.5,
        sequence_s=0.05,
        between_s=0.5,
        slots=64,
    )
    assert turns_per_s(load, prefill, 6 - prefill) == pytest.approx(
        simulated(load, prefill, 6 - prefill), rel=0.3
    )


def test_long_prompts_ask_for_prefill_engines_and_long_outputs_for_decode_engines() -> None:
    load = Load(
        attempts=24,
        prompt_s=1.0,
        mixed_s=1.0,
        move_s=0.0,
        steps_s=2.0,
        sequence_s=0.0,
        between_s=0.0,
        slots=64,
    )
    assert change(load, 1, 5).way == 1
    assert change(load, 1, 5).prefill == 5
    outputs = {"prompt_s": 0.01, "mixed_s": 0.01, "sequence_s": 0.5}
    writing = Load(**{**{name: getattr(load, name) for name in load.__struct_fields__}, **outputs})
    assert change(writing, 3, 3).way == -1
    assert change(writing, 0, 1).way == 0, "a decode engine stays"


def test_a_move_must_earn_back_its_cost_within_the_steps_that_are_left() -> None:
    month = {"waited_s": 10.0, "engines": 4, "cost_s": 20.0}
    assert pays(0.25, steps=3, **month)
    assert not pays(0.25, steps=2, **month)
    assert not pays(0.25, steps=10**6, **{**month, "cost_s": 8.0 * HORIZON})
    assert not pays(0.25, steps=9, **{**month, "waited_s": 0.0}), "the trainer waits for nothing"


# The division of places between engines and ranks of the trainer.

TIMES = st.builds(
    lambda rollouts, training, other, hidden: StepTimes(
        step_s=rollouts + training + other - hidden * min(rollouts, training + other),
        rollouts_s=rollouts,
        training_s=training,
        other_s=other,
    ),
    st.floats(0.1, 100.0),
    st.floats(0.1, 100.0),
    st.floats(0.0, 10.0),
    st.floats(0.0, 1.0),
)


@settings(max_examples=examples(150))
@given(
    times=TIMES,
    load=LOADS,
    ranks=st.integers(1, 6),
    engines=st.integers(1, 6),
    fewer=st.integers(0, 5),
    more=st.integers(0, 5),
    speeds=st.dictionaries(st.integers(1, 12), st.floats(0.1, 20.0), max_size=4),
)
def test_no_division_is_better_than_the_one_that_is_found(
    times: StepTimes,
    load: Load,
    ranks: int,
    engines: int,
    fewer: int,
    more: int,
    speeds: dict[int, float],
) -> None:
    bounds = max(1, ranks - fewer), ranks + more
    found = division(times, load, ranks=ranks, engines=engines, bounds=bounds, speeds=speeds)

    def seconds(number: int) -> float:
        """The reference: both parts of a step, and what overlaps of them."""
        slower = turns_per_s(load, 0, engines) / turns_per_s(load, 0, ranks + engines - number)
        rollouts = times.rollouts_s * slower
        faster = speed(speeds, number) / speed(speeds, ranks)
        trainer = times.training_s / faster + times.other_s
        before = times.rollouts_s, times.training_s + times.other_s
        share = (sum(before) - times.step_s) / min(before)
        return max(rollouts, trainer) + (1 - share) * min(rollouts, trainer)

    possible = [
        number for number in range(bounds[0], bounds[1] + 1) if ranks + engines - number >= 1
    ]
    assert found.ranks in possible
    best = min(map(seconds, possible))
    assert seconds(found.ranks) <= (1 + BAND) * best * (1 + 1e-6)
    assert found.step_s == pytest.approx(seconds(found.ranks), rel=1e-6)
    assert found.gain == pytest.approx(seconds(ranks) / seconds(found.ranks) - 1, abs=1e-6)
    assert (found.ranks == ranks) == (found.gain == 0)


def test_a_speed_that_was_measured_counts_more_than_the_number_of_ranks() -> None:
    assert [speed({}, number) for number in (1, 2, 5)] == [1, 2, 5]
    assert [speed({1: 1.0, 4: 2.0}, number) for number in (1, 2, 3, 4, 8)] == [1, 2, 1.5, 2, 4]


def test_a_trainer_that_waits_gives_no_engine_away_and_one_that_never_does_takes_some() -> None:
    load = Load(
        attempts=64.0,
        prompt_s=0.0,
        mixed_s=0.1,
        move_s=0.0,
        steps_s=1.0,
        sequence_s=0.1,
        between_s=0.0,
        slots=64,
    )

    def ranks(rollouts_s: float, training_s: float) -> int:
        slower = max(rollouts_s, training_s)
        times = StepTimes(step_s=slower, rollouts_s=rollouts_s, training_s=training_s, other_s=0.0)
        return division(times, load, ranks=4, engines=4, bounds=(1, 7), speeds={}).ranks

    assert ranks(10.0, 100.0) > 4 > ranks(100.0, 10.0)
    assert ranks(100.0, 100.0) == 4
