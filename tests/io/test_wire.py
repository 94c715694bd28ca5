"""Frames survive any split of the stream; invalid bytes are refused at once and for
good.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.io.wire import LENGTH, FrameDecoder, decoder_of, encode, frame
from rollweave.schema.errors import WireError
from rollweave.schema.serving import (
    Abort,
    Add,
    EngineCommand,
    GenerateRequest,
    Rerank,
    Resume,
    Suspend,
)
from tests.support.properties import examples

commands = st.one_of(
    st.just(Suspend()),
    st.just(Resume()),
    st.builds(Abort, id=st.text(max_size=20)),
    st.builds(Rerank, id=st.text(max_size=5), rank=st.floats(allow_nan=False)),
    st.lists(st.integers(0, 2**31), max_size=50).map(
        lambda tokens: Add(request=GenerateRequest(id="r", tokens=tuple(tokens)))
    ),
)


def framed(nouns: list[EngineCommand]) -> bytes:
    return b"".join(b"".join(frame(encode(noun))) for noun in nouns)


@settings(max_examples=examples(60))
@given(st.lists(commands, max_size=8), st.data())
def test_any_split_delivers_the_same_structs(
    sent: list[EngineCommand], data: st.DataObject
) -> None:
    stream = framed(sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    frames, decode = FrameDecoder(), decoder_of(EngineCommand)
    received: list[EngineCommand] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += map(decode, frames.feed(stream[start:end]))
    assert received == sent


def test_byte_by_byte() -> None:
    sent: list[EngineCommand] = [Suspend(), Abort(id="x"), Resume()]
    frames, decode = FrameDecoder(), decoder_of(EngineCommand)
    payloads = [payload for byte in framed(sent) for payload in frames.feed(bytes([byte]))]
    assert [decode(payload) for payload in payloads] == sent


def test_a_length_over_the_limit_is_refused_at_once_and_ever_after() -> None:
    decoder = FrameDecoder(limit=10)
    assert decoder.feed(b"".join(frame(b"x" * 10))) == [b"x" * 10]
    with pytest.raises(WireError, match="at most 10 bytes, got 11"):
        decoder.feed(LENGTH.pack(11))
    with pytest.raises(WireError, match="at most 10 bytes"):
        decoder.feed(b"".join(frame(b"fine")))


def test_frames_before_a_bad_length_are_still_delivered() -> None:
    decoder = FrameDecoder(limit=10)
    assert decoder.feed(b"".join(frame(b"good")) + LENGTH.pack(99)) == [b"good"]
    with pytest.raises(WireError, match="got 99"):
        decoder.feed(b"")


@settings(max_examples=examples(100))
@given(st.binary(max_size=60))
def test_invalid_bytes_raise_only_wire_errors(garbage: bytes) -> None:
    frames, decode = FrameDecoder(limit=1000), decoder_of(EngineCommand)
    try:
        nouns = [decode(payload) for payload in frames.feed(garbage)]
    except WireError:
        return
    assert all(isinstance(noun, EngineCommand) for noun in nouns)


def test_refuses_a_struct_of_another_union() -> None:
    decode = decoder_of(Abort)
    with pytest.raises(WireError, match="Invalid value"):
        decode(encode(Suspend()))
    with pytest.raises(WireError, match="truncated"):
        decode(encode(Abort(id="abc"))[:-1])
    with pytest.raises(WireError, match="unknown field"):
        decode(encode({"type": "Abort", "id": "abc", "extra": 1}))
