"""Rows for other trainers are slices of the sequence."""

import msgspec
import pytest
from hypothesis import given

from rollweave.schema.media import Image, PlacedImage
from rollweave.schema.work import SegmentKind
from rollweave.service.adapters.rows import row_of, text_row_of
from tests.support.sequences import kinds, sequence
from tests.support.vision_models import picture


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


def test_a_row_has_the_images_of_its_tokens_and_a_trainer_of_text_refuses_them() -> None:
    kinds_of = [(SegmentKind.PROMPT, 3), (SegmentKind.OUTPUT, 2), (SegmentKind.OBSERVATION, 2)]
    image = Image.of(picture(255)).reference()
    placed = tuple(PlacedImage(at=at, image=image) for at in (1, 5))
    seen = msgspec.structs.replace(sequence(kinds_of), images=placed)
    row = row_of(seen)
    assert row is not None
    assert row.images == placed[:1]
    with pytest.raises(ValueError, match="must have no images for this trainer, got 1"):
        text_row_of(seen)
    assert text_row_of(sequence(kinds_of)) == row_of(sequence(kinds_of))
