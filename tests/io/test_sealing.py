"""A frame is delivered only as the peer has sent it, in its place."""

import itertools

import pytest

from rollweave.io.wire import CODE_BYTES, Seal
from rollweave.schema.errors import WireError

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
