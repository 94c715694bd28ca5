"""Priorities, routing, migration and their presets: each rule against what it says."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.core.policy.migration import GAIN, Request, retarget, transfer_epoch, worth_it
from rollweave.core.policy.priority import (
    MARGIN,
    OVERTAKES,
    RANKS,
    RATIO,
    UNKNOWN,
    TurnView,
    is_overdue,
    level_of,
    overdue_rank,
)
from rollweave.core.policy.routing import SKEW, EngineLoad, choose
from rollweave.core.policy.scheduling import Scheduling, scheduling
from rollweave.schema.base import EngineId
from rollweave.schema.config.sections import AblationConfig, RolloutConfig
from tests.support.properties import examples

A, B, C = EngineId("a"), EngineId("b"), EngineId("c")


def view(**fields: float) -> TurnView:
    return TurnView(**{"launched_at": 0.0, "arrival": 0, "output_tokens": 0, "level": 0, **fields})


@pytest.mark.parametrize(
    ("name", "first", "then"),
    [
        ("fcfs", {"launched_at": 1.0}, {"launched_at": 2.0}),
        ("round_robin", {"arrival": 3}, {"arrival": 4}),
        ("shortest_first", {"output_tokens": 10}, {"output_tokens": 11}),
        ("longest_first", {"level": 5}, {"level": 4}),
    ],
)
def test_who_runs_first(name: str, first: dict[str, float], then: dict[str, float]) -> None:
    assert RANKS[name](view(**first)) > RANKS[name](view(**then))


@settings(max_examples=examples(200))
@given(tokens=st.floats(1, 1e6), wobble=st.floats(-0.09, 0.09))
def test_a_prediction_that_wobbles_keeps_its_level(tokens: float, wobble: float) -> None:
    """Hysteresis: less than the margin up or down from where the level was entered
    changes nothing.
    """
    level = level_of(tokens, None)
    assert level_of(tokens * RATIO ** (wobble * MARGIN / 0.1), level) == level
    assert level_of(tokens * RATIO**2, level) > level
    assert level_of(tokens / RATIO**2, level) < level or tokens < RATIO**2


@given(st.floats(1, 1e9))
def test_levels_grow_with_lengths_below_the_unknown(tokens: float) -> None:
    assert 0 <= level_of(tokens, None) <= level_of(2 * tokens, None) < UNKNOWN


def test_overdue_turns_outrank_all_and_come_in_order() -> None:
    assert overdue_rank(1) > overdue_rank(2) > RANKS["longest_first"](view(level=UNKNOWN))
    assert not is_overdue(OVERTAKES * 3, slots=3)
    assert is_overdue(OVERTAKES * 3 + 1, slots=3)


# Routing.


def load(name: EngineId, active: int, slots: int = 4, lowest: float = -math.inf) -> EngineLoad:
    return EngineLoad(id=name, active=active, slots=slots, lowest=lowest)


def test_placements_choose_as_they_say() -> None:
    engines = {A: load(A, 3), B: load(B, 0)}
    assert choose(engines, affine=A) == A
    assert choose(engines, affine=A, placement="least_load") == B
    assert choose(engines, affine=A, placement="hybrid") == A
    skewed = {A: load(A, int(SKEW) + 1, 64), B: load(B, 1, 64)}
    assert choose(skewed, affine=A, placement="hybrid") == B
    assert choose(skewed, affine=A, avoid=[B], placement="hybrid") == A
    nearly = {A: load(A, int(SKEW), 64), B: load(B, 1, 64)}
    assert choose(nearly, affine=A, placement="hybrid") == A
    assert choose({A: load(A, 3, 4), B: load(B, 4, 16)}, affine=A, placement="least_load") == B
    assert choose({A: load(A, 3), B: load(B, 0)}, affine=A, avoid=[A, B]) == A


@given(
    before=st.lists(st.integers(1, 900), min_size=2, max_size=40),
    after=st.lists(st.integers(1, 900), min_size=1, max_size=80),
    old=st.integers(1, 4),
)
def test_a_newcomer_gets_its_share_and_is_not_buried(
    before: list[int], after: list[int], old: int
) -> None:
    """Turns without an engine, of so many tokens: nobody is ahead of another by more
    than its last turn.
    """
    tokens = {EngineId(f"e{number}"): 0 for number in range(old)}
    last: dict[EngineId, int] = {}
    for number, weight in enumerate([*before, *after]):
        if number == len(before):
            tokens[EngineId("new")] = 0
        loads = {
            name: EngineLoad(id=name, active=0, slots=100, tokens=count)
            for name, count in tokens.items()
        }
        chosen = choose(loads, affine=None)
        assert chosen is not None
        assert tokens[chosen] == min(tokens.values())
        tokens[chosen] += weight
        last[chosen] = weight
    if tokens["new"] > max(count for name, count in tokens.items() if name != "new"):
        assert tokens["new"] - last[EngineId("new")] <= min(
            count for name, count in tokens.items() if name != "new"
        )


def test_preemption_takes_the_slot_of_a_lower_rank_only() -> None:
    full = {A: load(A, 4, lowest=2.0), B: load(B, 4, lowest=1.0)}
    assert choose(full, affine=A, rank=3.0) is None
    assert choose(full, affine=A, rank=3.0, preempts=True) == A
    assert choose(full, affine=A, rank=1.5, preempts=True) == B
    assert choose(full, affine=A, rank=1.0, preempts=True) is None
    assert choose(full, affine=B, avoid=[B], rank=1.5, preempts=True) is None
    half = {A: load(A, 4, lowest=2.0), B: load(B, 3, lowest=4.0)}
    assert choose(half, affine=A, rank=3.0, preempts=True) == B, "a free slot comes first"


def test_a_turn_runs_at_once_on_a_free_slot_or_in_place_of_a_lower_rank() -> None:
    assert load(A, 3).runs(0.0, preempts=False)
    full = load(A, 4, lowest=2.0)
    assert not full.runs(3.0, preempts=False)
    assert full.runs(3.0, preempts=True)
    assert not full.runs(2.0, preempts=True)
    assert not full.runs(1.0, preempts=True)


# Migration.


@settings(max_examples=examples(200))
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(sum), active=st.integers(1, 40)
)
def test_ranks_fill_the_shares_in_proportion(sizes: list[int], active: int) -> None:
    targets = [retarget(sizes, rank=rank, active=active) for rank in range(active)]
    assert targets == sorted(targets)
    assert all(sizes[target] for target in targets), "nobody belongs to an empty share"
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
def test_ranks_that_cannot_be(sizes: list[int], rank: int, active: int, text: str) -> None:
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


# Presets.


@pytest.mark.parametrize("placement", ["affinity", "least_load", "pinned", "partition"])
@pytest.mark.parametrize("priority", ["fcfs", "round_robin", "shortest_first", "longest_first"])
def test_what_follows_from_the_choices(priority: str, placement: str) -> None:
    found = Scheduling(priority=priority, placement=placement, migration="never")
    by_rank = placement == "partition"
    assert found.by_rank is by_rank
    assert found.predicts is (by_rank or priority == "longest_first")
    assert found.preempts is (priority in ("shortest_first", "longest_first"))
    assert found.homes is (by_rank or placement == "pinned")
    assert found.keeps is (by_rank and priority in ("fcfs", "longest_first"))


def test_presets_and_what_is_mixed_into_them() -> None:
    assert scheduling(RolloutConfig(), AblationConfig()).placement == "affinity"
    assert not scheduling(RolloutConfig(), AblationConfig()).predicts
    overridden = scheduling(RolloutConfig(scheduling="trajectory"), AblationConfig())
    assert (overridden.priority, overridden.placement, overridden.migration) == (
        "longest_first",
        "partition",
        "gain",
    )
    assert overridden.predicts
    assert overridden.preempts
    pinned = scheduling(
        RolloutConfig(scheduling="trajectory"), AblationConfig(policies=("pinned",))
    )
    assert pinned.migration == "never"
    assert pinned.homes
    assert not pinned.by_rank
