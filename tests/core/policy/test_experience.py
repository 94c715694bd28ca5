"""The experience buffer's strategies: each against its sentence, step by step and in
exact numbers.
"""

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.core.policy.experience import (
    Experience,
    SampleName,
    advantage,
    due_now,
    evict,
    is_measured,
    sample,
)
from rollweave.schema.base import GroupId
from rollweave.schema.work import Measures
from tests.support.properties import examples

VERSION = 7


def experience(name: str, arrived: int = 0, **fields: object) -> Experience:
    return Experience(
        **(
            {"id": GroupId(name), "arrived": arrived, "initiated": 0, "rewards": (), "tokens": 1}
            | fields
        )
    )  # type: ignore[arg-type]


@st.composite
def buffers(draw: st.DrawFn, least: int = 0) -> list[Experience]:
    """Draw groups in any order, with few different values, so that ties are common."""
    size = draw(st.integers(least, 8))
    return [
        experience(
            f"g{arrived}",
            arrived,
            initiated=draw(st.integers(0, VERSION + 1)),
            rewards=tuple(draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=4))),
            tokens=draw(st.integers(0, 5)),
            measures=Measures(
                ratio=draw(st.sampled_from([None, 0.5, 1.0, 2.0, 3.0])),
                entropy=draw(st.sampled_from([None, 0.0, 0.5, 1.0])),
                td_error=draw(st.sampled_from([None, 0.0, 0.25, 4.0])),
            ),
        )
        for arrived in draw(st.permutations(range(size)))
    ]


def better(one: Experience, other: Experience, strategy: str) -> bool:
    """`one` is to be chosen before `other`, going by the strategy alone."""
    match strategy:
        case "fifo":
            return one.arrived < other.arrived
        case "newest":
            return one.arrived > other.arrived
        case "advantage":
            return spread(one) > spread(other)
        case "ratio":
            return distance(one) < distance(other)
        case "entropy":
            return known(one.measures.entropy) > known(other.measures.entropy)
        case "td_error":
            return known(one.measures.td_error) > known(other.measures.td_error)
    raise AssertionError(strategy)


def spread(one: Experience) -> Fraction:
    values = [Fraction(reward) for reward in one.rewards]
    if not values:
        return Fraction(0)
    mean = sum(values) / len(values)
    return sum((abs(value - mean) for value in values), Fraction(0)) / len(values)


def distance(one: Experience) -> float:
    """Return the factor by which the ratio is off, either way."""
    ratio = one.measures.ratio
    return float("inf") if ratio is None else max(ratio, 1 / ratio)


def known(value: float | None) -> float:
    """Return a measured value, or less than any measured value."""
    return -1.0 if value is None else value


GREEDY = ("fifo", "newest", "advantage", "ratio", "entropy", "td_error")


@settings(max_examples=examples(300))
@given(buffers(), st.integers(1, 9), st.sampled_from(GREEDY))
def test_a_batch_is_the_best_by_its_strategy(
    buffer: list[Experience], wanted: int, strategy: SampleName
) -> None:
    """The best comes first; among equals, the earlier arrival."""
    left = sorted(buffer, key=lambda one: one.arrived)
    expected: list[GroupId] = []
    while left and len(expected) < wanted:
        best = left[0]
        for one in left:
            if better(one, best, strategy):
                best = one
        left.remove(best)
        expected.append(best.id)
    chosen = sample(buffer, wanted, strategy=strategy, version=VERSION)
    assert chosen == (expected if len(expected) == wanted else [])


@given(buffers())
def test_advantages_are_exact_up_to_rounding(buffer: list[Experience]) -> None:
    for one in buffer:
        assert advantage(one) == pytest.approx(float(spread(one)), abs=1e-12)


def test_mirrored_rewards_tie() -> None:
    buffer = [
        experience("first", 0, rewards=(1.0, 1.0, 0.0)),
        experience("second", 1, rewards=(0.0, 0.0, 1.0)),
    ]
    assert advantage(buffer[0]) == advantage(buffer[1])
    assert sample(buffer, 1, strategy="advantage", version=VERSION) == ["first"]


@given(buffers(least=1), st.data(), st.sampled_from(get_args(SampleName)))
def test_batches_are_whole_or_not_at_all(
    buffer: list[Experience], data: st.DataObject, strategy: SampleName
) -> None:
    wanted = data.draw(st.integers(1, len(buffer) + 2))
    draws = data.draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=wanted, max_size=wanted))
    chosen = sample(buffer, wanted, strategy=strategy, version=VERSION, draws=draws)
    assert len(chosen) == (wanted if wanted <= len(buffer) else 0)
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= {one.id for one in buffer}
    in_another_order = sample(buffer[::-1], wanted, strategy=strategy, version=VERSION, draws=draws)
    assert chosen == in_another_order


