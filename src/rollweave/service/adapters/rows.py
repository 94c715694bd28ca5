"""A trajectory's token sequence as trainers of other makes take it: prompt, completion,
mask, log-probs.

Invariant: ids, log-probs and mask are those of the sequence, cut and nothing else:
`prompt + completion` begins its tokens.
"""

from dataclasses import dataclass

from rollweave.schema.work import SegmentKind, TokenSequence


@dataclass(frozen=True, slots=True)
class Row:
    """`completion` begins with the first sampled token and ends with the last one.

    `mask` and `logprobs` are as long: 1 and the log-prob where the agent sampled, 0 and
    0.0 where an observation stands.
    """

    prompt: list[int]
    completion: list[int]
    mask: list[int]
    logprobs: list[float]


def row_of(sequence: TokenSequence) -> Row | None:
    """None for a sequence of which nothing was sampled."""
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
