"""Token sequences as their kinds of segments."""

from hypothesis import strategies as st

from rollweave.schema.work import Segment, SegmentKind, TokenSequence

kinds = st.lists(st.tuples(st.sampled_from(list(SegmentKind)), st.integers(1, 4)), max_size=8)


def sequence(parts: list[tuple[SegmentKind, int]]) -> TokenSequence:
    segments, logprobs, at = [], [], 0
    for number, (kind, length) in enumerate(parts):
        sampled = kind is SegmentKind.OUTPUT
        segments.append(
            Segment(start=at, end=at + length, kind=kind, version=number if sampled else -1)
        )
        logprobs += [-1.0 - at if sampled else 0.0] * length
        at += length
    return TokenSequence(
        tokens=tuple(range(100, 100 + at)), segments=tuple(segments), logprobs=tuple(logprobs)
    )


def one_token_each(*kinds: tuple[SegmentKind, int]) -> TokenSequence:
    """Return a sequence of segments with one token each, of these kinds and
    versions.
    """
    segments = tuple(
        Segment(start=at, end=at + 1, kind=kind, version=version)
        for at, (kind, version) in enumerate(kinds)
    )
    return TokenSequence(tokens=(0,) * len(kinds), segments=segments, logprobs=(0.0,) * len(kinds))
