"""A server of vLLM's answers, part by part, and an engine that is connected to it."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rollweave.engine.clients.http import HttpEngine, HttpSpec
from rollweave.schema import serving as s
from rollweave_servers.versions import OwnDialect
from rollweave_servers.vllm import OwnVllm
from tests.engine.clients.wire import Exchange, Handle, Wire


def request(id: str = "r0", *, count: int = 8, **fields: Any) -> s.GenerateRequest:
    return s.GenerateRequest(id=id, tokens=(5,), sampling=s.Sampling(max_tokens=count), **fields)


def vllm_part(
    *tokens: int, finish: str | None = None, spans: Sequence[tuple[str, int, int]] | None = None
) -> dict[str, Any]:
    content = [{"token_id": token, "logprob": -token / 10} for token in tokens]
    versions = None
    if spans is not None:
        versions = [{"version": v, "start": a, "end": b} for v, a, b in spans]
    choice = {
        "index": 0,
        "finish_reason": finish,
        "token_ids": tokens,
        "logprobs": {"content": content},
        "weight_versions": versions,
    }
    return {"choices": [choice], "usage": None}


async def probed(exchange: Exchange) -> None:
    logprob = -0.5 if exchange.json_body["sampling_params"]["temperature"] == 0 else -1.5
    part = vllm_part(6, 7, finish="length", spans=[("default", 0, 2)])
    for entry in part["choices"][0]["logprobs"]["content"]:
        entry["logprob"] = logprob
    exchange.send(part)


def begin(exchange: Exchange) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    exchange.writer.write(head)


def write(exchange: Exchange, data: bytes) -> None:
    """Write a chunk; an empty one ends the body."""
    exchange.writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def streams(*parts: object, end: bool = True) -> Handle:
    """Stream these parts, and end the answer or leave it open."""

    async def handle(exchange: Exchange) -> None:
        assert exchange.json_body["stream"] is True
        begin(exchange)
        for part in parts:
            write(exchange, part if isinstance(part, bytes) else event(part))
        if end:
            write(exchange, b"data: [DONE]\n\n")
            write(exchange, b"")
        else:
            await exchange.writer.drain()
            await exchange.hung_up()

    return handle


@asynccontextmanager
async def connected(
    wire: Wire, *, dialect: OwnDialect | None = None, **limits: float
) -> AsyncIterator[HttpEngine]:
    where = HttpSpec(name="vLLM", url=wire.url, vocab=100, dialect="vllm")
    engine = HttpEngine(
        where,
        start_s=20.0,
        **{"check_s": 1000.0, **limits},  # type: ignore[arg-type]
        spoken=dialect or OwnVllm(version=-1, stop_ids=()),
    )
    try:
        await engine.ready()
        yield engine
    finally:
        await engine.close()
