"""The routes of a sequence's tokens."""

import pytest

from rollweave.schema.work import Routes, Segment, SegmentKind, TokenSequence, with_routes


def routes(start: int, end: int, *, mark: int = 0, width: int = 1) -> Routes:
    data = bytes(mark + at for at in range((end - start) * 2 * width))
    return Routes(start=start, end=end, layers=1, top_k=2, data=data)


@pytest.mark.parametrize("width", [1, 2])
def test_a_part_has_the_experts_of_its_tokens(width: int) -> None:
    whole = routes(3, 7, width=width)
    part = whole.between(4, 6)
    assert part is not None
    assert (part.start, part.end, part.data) == (4, 6, whole.data[2 * width : 6 * width])
    assert whole.between(0, 9) == whole
    assert whole.between(7, 9) is None


def test_of_two_routes_of_a_token_the_first_counts() -> None:
    known = with_routes((), routes(0, 4))
    assert with_routes(known, None) == known
    assert with_routes(known, routes(0, 4, mark=9)) == known
    (first, second) = with_routes(known, routes(2, 6, mark=9))
    assert (first, second.start, second.end) == (routes(0, 4), 4, 6)
    assert second.data == routes(2, 6, mark=9).data[4:]


@pytest.mark.parametrize(("start", "end", "data"), [(0, 2, b"abc"), (2, 2, b""), (-1, 0, b"ab")])
def test_routes_have_one_or_two_bytes_of_each_expert(start: int, end: int, data: bytes) -> None:
    with pytest.raises(ValueError, match="must have"):
        Routes(start=start, end=end, layers=1, top_k=2, data=data)


@pytest.mark.parametrize("parts", [(routes(0, 4),), (routes(0, 2), routes(1, 3))])
def test_routes_of_a_sequence_are_ascending_and_within_it(parts: tuple[Routes, ...]) -> None:
    with pytest.raises(ValueError, match="routes must be ascending and disjoint in 3 tokens"):
        TokenSequence(
            tokens=(1, 2, 3),
            segments=(Segment(start=0, end=3, kind=SegmentKind.PROMPT),),
            logprobs=(0.0,) * 3,
            routes=parts,
        )
