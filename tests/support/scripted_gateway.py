"""A gateway over a scripted generator, and clients for it."""

import asyncio
import contextlib
import io
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from rollweave.engine.clients.base import OnTokens
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.gateway import answering
from rollweave.rollout.gateway.fields import RequestError
from rollweave.rollout.gateway.preparing import readable
from rollweave.rollout.gateway.requests import ChatRequest
from rollweave.rollout.gateway.server import Access, Gateway, serve_gateway
from rollweave.schema.serving import FinishReason, GenerateResult, Sampling, VersionSpan
from tests.support.chats import bpe, codec

CODEC = codec("tools")
END = CODEC.stop_token_ids[0]
CHAT = "/chat/completions"


def encode(text: str) -> tuple[int, ...]:
    return tuple(bpe().encode(text, add_special_tokens=False).ids)


def engine_result(
    tokens: Sequence[int], *, finish: FinishReason = FinishReason.STOP, version: int = 0
) -> GenerateResult:
    return GenerateResult(
        id="x",
        tokens=tuple(tokens),
        logprobs=tuple(-0.5 - place for place in range(len(tokens))),
        versions=(VersionSpan(start=0, end=len(tokens), version=version),) if tokens else (),
        finish=finish,
        cached_tokens=3,
    )


@dataclass
class Script:
    """`generate` of a gateway that returns `texts` in turn, then repeats the last. With
    `hold` it waits to be released.
    """

    texts: list[str | GenerateResult | Exception] = field(default_factory=lambda: ["hello"])
    codec: ChatCodec = CODEC
    hold: bool = False
    requests: list[tuple[str, tuple[int, ...], Sampling]] = field(default_factory=list)
    started: asyncio.Queue[None] = field(default_factory=asyncio.Queue)
    free: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Queue[None] = field(default_factory=asyncio.Queue)

    async def __call__(
        self,
        session: str,
        tokens: tuple[int, ...],
        sampling: Sampling,
        on_tokens: OnTokens | None,
    ) -> GenerateResult:
        what = self.texts[min(len(self.requests), len(self.texts) - 1)]
        self.requests.append((session, tokens, sampling))
        self.started.put_nowait(None)
        if self.hold:
            try:
                await self.free.wait()
            except asyncio.CancelledError:
                self.cancelled.put_nowait(None)
                raise
        if isinstance(what, Exception):
            raise what
        return (
            what
            if isinstance(what, GenerateResult)
            else engine_result(self.codec.encode_turn(what))
        )


@dataclass
class Client:
    """The HTTP client of one session."""

    http: aiohttp.ClientSession
    url: str
    access: Access

    @property
    def base_url(self) -> str:
        return self.url + self.access.path

    async def post(self, body: Any, *, path: str = CHAT, **headers: str) -> tuple[int, Any]:
        """Return status and JSON. `body` is JSON, or literal bytes."""
        data = {"data": body} if isinstance(body, bytes | io.BytesIO) else {"json": body}
        head = {
            "Authorization": f"Bearer {self.access.token}",
            "Content-Type": "application/json",
            **headers,
        }
        async with self.http.post(self.base_url + path, headers=head, **data) as response:
            return response.status, await response.json()


@contextlib.asynccontextmanager
async def gateway(
    generate: Callable[..., Any],
    *,
    of: ChatCodec = CODEC,
    session: dict[str, Any] | None = None,
    keep_alive_s: float = 15.0,
    unconstrained: str = "",
) -> AsyncIterator[tuple[Gateway, Client]]:
    """Serve a gateway with the open session `s`."""
    server = Gateway(of, generate, model="tiny", unconstrained=unconstrained)
    access = server.open("s", **(session or {}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answering, "KEEP_ALIVE_S", keep_alive_s)
        async with serve_gateway(server) as url, aiohttp.ClientSession() as http:
            yield server, Client(http, url, access)


def ask(text: str = "hi", **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "sum of two numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def refusing(chat: ChatRequest) -> ChatRequest:
    """Return what a session makes of a request that refuses what it cannot read."""
    return readable(chat, CODEC, unreadable="refuse")[0]


def check_refusal(parse: Callable[[bytes], ChatRequest], body: dict[str, Any], param: str) -> None:
    """Check that a session refuses a request by a field, with its rule and value."""
    with pytest.raises(RequestError) as caught:
        refusing(parse(json.dumps(body).encode()))
    assert caught.value.status == 400
    assert caught.value.param == param
    assert re.match(rf"{re.escape(param)}(:| must) .+, got .", str(caught.value))
