"""Frames round-trip regardless of how the stream is split; invalid bytes raise one
typed error, for good.
"""

import json
import re
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave_sandbox.inside.frames import BODY_BYTES, HEADER_BYTES, FrameDecoder, FrameError, pack

headers = st.dictionaries(
    st.text(max_size=5), st.one_of(st.text(), st.integers(), st.booleans(), st.none()), max_size=4
)
frames = st.lists(st.tuples(headers, st.integers(), st.binary(max_size=200)), max_size=5)


def drain(decoder: FrameDecoder) -> list[tuple[dict[str, object], bytes]]:
    frames = []
    while (frame := decoder.take()) is not None:
        frames.append(frame)
    return frames


@given(frames, st.lists(st.integers(1, 50), min_size=1))
def test_frames_round_trip(
    sent: list[tuple[dict[str, object], int, bytes]], cuts: list[int]
) -> None:
    expected = [({**header, "id": number}, body) for header, number, body in sent]
    stream = b"".join(pack(header, body) for header, body in expected)
    decoder, decoded, at, turn = FrameDecoder(), [], 0, 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        decoder.feed(stream[at : at + size])
        at, turn = at + size, turn + 1
        decoded += drain(decoder)
    assert decoded == expected


@given(st.binary(max_size=300))
def test_invalid_bytes_are_a_frame_error_or_an_incomplete_frame(data: bytes) -> None:
    decoder = FrameDecoder()
    decoder.feed(data)
    try:
        drain(decoder)
    except FrameError as error:
        decoder.feed(pack({"id": 1}))
        with pytest.raises(FrameError, match=re.escape(str(error))):
            decoder.take()


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"[]", b"1", b"{}", b'{"id":true}', b'{"id":1.0}', b'{"id":"1"}', b"\xff"),
        *(b'{"id":1', b"[" * 100_000),
    ],
)
def test_refuses_invalid_headers(text: bytes) -> None:
    decoder = FrameDecoder()
    decoder.feed(struct.pack("<II", len(text), 0) + text)
    with pytest.raises(FrameError, match=r"header"):
        decoder.take()


@pytest.mark.parametrize(
    "lengths", [(HEADER_BYTES + 1, 0), (2, BODY_BYTES + 1), (0xFFFFFFFF, 0xFFFFFFFF)]
)
def test_a_length_beyond_its_bound_is_refused_before_buffering(lengths: tuple[int, int]) -> None:
    decoder = FrameDecoder()
    decoder.feed(struct.pack("<II", *lengths))
    with pytest.raises(FrameError, match=r"must have at most"):
        decoder.take()


@pytest.mark.parametrize("header", [{"id": {1}}, {"id": float("nan")}, {"id": "x" * HEADER_BYTES}])
def test_refuses_to_send_invalid_headers(header: dict[str, object]) -> None:
    with pytest.raises(FrameError):
        pack(header)


def test_a_header_is_plain_json() -> None:
    head, body = pack({"id": 1, "a": "é"}, b"xy")[8:-2], pack({"id": 1}, b"xy")[-2:]
    assert json.loads(head) == {"id": 1, "a": "é"}
    assert body == b"xy"
