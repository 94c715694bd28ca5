"""The spans of a sequence are the parts of its conversation."""

from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.record.transcript import spans
from rollweave.schema.work import Segment, SegmentKind, TokenSequence, TurnSpan
from tests.support.properties import examples


@st.composite
def conversations(draw: st.DrawFn) -> tuple[TokenSequence, list[tuple[SegmentKind, int, int]]]:
    """Generate a sequence and the spans of which it is made."""
    segments, spans, parts, at = [], [], [], 0

    def add(kind: SegmentKind, versions: list[int]) -> None:
        nonlocal at
        begin = at
        for version in versions:
            length = draw(st.integers(1, 3))
            segments.append(Segment(start=at, end=at + length, kind=kind, version=version))
            at += length
        if kind is SegmentKind.OUTPUT:
            spans.append(TurnSpan(start=begin, end=at, reward=float(len(spans))))
        parts.append((kind, begin, at))

    add(SegmentKind.PROMPT, [-1])
    for number in range(draw(st.integers(0, 4))):
        if number:
            add(SegmentKind.OBSERVATION, [-1])
        add(SegmentKind.OUTPUT, sorted(draw(st.sets(st.integers(0, 5), min_size=1, max_size=3))))
    sequence = TokenSequence(
        tokens=(0,) * at, segments=tuple(segments), logprobs=(0.0,) * at, turns=tuple(spans)
    )
    return sequence, parts


@given(conversations())
@settings(max_examples=examples(60))
def test_spans_are_the_parts_of_the_conversation(
    sequence_and_parts: tuple[TokenSequence, list[tuple[SegmentKind, int, int]]],
) -> None:
    sequence, parts = sequence_and_parts
    parsed = list(spans(sequence))
    assert [(part.kind, part.segments[0].start, part.segments[-1].end) for part in parsed] == parts
    turns = [part for part in parsed if part.kind is SegmentKind.OUTPUT]
    assert [(part.number, part.reward) for part in turns] == [
        (index, float(index)) for index in range(len(turns))
    ]
