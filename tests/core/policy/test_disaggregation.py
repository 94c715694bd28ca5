"""The choice of the engine that computes a prompt equals a slow reference: the least
sum of all delays.
"""

from hypothesis import assume, given
from hypothesis import strategies as st

from rollweave.core.policy.disaggregation import LEAST_TOKENS, PrefillSite, prefill_site
from rollweave.schema.base import EngineId

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
