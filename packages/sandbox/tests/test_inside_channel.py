"""The host's end of the channel, with slow, silent, lost and misbehaving peers: every
call ends, with a typed error if it fails. The host does not trust a sandbox's replies:
an unexpected shape is a typed error, and texts are plain.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.sandbox.tools import Bash, plain
from rollweave.schema import errors
from rollweave_sandbox import channel as module
from rollweave_sandbox.channel import Channel, Reply
from rollweave_sandbox.inside.frames import FrameDecoder, pack
from tests.support.properties import examples


class Connection:
    """The other end of a channel, controlled by the test."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._decoder = FrameDecoder()

    async def request(self) -> tuple[dict[str, Any], bytes]:
        loop = asyncio.get_running_loop()
        while (frame := self._decoder.take()) is None:
            self._decoder.feed(await asyncio.wait_for(loop.sock_recv(self.socket, 65536), 10))
        return frame

    def reply(self, call_id: int, body: bytes = b"", **fields: object) -> None:
        self.socket.sendall(pack({"ok": True, **fields, "id": call_id}, body))


@contextlib.asynccontextmanager
async def paired() -> AsyncIterator[tuple[Channel, Connection]]:
    own_end, other_end = socket.socketpair()
    channel = Channel(own_end)
    try:
        yield channel, Connection(other_end)
    finally:
        channel.close()
        other_end.close()


def call_frame(
    channel: Channel, action: str = "do", *, timeout_s: float = 20.0, **args: object
) -> asyncio.Task[Reply]:
    return asyncio.create_task(channel.call(action, timeout_s=timeout_s, slack_s=0.0, **args))  # type: ignore[arg-type]


async def test_concurrent_calls_are_answered_in_any_order() -> None:
    async with paired() as (channel, peer):
        calls = [call_frame(channel, number=number) for number in range(20)]
        requests = [(await peer.request())[0] for _ in calls]
        for header in reversed(requests):
            peer.reply(header["id"], str(header["number"]).encode())
        assert [int((await call).body) for call in calls] == list(range(20))


async def test_the_limit_of_the_action_is_sent() -> None:
    async with paired() as (channel, peer):
        call = call_frame(channel, timeout_s=7.0, path="x")
        header, _ = await peer.request()
        assert header == {"id": 1, "action": "do", "timeout_s": 7.0, "path": "x"}
        peer.reply(1, size=3)
        assert await call == Reply(header={"size": 3}, body=b"")


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        *(("timeout", errors.SandboxTimeoutError), ("refused", errors.SandboxRefusedError)),
        *(("failed", errors.SandboxError), ("new", errors.SandboxError)),
    ],
)
async def test_errors_of_the_sandbox_are_raised(kind: str, error: type[Exception]) -> None:
    async with paired() as (channel, peer):
        call = call_frame(channel)
        header, _ = await peer.request()
        peer.reply(header["id"], ok=False, kind=kind, error="why")
        with pytest.raises(error, match=r"^why$") as caught:
            await call
        assert type(caught.value) is error


async def test_a_call_times_out_and_its_late_reply_is_dropped() -> None:
    async with paired() as (channel, peer):
        with pytest.raises(errors.SandboxTimeoutError, match=r"no answer to do within 0\.01 s"):
            await call_frame(channel, timeout_s=0.01)
        assert (await peer.request())[0]["action"] == "do"
        assert (await peer.request())[0] == {"id": 1, "action": "cancel"}
        peer.reply(1, b"late")
        call = call_frame(channel)
        peer.reply((await peer.request())[0]["id"], b"in time")
        assert (await call).body == b"in time"


async def test_a_cancelled_call_is_cancelled_inside() -> None:
    async with paired() as (channel, peer):
        call = call_frame(channel)
        await peer.request()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await peer.request())[0] == {"id": 1, "action": "cancel"}
        peer.reply(1)
        again = call_frame(channel)
        peer.reply((await peer.request())[0]["id"])
        await again
        assert not channel.lost


async def test_a_lost_peer_ends_pending_and_later_calls() -> None:
    async with paired() as (channel, peer):
        calls = [call_frame(channel) for _ in range(3)]
        await peer.request()
        peer.socket.close()
        for call in calls:
            with pytest.raises(errors.SandboxLostError):
                await call
        with pytest.raises(errors.SandboxLostError):
            await channel.call("do", timeout_s=1.0)
        assert channel.lost


async def test_closing_ends_calls() -> None:
    async with paired() as (channel, peer):
        call = call_frame(channel)
        await peer.request()
        channel.close()
        with pytest.raises(errors.SandboxLostError, match="closed"):
            await call


