"""Relay chains: the source of each relay, the pieces, and the effects of a lost
relay.
"""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.core.policy.relay import (
    CHUNK_BYTES,
    LEAST_CHUNK_BYTES,
    PROBE,
    broadcast_s,
    chunk_bytes,
    chunk_count,
    join_at,
    sends_changes,
)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1, exclude_max=True)), max_size=20),
    st.sampled_from("abc"),
)
def test_a_version_crosses_each_link_between_sites_once(
    changes: list[tuple[str, float]], first: str
) -> None:
    """Relays join and leave in any order."""
    chain: list[str] = []
    for site, chance in changes:
        if chance < 0.3 and chain:
            del chain[int(chance / 0.3 * len(chain))]
        else:
            master = chance > 0.9 and site == first
            chain.insert(join_at(chain, site, first=first, master=master), site)
        groups = [site for site, _ in itertools.groupby(chain)]
        assert len(groups) == len(set(groups))
        assert first not in groups[1:]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: broadcast_s(1, nodes=0, chunks=1, start_s=0, byte_s=0),
            "nodes must be at least 1, got 0",
        ),
        (
            lambda: broadcast_s(1, nodes=1, chunks=0, start_s=0, byte_s=0),
            "chunks must be at least 1, got 0",
        ),
        (lambda: chunk_count(-1, nodes=2, start_s=0, byte_s=0), "nbytes must be at least 0"),
        (
            lambda: broadcast_s(1, nodes=1, chunks=1, start_s=-1, byte_s=0),
            "start_s must be at least 0 and finite, got -1",
        ),
        (
            lambda: chunk_bytes(1, nodes=2, start_s=float("nan"), byte_s=0),
            "start_s must be at least 0",
        ),
    ],
)
def test_what_means_nothing_is_refused(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()


# How many chunks.


def pipeline_s(sizes: list[float], nodes: int, start_s: float, byte_s: float) -> float:
    """Return when the last relay has the last chunk, computed chunk by chunk and hop by
    hop: each hop sends one chunk at a time, in order.
    """
    free = [0.0] * (nodes - 1)
    for size in sizes:
        here = 0.0
        for hop in range(nodes - 1):
            here = free[hop] = max(here, free[hop]) + start_s + size * byte_s
    return max(free, default=0.0)


@given(
    st.integers(0, 10_000), st.integers(1, 9), st.integers(1, 30), st.floats(0, 2), st.floats(0, 2)
)
def test_the_formula_is_the_time_of_a_pipeline(
    nbytes: int, nodes: int, chunks: int, start_s: float, byte_s: float
) -> None:
    expected = pipeline_s([nbytes / chunks] * chunks, nodes, start_s, byte_s)
    assert broadcast_s(
        nbytes, nodes=nodes, chunks=chunks, start_s=start_s, byte_s=byte_s
    ) == pytest.approx(expected)


@given(
    st.integers(0, 400),
    st.integers(1, 60),
    st.one_of(st.just(0.0), st.floats(1e-6, 100)),
    st.one_of(st.just(0.0), st.floats(1e-6, 100)),
)
def test_no_other_number_of_chunks_is_sooner(
    nbytes: int, nodes: int, start_s: float, byte_s: float
) -> None:
    def seconds(chunks: int) -> float:
        return broadcast_s(nbytes, nodes=nodes, chunks=chunks, start_s=start_s, byte_s=byte_s)

    chosen = chunk_count(nbytes, nodes=nodes, start_s=start_s, byte_s=byte_s)
    least = min(seconds(chunks) for chunks in range(1, max(1, nbytes) + 1))
    assert 1 <= chosen <= max(1, nbytes)
    assert seconds(chosen) <= least * (1 + 1e-12)


def test_a_byte_is_not_divided_and_one_hop_takes_one_chunk() -> None:
    assert chunk_count(0, nodes=9, start_s=1e-9, byte_s=1.0) == 1
    assert chunk_count(1, nodes=9, start_s=1e-9, byte_s=1.0) == 1
    assert chunk_count(1000, nodes=2, start_s=1.0, byte_s=1.0) == 1
    assert chunk_count(1000, nodes=2, start_s=0.0, byte_s=1.0) == 1


@given(st.integers(0, 10**12), st.integers(1, 2000), st.floats(0, 1), st.floats(0, 1e-6))
def test_chunks_are_neither_too_long_nor_too_short(
    nbytes: int, nodes: int, start_s: float, byte_s: float
) -> None:
    size = chunk_bytes(nbytes, nodes=nodes, start_s=start_s, byte_s=byte_s)
    best = chunk_count(nbytes, nodes=nodes, start_s=start_s, byte_s=byte_s)
    assert LEAST_CHUNK_BYTES <= size <= CHUNK_BYTES
    assert size == min(CHUNK_BYTES, max(LEAST_CHUNK_BYTES, (nbytes + best - 1) // best))
    if LEAST_CHUNK_BYTES < size < CHUNK_BYTES:
        assert 0 <= size - nbytes / best < 1


def test_a_large_model_to_many_relays_takes_little_more_than_to_one() -> None:
    """App. C's conclusion, with its figures: 140 GB, 5 µs."""
    link = {"start_s": 5e-6, "byte_s": 1 / 50e9}
    times = [
        broadcast_s(
            140 * 10**9, nodes=nodes, chunks=chunk_count(140 * 10**9, nodes=nodes, **link), **link
        )
        for nodes in (2, 128, 2000)
    ]
    assert times[0] < times[1] < 1.04 * times[0]
    assert times[2] < 1.16 * times[0]


# Whole or delta.


@pytest.mark.parametrize(
    ("full_s", "changes_s", "chosen"),
    [
        *((None, None, True), (2.0, None, True), (None, 1.0, False), (2.0, 1.0, True)),
        *((1.0, 2.0, False), (1.0, 1.0, True)),
    ],
)
def test_the_sooner_form_is_sent_and_the_other_one_is_tried_now_and_then(
    full_s: float | None, changes_s: float | None, chosen: bool
) -> None:
    sent = [sends_changes(full_s, changes_s, number=number) for number in range(3 * PROBE)]
    known = full_s is not None and changes_s is not None
    assert sent.count(not chosen) == (3 if known else 0)
    assert sent[0] is chosen


def test_chunk_counts_are_those_of_brute_force_on_links_as_they_are() -> None:
    """Beyond what is searched above: thousands of chunks, the neighbourhood of the
    choice and a random sample.
    """
    draw = random.Random(6)
    for _ in range(200):
        nbytes, nodes = draw.randrange(1, 10**12), draw.randrange(1, 600)
        link = {"start_s": 10 ** draw.uniform(-6, -2), "byte_s": 10 ** draw.uniform(-11, -7)}
        chosen = chunk_count(nbytes, nodes=nodes, **link)
        others = [chosen + step for step in range(-3, 4)] + [
            draw.randrange(1, 10**6) for _ in range(20)
        ]
        best = min(
            broadcast_s(nbytes, nodes=nodes, chunks=k, **link) for k in others if 1 <= k <= nbytes
        )
        assert broadcast_s(nbytes, nodes=nodes, chunks=chosen, **link) <= best * (1 + 1e-12)