@given(buffers(least=1), st.data())
def test_stale_groups_are_drawn_less_often(buffer: list[Experience], data: st.DataObject) -> None:
    """Without replacement: each draw falls into a share of the line that is in
    proportion to 2 ** -staleness.
    """
    steps = data.draw(st.lists(st.integers(0, 63), min_size=len(buffer), max_size=len(buffer)))
    draws = [(2 * step + 1) / 128 for step in steps]
    left = sorted(buffer, key=lambda one: (abs(VERSION - one.initiated), one.arrived))
    expected = []
    for draw in draws:
        shares = [Fraction(1, 2 ** abs(VERSION - one.initiated)) for one in left]
        at = Fraction(draw) * sum(shares)
        index = 0
        while index < len(left) - 1 and at >= shares[index]:
            at -= shares[index]
            index += 1
        expected.append(left.pop(index).id)
    chosen = sample(buffer, len(buffer), strategy="staleness", version=VERSION, draws=draws)
    assert chosen == expected


def test_each_version_halves_the_chance() -> None:
    buffer = [experience("old", 0, initiated=4), experience("new", 1, initiated=6)]
    first = Counter(
        sample(buffer, 1, strategy="staleness", version=VERSION, draws=[(step + 0.5) / 1000])[0]
        for step in range(1000)
    )
    assert first == {"new": 800, "old": 200}


def test_groups_of_very_old_weights_can_still_be_drawn() -> None:
    """Once no fresher one is left, they are drawn as if they were fresh."""
    buffer = [
        experience("a", 0, initiated=0),
        experience("b", 1, initiated=0),
        experience("new", 2, initiated=10**6),
    ]
    expected = ["new", "b", "a"]
    assert sample(buffer, 3, strategy="staleness", version=10**6, draws=[0.9, 0.9, 0.9]) == expected


# Eviction.


@settings(max_examples=examples(300))
@given(buffers(), st.integers(1, 9))
def test_evicts_the_fewest_groups_that_keep_the_bound(
    buffer: list[Experience], max_groups: int
) -> None:
    """While there are too many groups, the stalest one goes."""
    left = sorted(buffer, key=lambda one: one.arrived)
    expected = []
    while len(left) > max_groups:
        weights = [abs(VERSION - one.initiated) for one in left]
        expected.append(left.pop(weights.index(max(weights))))
    evicted = evict(buffer, version=VERSION, max_groups=max_groups)
    assert evicted == [one.id for one in expected]


# Functions of the user


def last_two(buffer: Sequence[Experience], version: int) -> list[GroupId]:
    assert version == VERSION
    assert [one.arrived for one in buffer] == sorted(one.arrived for one in buffer)
    return [one.id for one in buffer[-2:]]


def test_a_function_samples() -> None:
    buffer = [experience(name, arrived) for arrived, name in enumerate("abc")][::-1]
    assert sample(buffer, 2, strategy=last_two, version=VERSION) == ["b", "c"]
    assert sample(buffer, 1, strategy=last_two, version=VERSION) == ["b"]
    assert sample(buffer, 3, strategy=last_two, version=VERSION) == []


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (["z"], "must name groups of the buffer, got 'z'"),
        (["a", "a"], "must name each group once, got 'a' twice"),
        (None, "must give a list of group ids, got None"),
        ([["a"]], "must give a list of group ids"),
    ],
)
def test_refuses_an_invalid_answer_of_a_function(answer: list[GroupId], message: str) -> None:
    buffer = [experience("a"), experience("b", 1)]
    with pytest.raises(ValueError, match=message):
        sample(buffer, 1, strategy=lambda _buffer, _version: answer, version=VERSION)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"wanted": 0, "strategy": "fifo"}, "wanted must be at least 1, got 0"),
        (
            {"wanted": 2, "strategy": "staleness", "draws": [0.5]},
            "draws must have a number for each of 2 groups, got 1",
        ),
        (
            {"wanted": 1, "strategy": "staleness", "draws": [1.0]},
            "draws must be at least 0 and below 1, got 1.0",
        ),
        (
            {"wanted": 1, "strategy": "ratio"},
            "ratio must be above 0 and finite, got 0.0 for group a",
        ),
    ],
)
def test_refuses_invalid_arguments(fields: dict[str, object], message: str) -> None:
    buffer = [experience("a", measures=Measures(ratio=0.0)), experience("b", 1)]
    with pytest.raises(ValueError, match=message):
        sample(buffer, version=VERSION, **fields)  # type: ignore[arg-type]


