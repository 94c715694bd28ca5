"""The engine on which a turn should finish first equals that of a slow reference, which
lets slots become free one after the other.
"""

import heapq

from hypothesis import assume, given
from hypothesis import strategies as st

from rollweave.core.mechanisms.placement.elastic import Site, earliest
from rollweave.schema.base import EngineId

SECONDS = st.floats(0.0, 10.0)
SITES = st.lists(
    st.builds(
        Site,
        id=st.just(EngineId("")),
        active=st.integers(0, 24),
        slots=st.integers(1, 16),
        ahead=st.integers(0, 24),
        missing=st.integers(0, 32_000),
        price_s=st.floats(0.0, 1e-3),
        token_s=st.floats(1e-4, 0.1),
        turn_s=st.floats(0.1, 60.0),
        borrowed=st.booleans(),
    ),
    min_size=1,
    max_size=6,
).map(
    lambda sites: [
        Site(
            **{
                **{name: getattr(site, name) for name in site.__struct_fields__},
                "id": EngineId(f"e{number}"),
            }
        )
        for number, site in enumerate(sites)
    ]
)


def simulated_s(site: Site, tokens: float) -> float:
    """Return the seconds by a queue for the slots, which turns leave evenly spaced."""
    leaves = [(number + 1) * site.turn_s / site.slots for number in range(site.active)]
    heapq.heapify(leaves)
    while len(leaves) > site.slots:
        heapq.heappop(leaves)
    now = 0.0 if site.active < site.slots else (site.active - site.slots) * site.turn_s / site.slots
    last = now
    for _ in range(site.ahead + 1):
        if len(leaves) >= site.slots:
            now = heapq.heappop(leaves)
        heapq.heappush(leaves, max(now, last) + site.turn_s)
        last = now
    beside = min(site.active, site.slots)
    delays = [site.missing * site.price_s for _ in range(1 + beside)]
    return now + sum(delays) + tokens * site.token_s


@given(site=SITES, tokens=st.floats(1.0, 4000.0))
def test_a_turn_waits_for_as_many_slots_as_there_are_turns_before_it(
    site: list[Site], tokens: float
) -> None:
    for one in site:
        if one.active == one.slots and one.ahead < one.slots:
            assert abs(one.finish_s(tokens) - simulated_s(one, tokens)) < 1e-6 * (
                1 + one.finish_s(tokens)
            )
        if one.active + one.ahead < one.slots:
            assert one.wait_s == 0.0


@given(sites=SITES, tokens=st.floats(1.0, 4000.0))
def test_no_other_engine_is_earlier(sites: list[Site], tokens: float) -> None:
    chosen = earliest(sites, tokens=tokens, affine=None)
    finish = {site.id: site.finish_s(tokens) for site in sites}
    assert chosen is not None
    assert finish[chosen] == min(finish.values())


@given(sites=SITES, tokens=st.floats(1.0, 4000.0))
def test_among_equals_the_affine_engine_is_first_then_a_dedicated_one(
    sites: list[Site], tokens: float
) -> None:
    best = min(site.finish_s(tokens) for site in sites)
    equal = [site for site in sites if site.finish_s(tokens) == best]
    for site in equal:
        assert earliest(sites, tokens=tokens, affine=site.id) == site.id
    assume(any(not site.borrowed for site in equal))
    chosen = earliest(sites, tokens=tokens, affine=None)
    assert not next(site for site in equal if site.id == chosen).borrowed


def test_without_engines_there_is_none() -> None:
    assert earliest([], tokens=1.0, affine=None) is None
