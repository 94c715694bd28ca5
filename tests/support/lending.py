"""The borrower of a co-serving engine, and the replies of both of its models."""

import contextlib
import socket
import threading

from rollweave.io.wire import FrameDecoder, decoder_of, encode, frame
from rollweave.schema import serving as s

WAIT_S = 30.0
"""Maximum seconds to wait for a reply."""


class Replies:
    """Replies of an engine, for which another thread waits."""

    def __init__(self) -> None:
        self._all: list[s.EngineReply] = []
        self._changed = threading.Condition()

    def put(self, reply: s.EngineReply) -> None:
        with self._changed:
            self._all.append(reply)
            self._changed.notify_all()

    def wait_for(self, kind: type[s.EngineReply], count: int = 1) -> list[s.EngineReply]:
        def found() -> list[s.EngineReply]:
            return [reply for reply in self._all if isinstance(reply, kind)]

        with self._changed:
            assert self._changed.wait_for(lambda: len(found()) >= count, WAIT_S), self._all
            return found()

    def results(self, count: int) -> dict[str, s.GenerateResult]:
        done = self.wait_for(s.Generated, count)
        return {reply.result.id: reply.result for reply in done if isinstance(reply, s.Generated)}


class Borrower:
    """The other end of a loan."""

    def __init__(self, path: str, spec: s.EngineSpec) -> None:
        self.replies = Replies()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self.send(spec)
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, value: s.EngineSpec | s.EngineCommand) -> None:
        self._socket.sendall(b"".join(frame(encode(value))))

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self) -> None:
        decoder, reply_of = FrameDecoder(), decoder_of(s.EngineReply)
        with contextlib.suppress(OSError):
            while data := self._socket.recv(1 << 16):
                for payload in decoder.feed(data):
                    self.replies.put(reply_of(payload))


def asks(name: str, *, tokens: int = 8, prompt: int = 9, first: int = 0) -> s.Add:
    return s.Add(
        request=s.GenerateRequest(
            id=name,
            tokens=tuple(1 + (first + at) % 90 for at in range(prompt)),
            sampling=s.Sampling(temperature=0, max_tokens=tokens),
        )
    )
