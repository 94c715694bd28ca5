"""Requests round-trip regardless of how the stream is split; ambiguous ones are
refused.
"""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave_sandbox.inside import http1

TOKEN = st.text("abcXYZ-09", min_size=1, max_size=8)
VALUE = st.text("abc XYZ:;=,\t\xe9", max_size=20)
RESERVED = ("connection", "transfer-encoding", "content-length", "content-encoding", "expect")


@st.composite
def sent(draw: st.DrawFn) -> tuple[bytes, tuple[str, str, dict[str, str], bytes]]:
    """A request as bytes, and its meaning."""
    method, target = (
        draw(st.sampled_from(["GET", "POST"])),
        "/" + draw(st.text("abc/?%.", max_size=12)),
    )
    headers = {
        f"x-{name}".lower(): value.strip(" \t")
        for name, value in draw(st.dictionaries(TOKEN, VALUE, max_size=3)).items()
    }
    body = draw(st.binary(max_size=60)) if method == "POST" else b""
    wire = b"".join(
        f"{name.upper()}: {value} \r\n".encode("latin-1") for name, value in headers.items()
    )
    if draw(st.booleans()):
        cuts = draw(st.lists(st.integers(1, 20), max_size=4))
        chunks, rest = [], body
        for cut in [*cuts, len(body)]:
            chunk, rest = rest[:cut], rest[cut:]
            chunks += [b"%X;name=value\r\n%b\r\n" % (len(chunk), chunk)] if chunk else []
        tail = b"0\r\nX-Trailer: 1\r\n\r\n" if draw(st.booleans()) else b"0\r\n\r\n"
        wire, data = wire + b"Transfer-Encoding: Chunked\r\n", b"".join(chunks) + tail
    else:
        wire, data = wire + (b"Content-Length: %d\r\n" % len(body) if body else b""), body
    return f"{method} {target} HTTP/1.1\r\n".encode() + wire + b"\r\n" + data, (
        method,
        target,
        headers,
        body,
    )


def plain(request: http1.HttpRequest) -> tuple[str, str, dict[str, str], bytes]:
    headers = {name: value for name, value in request.headers.items() if name not in RESERVED}
    return request.method, request.target, headers, request.body


@given(st.lists(sent(), max_size=4), st.integers())
def test_requests_round_trip_regardless_of_splits(
    all_sent: list[tuple[bytes, object]], seed: int
) -> None:
    rng, decoder, requests = random.Random(seed), http1.RequestDecoder(), []
    data = b"".join(wire for wire, _ in all_sent)
    while data:
        cut = rng.choice((1, 2, 7, 1000))
        decoder.feed(data[:cut])
        data = data[cut:]
        while (request := decoder.take()) is not None:
            requests.append(plain(request))
    assert requests == [meaning for _, meaning in all_sent]
    assert decoder.buffered == 0
    assert not decoder.started


@given(st.binary(max_size=200) | sent().map(lambda each: each[0][:-1] + b"\0"))
def test_arbitrary_bytes_are_a_request_incomplete_or_refused(data: bytes) -> None:
    decoder = http1.RequestDecoder()
    decoder.feed(data)
    status = 0
    try:
        while decoder.take() is not None:
            pass
    except http1.BadRequest as error:
        status = error.status
    if status:
        assert 400 <= status < 600
        with pytest.raises(http1.BadRequest):
            decoder.take()


@pytest.mark.parametrize(
    ("wire", "status"),
    [
        (b"GET /a HTTP/1.1\nHost: x\n\n" + b"\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\nHost : x\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\nA: x\r\n folded\r\n\r\n", 400),
        (b"GET /a HTTP/1.1\r\nA: x\ry\r\n\r\n", 400),
        *((b"GET /a HTTP/1.1\r\nA: x\0\r\n\r\n", 400), (b"GET /a b HTTP/1.1\r\n\r\n", 400)),
        *((b"GET /a\x01 HTTP/1.1\r\n\r\n", 400), (b"GET /a HTTP/2.0\r\n\r\n", 400)),
        *((b"CONNECT a:443 HTTP/1.1\r\n\r\n", 405), (b"HEAD /a HTTP/1.1\r\n\r\n", 405)),
        (b"POST /a HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400),
        (b"POST /a HTTP/1.1\r\nContent-Length: +3\r\n\r\nabc", 400),
        (
            b"POST /a HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
        ),
        (b"POST /a HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (b"POST /a HTTP/1.1\r\nContent-Encoding: gzip\r\n\r\n", 415),
        (b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n", 400),
        (b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n", 400),
        (b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"0" * 2000, 400),
        (b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n", 413),
        (b"POST /a HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (http1.BODY_BYTES + 1), 413),
        (b"GET /a HTTP/1.1\r\nA: " + b"x" * http1.HEAD_BYTES, 431),
    ],
)
def test_refuses_invalid_requests(wire: bytes, status: int) -> None:
    decoder = http1.RequestDecoder()
    decoder.feed(wire)
    with pytest.raises(http1.BadRequest) as caught:
        decoder.take()
    assert caught.value.status == status


def test_keep_alive_and_expect_headers() -> None:
    def head(line: bytes, *headers: bytes) -> http1.RequestDecoder:
        decoder = http1.RequestDecoder()
        decoder.feed(b"\r\n".join([line, *headers, b"", b""]))
        return decoder

    for line, header, keep in (
        (b"GET /a HTTP/1.1", b"A: b", True),
        (b"GET /a HTTP/1.1", b"Connection: x, Close", False),
        (b"GET /a HTTP/1.0", b"Connection: keep-alive", False),
    ):
        request = head(line, header).take()
        assert request is not None
        assert request.keep is keep
    waiting = head(b"POST /a HTTP/1.1", b"Expect: 100-Continue", b"Content-Length: 1")
    assert waiting.take() is None
    assert waiting.awaited
    waiting.feed(b"x")
    assert waiting.take() is not None
    assert not waiting.awaited
