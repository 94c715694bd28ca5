"""A trajectory's token sequence in the form that other trainers read: prompt,
completion, mask, log-probs.

Invariant: ids, log-probs and mask are slices of the sequence's: `prompt + completion`
is a prefix of its tokens.
"""

from dataclasses import dataclass

from rollweave.schema.work import SegmentKind, TokenSequence


@dataclass(frozen=True, slots=True)
class Row:
    """`completion` begins with the first sampled token and ends with the last one.

    `mask` and `logprobs` have its length: 1 and the log-prob for a sampled token, 0 and
    0.0 for a token of an observation.
    """

    prompt: list[int]
    completion: list[int]
    mask: list[int]
    logprobs: list[float]


def row_of(sequence: TokenSequence) -> Row | None:
    """Return the row of a sequence, or None if nothing in it was sampled."""
    outputs = [segment for segment in sequence.segments if segment.kind is SegmentKind.OUTPUT]
    if not outputs:
        return None
    start, end = outputs[0].start, outputs[-1].end
    return Row(
        prompt=list(sequence.tokens[:start]),
        completion=list(sequence.tokens[start:end]),
        mask=[int(sampled) for sampled in sequence.output_mask()[start:end]],
        logprobs=list(sequence.logprobs[start:end]),
    )
