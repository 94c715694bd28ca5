"""The address at which a serving engine lends its slack: a socket of this host. The
process of a run's engine connects to it (`runtime/entrypoints/engine.py`).

The connection carries the frames of any engine process: an `EngineSpec`, then commands
one way and replies the other. Its end is the end of the loan. One connection is served
at a time; another one gets `EngineFatal`.
"""

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from rollweave.io.wire import FrameDecoder, decoder_of, encode, frame
from rollweave.schema.serving import (
    Beat,
    Beating,
    EngineCommand,
    EngineFatal,
    EngineReply,
    EngineSpec,
)

RECEIVE_BYTES = 1 << 18

_spec_of: Callable[[bytes], EngineSpec] = decoder_of(EngineSpec)
_command_of: Callable[[bytes], EngineCommand] = decoder_of(EngineCommand)


class Lender(Protocol):
    """The executor, as the listener calls it from its threads."""

    def begin(self, spec: EngineSpec, reply: Callable[[EngineReply], None]) -> str:
        """Begin a loan. Return why there is none, or ""."""

    def post_borrowed(self, command: EngineCommand) -> None:
        """Queue a command of the borrower."""

    def beating(self) -> Beating:
        """Return what the executor is doing."""

    def end(self) -> None:
        """End the loan: the borrower is gone."""


class LendingSocket:
    """Listens at `path`, and passes on what a borrower sends."""

    def __init__(self, path: str, lender: Lender) -> None:
        self._lender = lender
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(path)
        os.chmod(path, 0o600)
        self._socket.listen(8)
        self._thread = threading.Thread(target=self._accept, name="lending", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and end the thread that listens."""
        self._socket.shutdown(socket.SHUT_RDWR)  # closing it would not wake `accept`
        self._thread.join()
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(
                target=self._serve, args=(connection,), name="borrower", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        """Serve a borrower until its connection ends."""
        frames = _frames(connection)
        outbox = _Outbox(connection)
        began = False
        with connection:
            try:
                for payload in frames:
                    if began:
                        command = _command_of(payload)
                        if isinstance(command, Beat):
                            outbox.send(encode(self._lender.beating()))
                        else:
                            self._lender.post_borrowed(command)
                        continue
                    refusal = self._lender.begin(
                        _spec_of(payload), lambda reply: outbox.send(encode(reply))
                    )
                    if refusal:
                        outbox.send(encode(EngineFatal(error=refusal)))
                        break
                    began = True
            except (OSError, ValueError):
                pass  # a broken connection, or a peer that is no engine's process
            finally:
                if began:
                    self._lender.end()
                outbox.close()


def _frames(connection: socket.socket) -> Iterator[bytes]:
    decoder = FrameDecoder()
    while data := connection.recv(RECEIVE_BYTES):
        yield from decoder.feed(data)


class _Outbox:
    """Sends replies from a thread: no step waits for a borrower that does not read."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._payloads: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="replies", daemon=True)
        self._thread.start()

    def send(self, payload: bytes) -> None:
        self._payloads.put(payload)

    def close(self) -> None:
        self._payloads.put(None)
        self._thread.join(1.0)

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (payload := self._payloads.get()) is not None:
                self._connection.sendall(b"".join(frame(payload)))
