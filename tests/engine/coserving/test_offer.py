"""What a serving engine offers to a run, against the plain mean of its samples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.engine.coserving.offer import BUCKET_S, BUSY_S, BUSY_USE, IDLE_USE, WINDOW_S, Offer
from rollweave.schema.serving import EngineStats, LendingStats

PERCENT = st.integers(0, 100)


def stats(used: int, *, budget: int = 4) -> EngineStats:
    zero = dict.fromkeys(LendingStats.__struct_fields__, 0)
    lending = LendingStats(**{**zero, "lent": True, "budget_pages": budget})
    return EngineStats(
        version=0, running=0, waiting=0, kv_used_tokens=used, kv_total_tokens=100, lending=lending
    )


@given(uses=st.lists(PERCENT, min_size=1, max_size=400), every_s=st.sampled_from([1, 7, 15, 60]))
def test_the_use_is_the_mean_of_the_last_hour(uses: list[int], every_s: int) -> None:
    offer, buckets = Offer(), list[tuple[float, list[int]]]()
    for number, use in enumerate(uses):
        now = float(number * every_s)
        offer.observe(now, stats(use))
        if not buckets or now - buckets[-1][0] >= BUCKET_S:
            buckets.append((now, []))
        buckets[-1][1].append(use)
    kept = [use for began, bucket in buckets if now - began <= WINDOW_S for use in bucket]
    assert offer.state().kv_use == pytest.approx(sum(kept) / len(kept) / 100)


def test_an_engine_that_stays_busy_is_recalled_until_it_is_idle() -> None:
    offer, now = Offer(), 0.0

    def observe(use: float, seconds: float) -> bool:
        nonlocal now
        for _ in range(round(seconds)):
            now += 1.0
            offer.observe(now, stats(round(100 * use)))
        return offer.state().recalled

    assert not observe(1.0, BUSY_S / 2), "a short peak is no reason"
    assert observe(1.0, BUSY_S)
    assert observe((BUSY_USE + IDLE_USE) / 2, 3 * BUSY_S), "it is not idle yet"
    assert not observe(IDLE_USE / 2, 2 * BUSY_S)
    assert not observe((BUSY_USE + IDLE_USE) / 2, 3 * BUSY_S), "it is not busy"


def test_an_engine_without_memory_for_rollouts_takes_none_and_stays_lent() -> None:
    offer = Offer()
    offer.observe(0.0, stats(10, budget=0))
    assert (offer.state().takes, offer.state().recalled) == (False, False)
    offer.observe(1.0, stats(10))
    assert offer.state().takes
    offer.recall()
    offer.observe(2.0, stats(10))
    assert offer.state().recalled, "it was taken back for good"
