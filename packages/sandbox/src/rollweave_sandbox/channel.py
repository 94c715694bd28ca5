"""The host's end of the socket into a sandbox. Calls run concurrently, and each is
answered or times out.

Invariants: every call ends within its timeout. Once the peer is gone, or has broken the
protocol, every pending and every later call raises `SandboxLostError`. The sandbox is
not trusted: its frames are bounded, its replies are matched to calls by id, and an
unsolicited reply closes the channel. If a call is cancelled or times out, the sandbox
is told to end the call, and a late reply is dropped.
"""

import asyncio
import socket
from typing import Any

from rollweave.sandbox.base import Reply
from rollweave.schema.errors import (
    SandboxError,
    SandboxLostError,
    SandboxRefusedError,
    SandboxTimeoutError,
)
from rollweave.schema.text import valid_tree
from rollweave_sandbox.inside.frames import FrameDecoder, FrameError, pack

RECEIVE_BYTES = 1 << 18
"""Maximum number of bytes in one read from the socket."""

UNSENT_BYTES = 1 << 28
"""Maximum number of bytes queued for a sandbox that does not read: enough for a few of
the largest bodies.
"""

SLACK_S = 5.0
"""Seconds beyond an action's own limit within which a sandbox must reply. In this time
it kills and reaps the program, and reads the remaining output.
"""

FORGOTTEN = 1024
"""Maximum number of abandoned calls without a reply; a sandbox with more abandoned
calls counts as lost.
"""

ERRORS: dict[object, type[SandboxError]] = {
    "timeout": SandboxTimeoutError,
    "refused": SandboxRefusedError,
    "failed": SandboxError,
}


class Channel:
    """One connected stream socket, which now belongs to the channel.

    All calls belong to the event loop's thread.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._decoder = FrameDecoder()
        self._unsent = bytearray()
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._forgotten: set[int] = set()
        self._next_id = 1
        self._lost = ""
        self._loop.add_reader(sock, self._readable)

    @property
    def lost(self) -> str:
        """Reason for the loss of the channel; empty while it is open."""
        return self._lost

    async def call(
        self,
        action: str,
        body: bytes = b"",
        *,
        timeout_s: float,
        slack_s: float = SLACK_S,
        **args: object,
    ) -> Reply:
        """Call `action` and wait for its reply.

        `timeout_s` is the limit in seconds of the action inside, if it has one: a
        program is then killed, and the reply says so. A reply may be `slack_s` later
        than the limit. Raises SandboxTimeoutError, SandboxRefusedError or SandboxError
        as the sandbox replies, SandboxTimeoutError if it does not reply in time,
        SandboxLostError if it is gone, and ValueError for arguments that do not fit
        into a frame.
        """
        if self._lost:
            raise SandboxLostError(self._lost)
        call_id = self._next_id
        frame = pack({**args, "id": call_id, "action": action, "timeout_s": timeout_s}, body)
        self._next_id += 1
        future: asyncio.Future[Reply] = self._loop.create_future()
        self._calls[call_id] = future
        limit_s = timeout_s + slack_s
        timer = self._loop.call_later(
            limit_s, self._expire, future, f"no answer to {action} within {limit_s:g} s"
        )
        self._send(frame)
        try:
            return await future
        finally:
            timer.cancel()
            if self._calls.pop(call_id, None) is not None and not self._lost:
                self._forget(call_id)

    def close(self) -> None:
        """Close the socket, upon which the sandbox's server ends; pending calls raise
        SandboxLostError.
        """
        self._lose("closed")

    @staticmethod
    def _expire(future: asyncio.Future[Reply], why: str) -> None:
        if not future.done():
            future.set_exception(SandboxTimeoutError(why))

    def _forget(self, call_id: int) -> None:
        self._forgotten.add(call_id)
        if len(self._forgotten) > FORGOTTEN:
            self._lose(f"more than {FORGOTTEN} calls were never answered")
        else:
            self._send(pack({"id": call_id, "action": "cancel"}))

    def _send(self, frame: bytes) -> None:
        self._unsent += frame
        if len(self._unsent) == len(frame):
            self._writable()
        elif len(self._unsent) > UNSENT_BYTES:
            self._lose(f"does not read: more than {UNSENT_BYTES} bytes wait")

    def _writable(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._writable)
            return
        except OSError as error:
            self._lose(f"cannot be written to: {error.strerror}")
            return
        self._loop.remove_writer(self._socket)

    def _readable(self) -> None:
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(f"cannot be read from: {error.strerror}")
            return
        if not data:
            self._lose("the other end is closed")
            return
        self._decoder.feed(data)
        try:
            while not self._lost and (frame := self._decoder.take()) is not None:
                self._answer(*frame)
        except FrameError as error:
            self._lose(f"sent an invalid reply: {error}")

    def _answer(self, header: dict[str, Any], body: bytes) -> None:
        try:
            header = valid_tree(header)
        except RecursionError:
            raise FrameError("header must not be so deep") from None
        call_id, ok = header.pop("id"), header.pop("ok", None)
        if call_id in self._forgotten:
            self._forgotten.remove(call_id)
            return
        future = self._calls.pop(call_id, None)
        if future is None:
            raise FrameError(f"no reply to call {call_id!r:.40} is awaited")
        if future.done():  # the call timed out, or was cancelled, in this turn of the loop
            return
        if ok is True:
            future.set_result(Reply(header=header, body=body))
        elif (
            ok is False
            and isinstance(header.get("error"), str)
            and isinstance(header.get("kind"), str)
        ):
            future.set_exception(ERRORS.get(header["kind"], SandboxError)(header["error"]))
        else:
            self._calls[call_id] = future
            raise FrameError(f"ok must be true, or false with error and kind, got {ok!r:.40}")

    def _lose(self, why: str) -> None:
        if self._lost:
            return
        self._lost = why
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._unsent.clear()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(SandboxLostError(why))
        self._calls.clear()