@pytest.mark.parametrize(
    "frame",
    [
        *(pack({"id": 2, "ok": True}), pack({"id": 0, "ok": True}), pack({"id": 1})),
        *(pack({"id": 1, "ok": 1}), pack({"id": 1, "ok": False})),
        pack({"id": 1, "ok": False, "error": 3, "kind": []}),
        pack({"id": 1, "ok": False, "error": "x", "kind": ["timeout"]}),
        pack({"id": 1, "ok": True}) * 2,
        b"\xff" * 8,
    ],
)
async def test_an_invalid_reply_closes_the_channel(frame: bytes) -> None:
    async with paired() as (channel, peer):
        call = call_frame(channel)
        await peer.request()
        peer.socket.sendall(frame)
        with contextlib.suppress(errors.SandboxLostError):
            await call
        with pytest.raises(errors.SandboxLostError, match=r"sent an invalid reply"):
            await channel.call("do", timeout_s=20.0)


torn = st.integers(0, 70).map(lambda cut: pack({"id": 1, "ok": True}, b"x" * 50)[:cut])


@settings(max_examples=examples(60))
@given(st.binary(max_size=100) | torn)
def test_arbitrary_bytes_end_the_call_or_leave_it_pending(data: bytes) -> None:
    async def main() -> None:
        async with paired() as (channel, peer):
            call = call_frame(channel)
            await peer.request()
            peer.socket.sendall(data)
            peer.socket.close()
            with contextlib.suppress(errors.SandboxError):
                assert isinstance(await asyncio.wait_for(call, 10), Reply)

    asyncio.run(main())


async def test_a_peer_that_never_replies_is_given_up() -> None:
    async with paired() as (channel, peer):

        async def drain() -> None:
            while True:
                await peer.request()

        draining = asyncio.create_task(drain())
        for _ in range(module.FORGOTTEN + 1):
            with pytest.raises(errors.SandboxTimeoutError):
                await call_frame(channel, timeout_s=0.0)
        assert "never answered" in channel.lost
        draining.cancel()


async def test_a_large_body_to_a_slow_reader_and_back() -> None:
    body = bytes(range(256)) * (1 << 14)
    async with paired() as (channel, peer):
        call = asyncio.create_task(channel.call("do", body, timeout_s=60.0))
        header, got = await peer.request()
        assert got == body
        sending = asyncio.get_running_loop().sock_sendall(
            peer.socket, pack({"id": header["id"], "ok": True}, got)
        )
        reply, _ = await asyncio.gather(call, sending)
        assert reply.body == body


async def test_arguments_too_large_raise_a_value_error_and_the_channel_survives() -> None:
    async with paired() as (channel, peer):
        with pytest.raises(ValueError, match="header must be JSON"):
            await channel.call("do", timeout_s=1.0, what={1})
        call = call_frame(channel)
        peer.reply((await peer.request())[0]["id"])
        await call


GOOD = {"rc": 0, "timed_out": False, "restarted": False, "dropped": 0, "seconds": 0.1, "split": 0}


@pytest.mark.parametrize(
    "fields", [{}, {**GOOD, "rc": "0"}, {**GOOD, "timed_out": 0}, {**GOOD, "dropped": None}]
)
async def test_a_reply_of_an_unexpected_shape(fields: dict[str, object]) -> None:
    own_end, other_end = socket.socketpair()
    other_end.setblocking(False)
    channel = Channel(own_end)
    with contextlib.closing(channel), other_end:
        call = asyncio.create_task(Bash(channel).run("true"))
        decoder = FrameDecoder()
        while (frame := decoder.take()) is None:
            decoder.feed(await asyncio.get_running_loop().sock_recv(other_end, 65536))
        other_end.sendall(pack({**fields, "id": frame[0]["id"], "ok": True}))
        with pytest.raises(errors.SandboxError, match="reply of another shape"):
            await call


@pytest.mark.parametrize(
    ("text", "plain_text"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07a\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "alink"),
        ("\x1bPdevice\x1b\\b\x1b(Bc\x1b=d\x1b7e", "bcde"),
        *(("\x1b[?25l\x1b[2Kprogress\r", "progress\r"), ("a\0b", "a\ufffdb")),
        ("[31m stays", "[31m stays"),
    ],
)
def test_removes_escapes_and_keeps_text(text: str, plain_text: str) -> None:
    assert plain(text) == plain_text


@given(st.text(st.characters(codec="utf-8", exclude_characters="\x1b\0")))
def test_text_without_escapes_is_unchanged(text: str) -> None:
    assert plain(text) == text