def test_a_draw_may_be_zero() -> None:
    buffer = [experience("a"), experience("b", 1)]
    assert len(sample(buffer, 1, strategy="staleness", version=VERSION, draws=[0.0])) == 1


@pytest.mark.parametrize(
    ("strategy", "least"),
    [("ratio", "above 0"), ("entropy", "at least 0"), ("td_error", "at least 0")],
)
@pytest.mark.parametrize("value", [float("inf"), float("nan"), -0.5])
def test_refuses_a_measure_that_is_no_number_or_negative(
    strategy: SampleName, least: str, value: float
) -> None:
    buffer = [experience("a", measures=Measures(**{str(strategy): value}))]
    message = f"{strategy} must be {least} and finite, got {value} for group a"
    with pytest.raises(ValueError, match=re.escape(message)):
        sample(buffer, 1, strategy=strategy, version=VERSION)


def test_what_is_measured_is_a_matter_of_the_strategy() -> None:
    def asks(experiences: Sequence[Experience], version: int) -> list[GroupId]:
        return []

    measured = [name for name in get_args(SampleName) if is_measured(name)]
    assert measured == ["ratio", "entropy", "td_error"]
    assert not is_measured("package.module:function")
    assert not is_measured(asks)
    asks.measures = True  # type: ignore[attr-defined]
    assert is_measured(asks)


def test_refuses_an_invalid_bound() -> None:
    with pytest.raises(ValueError, match="max_groups must be at least 1, got 0"):
        evict([], version=VERSION, max_groups=0)


def test_a_group_is_in_the_buffer_once() -> None:
    with pytest.raises(ValueError, match="each be there once"):
        sample([experience("a"), experience("a", 1)], 1, strategy="fifo", version=VERSION)


def test_a_function_must_be_deterministic() -> None:
    buffer = [experience("first", 0), experience("second", 1)]
    turns = itertools.count()

    def fickle(experiences: Sequence[Experience], version: int) -> list[GroupId]:
        ids = [one.id for one in experiences]
        return ids if next(turns) % 2 else ids[::-1]

    with pytest.raises(
        ValueError,
        match=r"must answer the same .*, got \['second', 'first'\] and then \['first', 'second'\]",
    ):
        sample(buffer, 1, strategy=fickle, version=VERSION)
    assert sample(
        buffer, 2, strategy=lambda groups, _: (one.id for one in groups), version=VERSION
    ) == ["first", "second"]


def trained(left: Sequence[int], ranks: Sequence[int], per_step: int, *, due: bool) -> int:
    """Return how many groups steps train on before they are too old, if no group comes
    in: each step takes the best by rank, with `due` after those that are due, otherwise
    the oldest ones.
    """
    names = [GroupId(str(number)) for number in range(len(left))]
    buffer, count = dict(zip(names, left, strict=True)), 0
    while buffer:
        chosen = sorted(buffer, key=lambda name: ranks[int(name)] if due else buffer[name])
        first = due_now(buffer, chosen[:per_step], per_step=per_step) if due else []
        taken = list(dict.fromkeys([*first, *chosen]))[:per_step]
        count += len(taken)
        buffer = {
            name: steps - 1 for name, steps in buffer.items() if name not in taken and steps > 0
        }
    return count


@settings(max_examples=examples(300))
@given(left=st.lists(st.integers(0, 3), max_size=8), per_step=st.integers(1, 3), data=st.data())
def test_no_choice_makes_a_group_too_old(
    left: list[int], per_step: int, data: st.DataObject
) -> None:
    """The oldest first is the order that loses the fewest."""
    ranks = data.draw(st.permutations(range(len(left))))
    most = trained(left, ranks, per_step, due=False)
    assert trained(left, ranks, per_step, due=True) == most


def test_no_more_groups_are_due_than_must_be_taken() -> None:
    old, older, fresh = GroupId("old"), GroupId("older"), GroupId("fresh")
    assert due_now({old: 1, fresh: 2}, [fresh], per_step=1) == []
    assert due_now({old: 1, older: 0, fresh: 2}, [fresh], per_step=1) == [older]
    assert due_now({old: 1, older: 1, fresh: 2}, [older, fresh], per_step=1) == [older]
    assert due_now({old: 1, older: 1, fresh: 2}, [fresh], per_step=2) == []
    assert due_now({}, [], per_step=1) == []
