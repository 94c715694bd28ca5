"""A decoder of HTTP/1.1 requests (RFC 9112). Needs Python 3.9 and its standard library
alone.

Invariants: a decoder returns exactly the requests that were sent, in order, regardless
of how the stream was split; a request that two readers could understand differently
(two lengths, a bare newline, a folded header) is refused; the buffer has at most one
request within the bounds and the bytes that follow the request; after a `BadRequest`
nothing more is returned.
"""

from __future__ import annotations

import re

HEAD_BYTES = 32 << 10
"""Maximum total size in bytes of the request line and all headers."""

BODY_BYTES = 16 << 20
"""Maximum size of a body in bytes, as in the gateway."""

LINE_BYTES = 1 << 10
"""Maximum size in bytes of a chunk-size line with its extensions, and of a trailer."""

METHODS = ("GET", "POST")

_REQUEST_LINE = re.compile(rb"([A-Z]{1,16}) ([\x21-\x7e]{1,4096}) HTTP/1\.([01])")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\x20-\x7e\x80-\xff\t]*)")
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;.*)?", re.DOTALL)


class BadRequest(ValueError):
    """The request is invalid or not accepted here; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class HttpRequest:
    """One request. `headers` has lower-case names; repeated values are joined by
    commas.

    `keep` says that the connection may carry another request.
    """

    def __init__(self, method: str, target: str, headers: dict[str, str], keep: bool) -> None:
        self.method, self.target, self.headers, self.keep = method, target, headers, keep
        self.body = b""


class RequestDecoder:
    """Splits a stream into requests: `feed` it, then `take` until it returns None."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._body = bytearray()
        self._request: HttpRequest | None = None
        self._length = 0
        self._chunked = self._trailing = False
        self._due = 0
        self._broken: BadRequest | None = None
        self.awaited = False
        """True if the client waits for `100 Continue` before it sends the body."""

    @property
    def buffered(self) -> int:
        """Number of buffered bytes."""
        return len(self._buffer) + len(self._body)

    @property
    def started(self) -> bool:
        """True if a part of a request has arrived."""
        return self._request is not None or bool(self._buffer)

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def take(self) -> HttpRequest | None:
        """Return the next request, or None until more is fed.

        Raises BadRequest, now and at every later call.
        """
        if self._broken is not None:
            raise self._broken
        try:
            return self._take()
        except BadRequest as error:
            self._broken = error
            self._buffer.clear()
            raise

    def _take(self) -> HttpRequest | None:
        if self._request is None and not self._head():
            return None
        request = self._request
        assert request is not None
        if not (self._chunks() if self._chunked else self._complete_body()):
            return None
        request.body = bytes(self._body)
        self._body.clear()
        self._request, self.awaited = None, False
        return request

    def _complete_body(self) -> bool:
        if len(self._buffer) < self._length:
            return False
        self._body += self._buffer[: self._length]
        del self._buffer[: self._length]
        return True

    def _chunks(self) -> bool:
        while True:
            if len(self._buffer) < self._due:
                return False
            if self._due:
                if self._buffer[self._due - 2 : self._due] != b"\r\n":
                    raise BadRequest(400, "a chunk must end where its size says")
                self._body += self._buffer[: self._due - 2]
                del self._buffer[: self._due]
                self._due = 0
            line = self._line()
            if line is None:
                return False
            if self._trailing:
                if not line:
                    return True
                continue
            size = _SIZE.fullmatch(line)
            if size is None:
                raise BadRequest(400, "a chunk must begin with its size")
            count = int(size.group(1), 16)
            _bound(len(self._body) + count)
            self._trailing = not count
            self._due = count + 2 if count else 0

    def _line(self) -> bytes | None:
        end = self._buffer.find(b"\r\n", 0, LINE_BYTES)
        if end < 0:
            if len(self._buffer) >= LINE_BYTES:
                raise BadRequest(400, f"a chunk's size must have at most {LINE_BYTES} bytes")
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    def _head(self) -> bool:
        while self._buffer.startswith(b"\r\n"):  # some clients send an extra line end after a body
            del self._buffer[:2]
        end = self._buffer.find(b"\r\n\r\n", 0, HEAD_BYTES)
        if end < 0:
            if len(self._buffer) >= HEAD_BYTES:
                raise BadRequest(431, f"headers must have at most {HEAD_BYTES} bytes")
            return False
        lines = bytes(self._buffer[:end]).split(b"\r\n")
        del self._buffer[: end + 4]
        first = _REQUEST_LINE.fullmatch(lines[0])
        if first is None:
            raise BadRequest(400, "the request line must be METHOD TARGET HTTP/1.1")
        headers = _headers(lines[1:])
        method, target = first.group(1).decode(), first.group(2).decode()
        if method not in METHODS:
            raise BadRequest(405, f"method must be one of {', '.join(METHODS)}, got {method}")
        options = {word.strip().lower() for word in headers.get("connection", "").split(",")}
        keep = first.group(3) == b"1" and "close" not in options
        self._frame(headers)
        self._request = HttpRequest(method, target, headers, keep)
        return True

    def _frame(self, headers: dict[str, str]) -> None:
        """Determine the length of the body."""
        coding, length = headers.get("transfer-encoding"), headers.get("content-length")
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise BadRequest(415, "content-encoding must be identity")
        if coding is not None and length is not None:
            raise BadRequest(
                400, "a body must have one length, got content-length and transfer-encoding"
            )
        if coding is not None and coding.lower() != "chunked":
            raise BadRequest(501, "transfer-encoding must be chunked")
        if length is not None and not re.fullmatch("[0-9]{1,19}", length):
            raise BadRequest(400, f"content-length must be a number, got {length!r:.40}")
        self._length = int(length or 0)
        _bound(self._length)
        self._chunked, self._trailing, self._due = coding is not None, False, 0
        self.awaited = headers.get("expect", "").lower() == "100-continue"


def _headers(lines: list[bytes]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        header = _HEADER.fullmatch(line)
        if header is None:
            raise BadRequest(400, "a header must be a name, a colon and a value")
        name, value = (
            header.group(1).decode().lower(),
            header.group(2).decode("latin-1").strip(" \t"),
        )
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def _bound(count: int) -> None:
    if count > BODY_BYTES:
        raise BadRequest(413, f"body must have at most {BODY_BYTES} bytes")
