"""Routing, placements and preemption, each against its rule in plain Python."""

import math

import msgspec
from hypothesis import assume, given
from hypothesis import strategies as st

from rollweave.core.policy.routing import (
    LEAST_TOKENS,
    SKEW,
    EngineLoad,
    PrefillSite,
    choose,
    next_pool,
    prefill_site,
    serving_pool,
)
from rollweave.schema.base import EngineId

loads = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 4), st.integers(0, 9)), min_size=0, max_size=5
).map(
    lambda engines: [
        EngineLoad(
            id=EngineId(f"e{index}"),
            active=min(active, slots),
            slots=slots,
            tokens=min(active, slots) * tokens,
        )
        for index, (active, slots, tokens) in enumerate(engines)
    ]
)


@given(
    engines=loads,
    affine=st.integers(0, 5),
    avoid=st.sets(st.integers(0, 5)),
    placement=st.sampled_from(["affinity", "least_load"]),
)
def test_routing_prefers_affinity_then_the_least_load_and_never_overfills(
    engines: list[EngineLoad], affine: int, avoid: set[int], placement: str
) -> None:
    avoided = [EngineId(f"e{index}") for index in sorted(avoid)]
    known = {engine.id: engine for engine in engines}
    chosen = choose(known, affine=EngineId(f"e{affine}"), avoid=avoided, placement=placement)
    free = {engine.id: engine for engine in engines if engine.active < engine.slots}
    if not free:
        assert chosen is None
        return
    assert chosen in free
    good = {name: engine for name, engine in free.items() if name not in avoided} or free
    assert chosen in good
    if avoid and not free.keys() - avoided and f"e{affine}" in free:
        assert chosen == f"e{affine}", "its cache, where all have failed the turn"
    elif placement == "least_load":
        assert good[chosen].active / good[chosen].slots == min(
            e.active / e.slots for e in good.values()
        )
    elif f"e{affine}" in good:
        assert chosen == f"e{affine}"
    else:
        assert good[chosen].tokens / good[chosen].slots == min(
            e.tokens / e.slots for e in good.values()
        )


@given(
    engines=loads,
    borrowed=st.sets(st.integers(0, 4)),
    affine=st.integers(0, 5),
    avoid=st.sets(st.integers(0, 5)),
)
def test_a_turn_returns_to_a_borrowed_engine_only_if_there_is_no_other(
    engines: list[EngineLoad], borrowed: set[int], affine: int, avoid: set[int]
) -> None:
    """Dedicated engines come before borrowed ones, but for the one with the prefix."""
    avoided = [EngineId(f"e{index}") for index in sorted(avoid)]
    lent = {EngineId(f"e{index}") for index in borrowed}
    known = {
        engine.id: msgspec.structs.replace(engine, borrowed=engine.id in lent) for engine in engines
    }
    chosen = choose(known, affine=EngineId(f"e{affine}"), avoid=avoided)
    gave_back = lent & {*avoided}
    others = known.keys() - gave_back
    free = [engine.id for engine in known.values() if engine.active < engine.slots]
    may = [name for name in free if name in others] if others else free
    if not may:
        assert chosen is None
        return
    assert chosen in may
    good = [name for name in may if name not in avoided]
    if f"e{affine}" in good:
        assert chosen == f"e{affine}"
    elif any(name not in lent for name in good):
        assert chosen not in lent


A, B, C = EngineId("a"), EngineId("b"), EngineId("c")


def load(name: EngineId, active: int, slots: int = 4, lowest: float = -math.inf) -> EngineLoad:
    return EngineLoad(id=name, active=active, slots=slots, lowest=lowest)


def test_placements_choose_by_their_rules() -> None:
    engines = {A: load(A, 3), B: load(B, 0)}
    assert choose(engines, affine=A) == A
    assert choose(engines, affine=A, placement="least_load") == B
    assert choose(engines, affine=A, placement="hybrid") == A
    skewed = {A: load(A, int(SKEW) + 1, 64), B: load(B, 1, 64)}
    assert choose(skewed, affine=A, placement="hybrid") == B
    assert choose(skewed, affine=A) == A
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
def test_a_new_engine_gets_its_share_without_overload(
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


pools = st.sampled_from(["compute", "bandwidth", "old"])


@given(preferred=st.lists(pools, unique=True), live=st.sets(pools))
def test_the_first_live_pool_serves_and_any_engine_if_there_is_none(
    preferred: list[str], live: set[str]
) -> None:
    expected = None
    for pool in reversed(preferred):
        if pool in live:
            expected = pool
    assert serving_pool(preferred, live) == expected


@given(shares=st.dictionaries(pools, st.floats(0.01, 1.0), min_size=1), count=st.integers(1, 60))
def test_trajectories_follow_the_shares_at_any_time(shares: dict[str, float], count: int) -> None:
    given_to: dict[str, int] = {}
    for number in range(1, count + 1):
        pool = next_pool(shares, given_to)
        given_to[pool] = given_to.get(pool, 0) + 1
        for name, share in shares.items():
            wanted = share / sum(shares.values()) * number
            assert given_to.get(name, 0) < wanted + 1
            assert given_to.get(name, 0) > wanted - len(shares)


PRICES = st.floats(1e-6, 1e-2)
TOKENS = st.integers(0, 40_000)
SITES = st.lists(st.tuples(TOKENS, TOKENS, PRICES), max_size=4).map(
    lambda every: [
        PrefillSite(id=EngineId(f"e{number}"), ahead=ahead, missing=missing, price=price)
        for number, (ahead, missing, price) in enumerate(every)
    ]
)


@given(
    sites=SITES,
    missing=st.integers(LEAST_TOKENS, 40_000),
    price=PRICES,
    beside=st.integers(0, 256),
    move=st.floats(0, 1e-3),
    trial=st.booleans(),
)
def test_the_choice_has_the_smallest_sum_of_delays(
    sites: list[PrefillSite], missing: int, price: float, beside: int, move: float, trial: bool
) -> None:
    delays: dict[EngineId | None, float] = {
        None: sum(missing * price for _turn in range(1 + beside))
    }
    for site in sites:
        waits = site.ahead * site.price
        delays[site.id] = waits + site.missing * site.price + missing * move
    least = min(delays.values())
    apart = sorted(delays.values())
    assume(len(apart) < 2 or apart[1] - apart[0] > 1e-9 * apart[1])
    chosen = prefill_site(
        sites, missing=missing, price=price, beside=beside, move=move, trial=trial
    )
    if not trial:
        assert delays[chosen] == least
    elif sites:
        assert (chosen is None) == (delays[None] != least), "the other way"


@given(sites=SITES, missing=st.integers(0, LEAST_TOKENS - 1), trial=st.booleans())
def test_a_short_suffix_stays(sites: list[PrefillSite], missing: int, trial: bool) -> None:
    assert prefill_site(sites, missing=missing, price=1.0, beside=9, move=0.0, trial=trial) is None


def test_without_a_prefill_engine_it_stays() -> None:
    assert prefill_site([], missing=9999, price=1.0, beside=9, move=0.0, trial=True) is None
