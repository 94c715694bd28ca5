"""Rows for other trainers are slices of the sequence."""

from hypothesis import given

from rollweave.schema.work import SegmentKind
from rollweave_service.adapters.rows import row_of
from tests.support.sequences import kinds, sequence


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
