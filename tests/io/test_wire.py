"""Frames survive any split of the stream, and are delivered only as the peer has sent
them, in their places; invalid bytes are refused at once and for good. Frames that a
peer sent before its end arrive.
"""

import asyncio
import itertools
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.io.framing import FramedSocket
from rollweave.io.wire import CODE_BYTES, LENGTH, FrameDecoder, Seal, decoder_of, encode, frame
from rollweave.schema import serving as s
from rollweave.schema.errors import WireError
from tests.support.properties import examples

commands = st.one_of(
    st.just(s.Suspend()),
    st.just(s.Resume()),
    st.builds(s.Abort, id=st.text(max_size=20)),
    st.builds(s.Rerank, id=st.text(max_size=5), rank=st.floats(allow_nan=False)),
    st.lists(st.integers(0, 2**31), max_size=50).map(
        lambda tokens: s.Add(request=s.GenerateRequest(id="r", tokens=tuple(tokens)))
    ),
)


def framed(nouns: list[s.EngineCommand]) -> bytes:
    return b"".join(b"".join(frame(encode(noun))) for noun in nouns)


@settings(max_examples=examples(60))
@given(st.lists(commands, max_size=8), st.data())
def test_any_split_delivers_the_same_structs(
    sent: list[s.EngineCommand], data: st.DataObject
) -> None:
    stream = framed(sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    frames, decode = FrameDecoder(), decoder_of(s.EngineCommand)
    received: list[s.EngineCommand] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        received += map(decode, frames.feed(stream[start:end]))
    assert received == sent


def test_a_length_over_the_limit_is_refused_at_once_and_ever_after() -> None:
    decoder = FrameDecoder(limit=10)
    assert decoder.feed(b"".join(frame(b"x" * 10))) == [b"x" * 10]
    with pytest.raises(WireError, match="at most 10 bytes, got 11"):
        decoder.feed(LENGTH.pack(11))
    with pytest.raises(WireError, match="at most 10 bytes"):
        decoder.feed(b"".join(frame(b"fine")))


def test_a_payload_above_the_bound_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollweave.io.wire.FRAME_BYTES", 4)
    assert frame(b"four", b"seal") == (LENGTH.pack(8), b"four", b"seal")
    with pytest.raises(WireError, match="at most 4 bytes, got 5"):
        frame(b"above")


def test_frames_before_a_bad_length_are_still_delivered() -> None:
    decoder = FrameDecoder(limit=10)
    assert decoder.feed(b"".join(frame(b"good")) + LENGTH.pack(99)) == [b"good"]
    with pytest.raises(WireError, match="got 99"):
        decoder.feed(b"")


@settings(max_examples=examples(100))
@given(st.binary(max_size=60))
def test_invalid_bytes_raise_only_wire_errors(garbage: bytes) -> None:
    frames, decode = FrameDecoder(limit=1000), decoder_of(s.EngineCommand)
    try:
        nouns = [decode(payload) for payload in frames.feed(garbage)]
    except WireError:
        return
    assert all(isinstance(noun, s.EngineCommand) for noun in nouns)


def test_refuses_a_struct_of_another_union() -> None:
    decode = decoder_of(s.Abort)
    with pytest.raises(WireError, match="Invalid value"):
        decode(encode(s.Suspend()))
    with pytest.raises(WireError, match="truncated"):
        decode(encode(s.Abort(id="abc"))[:-1])
    with pytest.raises(WireError, match="unknown field"):
        decode(encode({"type": "Abort", "id": "abc", "extra": 1}))


FRAMES = [b"first", b"", b"third"]


def ends() -> tuple[Seal, Seal]:
    """Return both ends of a connection."""
    one, other = b"a" * 32, b"b" * 32
    return Seal(one, other), Seal(other, one)


def sealed(seal: Seal) -> list[bytes]:
    return [payload + seal.code(payload) for payload in FRAMES]


def delivered(seal: Seal, frames: list[bytes]) -> list[bytes]:
    """Return the payloads until the first frame that is refused."""
    payloads: list[bytes] = []
    try:
        for frame in frames:
            payloads.append(seal.opened(frame))
    except WireError:
        pass
    return payloads


def test_frames_are_delivered_in_order_and_by_another_process() -> None:
    ours, theirs = ends()
    frames = sealed(ours)
    assert theirs.opened(frames[0]) == FRAMES[0]
    moved = Seal.from_state(theirs.state())
    assert [moved.opened(frame) for frame in frames[1:]] == FRAMES[1:]
    assert ours.opened(b"back" + moved.code(b"back")) == b"back"


def test_only_the_order_of_the_sender_is_delivered() -> None:
    for order in itertools.product(range(3), repeat=3):
        ours, theirs = ends()
        frames = sealed(ours)
        fitting = itertools.takewhile(lambda pair: pair[0] == pair[1], enumerate(order))
        assert delivered(theirs, [frames[number] for number in order]) == FRAMES[: len([*fitting])]


def test_a_flipped_byte_is_named() -> None:
    for place in range(len(FRAMES[0]) + CODE_BYTES):
        ours, theirs = ends()
        frame = bytearray(sealed(ours)[0])
        frame[place] ^= 1
        with pytest.raises(WireError, match="frame 0 has a wrong authentication code"):
            theirs.opened(bytes(frame))


def test_a_frame_is_not_accepted_in_the_other_direction_or_cut() -> None:
    ours, theirs = ends()
    frame = sealed(ours)[0]
    for wrong in (frame[:CODE_BYTES], frame[:-1], b""):
        with pytest.raises(WireError):
            Seal.from_state(theirs.state()).opened(wrong)
    with pytest.raises(WireError):
        ours.opened(frame)


async def test_frames_before_the_end_arrive_even_if_a_frame_to_the_peer_fails() -> None:
    """A process that fails reports the reason and ends, while it is sent commands."""
    ours, theirs = socket.socketpair()
    received: list[bytes] = []
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    connection = FramedSocket(ours, on_frame=received.append, on_end=ended.set_result)
    theirs.sendall(b"".join(frame(b"the reason")))
    theirs.close()
    connection.send(b"a command")
    async with asyncio.timeout(10):
        assert await ended == ""
    assert received == [b"the reason"]
    assert connection.closed
    connection.send(b"another")
