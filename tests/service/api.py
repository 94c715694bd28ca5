"""Calls of a service's HTTP API."""

import asyncio
import io
import json
from collections.abc import Callable
from typing import Any

import aiohttp


async def call(
    address: str,
    method: str,
    path: str,
    body: Any = None,
    *,
    raw: bytes | None = None,
    headers: Any = None,
) -> tuple[int, Any, Any]:
    """Return the status, the decoded body and the headers of the answer."""
    data = (
        io.BytesIO(raw) if raw is not None else None if body is None else json.dumps(body).encode()
    )
    arguments = {
        **({"Content-Type": "application/json"} if data is not None else {}),
        **(headers or {}),
    }
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, address + path, data=data, headers=arguments) as response,
    ):
        text = await response.read()
        return (
            response.status,
            json.loads(text) if text and "json" in response.content_type else text,
            response.headers,
        )


async def wait_until(address: str, path: str, condition: Callable[[Any], bool]) -> None:
    """Wait until the answer to GET `path` meets `condition`."""
    while not condition((await call(address, "GET", path))[1]):  # noqa: ASYNC110 (the service is another thread, or process)
        await asyncio.sleep(0.01)


def game(**fields: Any) -> dict[str, Any]:
    """Return a request for a rollout of the task domain `game`."""
    return {"handler": "game", "index": 1, **fields}
