"""The host does not trust a sandbox's replies: an unexpected shape is a typed error,
and texts are plain.
"""

import asyncio
import contextlib
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.sandbox.channel import Channel
from rollweave.sandbox.inside.frames import FrameDecoder, pack
from rollweave.sandbox.tools import Bash, plain
from rollweave.schema.errors import SandboxError


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {
            "rc": "0",
            "timed_out": False,
            "restarted": False,
            "dropped": 0,
            "seconds": 0.1,
            "split": 0,
        },
        {"rc": 0, "timed_out": 0, "restarted": False, "dropped": 0, "seconds": 0.1, "split": 0},
        {
            "rc": 0,
            "timed_out": False,
            "restarted": False,
            "dropped": None,
            "seconds": 0.1,
            "split": 0,
        },
    ],
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
        with pytest.raises(SandboxError, match="reply of another shape"):
            await call


@pytest.mark.parametrize(
    ("text", "plain_text"),
    [
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07a\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "alink"),
        ("\x1bPdevice\x1b\\b\x1b(Bc\x1b=d\x1b7e", "bcde"),
        ("\x1b[?25l\x1b[2Kprogress\r", "progress\r"),
        ("a\0b", "a\ufffdb"),
        ("[31m stays", "[31m stays"),
    ],
)
def test_removes_escapes_and_keeps_text(text: str, plain_text: str) -> None:
    assert plain(text) == plain_text


@given(st.text(st.characters(codec="utf-8", exclude_characters="\x1b\0")))
def test_text_without_escapes_is_unchanged(text: str) -> None:
    assert plain(text) == text
