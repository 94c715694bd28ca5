"""Migration: targets by rank, moves that pay, and epochs of transfers."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.core.mechanisms.placement.policy.migration import (
    GAIN,
    Request,
    retarget,
    transfer_epoch,
    worth_it,
)
from rollweave.schema.base import EngineId
from tests.support.properties import examples

# Migration.


@settings(max_examples=examples(200))
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(sum), active=st.integers(1, 40)
)
def test_ranks_fill_the_shares_in_proportion(sizes: list[int], active: int) -> None:
    targets = [retarget(sizes, rank=rank, active=active) for rank in range(active)]
    assert targets == sorted(targets)
    assert all(sizes[target] for target in targets), "an empty share gets no rank"
    for index, size in enumerate(sizes):
        assert abs(targets.count(index) - size * active / sum(sizes)) < 1
    if active == sum(sizes):
        assert [targets.count(index) for index in range(len(sizes))] == sizes


@pytest.mark.parametrize(
    ("sizes", "rank", "active", "text"),
    [
        ([], 0, 1, "sizes"),
        ([0], 0, 1, "sizes"),
        ([2, -1], 0, 1, "sizes"),
        ([1], 1, 1, "rank"),
        ([1], -1, 1, "rank"),
    ],
)
def test_refuses_invalid_ranks(sizes: list[int], rank: int, active: int, text: str) -> None:
    with pytest.raises(ValueError, match=f"{text} must be"):
        retarget(sizes, rank=rank, active=active)


def test_a_move_pays_where_the_later_engine_ends_clearly_earlier() -> None:
    assert worth_it((100.0, 90.0), (10.0, 20.0), exposed_s=1.0)
    assert not worth_it((100.0, 90.0), (10.0, 20.0), exposed_s=10.0)
    assert not worth_it((100.0, 90.0), (99.0, 105.0), exposed_s=0.0)
    assert not worth_it((100.0, 100.0 - 50 * GAIN), (10.0, 20.0), exposed_s=0.0)
    assert worth_it((50.0, 10.0), (100.0, 60.0), exposed_s=0.0), "the target is the later one"


def test_a_move_that_saves_just_its_cost_does_not_pay() -> None:
    assert not worth_it((100.0, 0.0), (0.0, 92.0), exposed_s=3.0)
    assert worth_it((100.0, 0.0), (0.0, 91.9), exposed_s=3.0)


REQUESTS = st.lists(
    st.tuples(st.integers(1, 5), st.sampled_from("abcdef"), st.sampled_from("abcdef")).filter(
        lambda r: r[1] != r[2]
    ),
    max_size=8,
)


@settings(max_examples=examples(200))
@given(drawn=REQUESTS, busy=st.sets(st.sampled_from("abcdef"), max_size=3))
def test_an_epoch_is_greedy_by_length_and_shares_no_engine(
    drawn: list[tuple[int, str, str]], busy: set[str]
) -> None:
    requests = [
        Request(
            number=number, length=float(length), source=EngineId(source), target=EngineId(target)
        )
        for number, (length, source, target) in enumerate(drawn)
    ]
    chosen = transfer_epoch(requests, [EngineId(name) for name in busy])
    ends = [end for request in chosen for end in (request.source, request.target)]
    assert len(set(ends)) == len(ends)
    assert not busy & set(ends)
    for left in [request for request in requests if request not in chosen]:
        longer = [
            other for other in chosen if (-other.length, other.number) < (-left.length, left.number)
        ]
        used = set(itertools.chain(busy, *((other.source, other.target) for other in longer)))
        assert used & {left.source, left.target}, "a longer one or a busy engine stands in its way"
