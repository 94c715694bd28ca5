"""Rows for other trainers are slices of the sequence."""

from hypothesis import given
from hypothesis import strategies as st

from rollweave.schema.work import Segment, SegmentKind, TokenSequence
from rollweave.service.adapters.rows import row_of

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


@given(kinds)
def test_a_row_is_a_prefix_that_masks_all_but_sampled_tokens(
    parts: list[tuple[SegmentKind, int]],
) -> None:
    token_sequence = sequence(parts)
    row = row_of(token_sequence)
    if not any(token_sequence.output_mask()):
        assert row is None
        return
    assert row is not None
    tokens = row.prompt + row.completion
    assert tokens == list(token_sequence.tokens[: len(tokens)])
    assert [0] * len(row.prompt) + row.mask == [
        int(sampled) for sampled in token_sequence.output_mask()[: len(tokens)]
    ]
    assert [0.0] * len(row.prompt) + row.logprobs == list(token_sequence.logprobs[: len(tokens)])
    assert not any(token_sequence.output_mask()[len(tokens) :])
    assert row.mask[0] == row.mask[-1] == 1
