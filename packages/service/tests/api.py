"""Calls of a service's HTTP API."""

import asyncio
import io
import json
from collections.abc import Callable
from typing import Any, Protocol

import aiohttp


class HasAddress(Protocol):
    address: str


Target = str | HasAddress
"""A service, or its address."""


async def call(
    service: Target,
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
        session.request(
            method, address_of(service) + path, data=data, headers=arguments
        ) as response,
    ):
        text = await response.read()
        return (
            response.status,
            json.loads(text) if text and "json" in response.content_type else text,
            response.headers,
        )


def address_of(service: Target) -> str:
    return service if isinstance(service, str) else service.address


async def get(service: Target, path: str) -> Any:
    """Return the decoded body of the answer to GET."""
    return (await call(service, "GET", path))[1]


async def status_of(service: Target, *request: Any, **more: Any) -> int:
    """Return the status of the answer to a `call`."""
    return (await call(service, *request, **more))[0]


async def submit(service: Target, **fields: Any) -> tuple[int, Any, Any]:
    """Request a rollout of the task domain `game`, as `call`."""
    return await call(service, "POST", "/v1/rollouts", game(**fields))


async def wait_until(service: Target, path: str, condition: Callable[[Any], bool]) -> None:
    """Wait until the answer to GET `path` meets `condition`."""
    while not condition(await get(service, path)):  # noqa: ASYNC110 (the service is another thread, or process)
        await asyncio.sleep(0.01)


def game(**fields: Any) -> dict[str, Any]:
    """Return a request for a rollout of the task domain `game`."""
    return {"handler": "game", "index": 1, **fields}
