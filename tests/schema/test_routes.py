"""The routes of a sequence's tokens."""

from hypothesis import given
from hypothesis import strategies as st

from rollweave.schema.work import Routes, with_routes

PLACE = st.integers(0, 9)


@given(st.integers(0, 2), st.integers(1, 4), st.sampled_from([1, 2]), PLACE, PLACE)
def test_a_part_of_routes_has_the_bytes_of_its_tokens(
    first: int, count: int, width: int, start: int, end: int
) -> None:
    data = bytes(range(count * 6 * width))
    routes = Routes(start=first, end=first + count, layers=3, top_k=2, data=data)
    part = routes.between(start, end)
    tokens = [token for token in range(first, first + count) if start <= token < end]
    assert (part is None) is (not tokens)
    if part is not None:
        rows = [data[(token - first) * 6 * width :][: 6 * width] for token in tokens]
        assert (part.start, part.end, part.data) == (tokens[0], tokens[-1] + 1, b"".join(rows))


def test_of_two_routes_of_a_token_the_first_counts() -> None:
    first, later = (
        Routes(start=start, end=start + 4, layers=1, top_k=1, data=data)
        for start, data in ((0, b"abcd"), (2, b"efgh"))
    )
    known = with_routes((), first)
    assert known == (first,)
    assert with_routes(known, None) == with_routes(known, first) == known
    (_, second) = with_routes(known, later)
    assert (second.start, second.end, second.data) == (4, 6, b"gh")
