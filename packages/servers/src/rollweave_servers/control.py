"""Calls of the routes by which an inference server is paused and its weights are
changed.

Invariants: each call has a deadline, and its error names the route; what a call was to
achieve is checked afterwards; each call has a separate connection, because a server may
close a connection after an error.
"""

import contextlib
from collections.abc import Mapping
from typing import Any, Protocol

import aiohttp
import msgspec

from rollweave.schema.errors import EngineError
from rollweave_servers.published import HeldWeights

RERANK = "/rollweave/rerank"
"""The plug-in's route that changes a priority, as in `plugin/rollweave_leases`."""

FOUND = {"found": True}
"""The answer of this route where the server has the request."""

RERANK_S = 2.0
"""Maximum seconds of such a call."""

ERROR_CHARS = 400
"""Maximum number of characters of the server's message in an error."""


class RefusedError(EngineError):
    """The server has answered a control call with an error."""


class ControlError(EngineError):
    """A control call failed in another way: the state of the server is not known."""


class Control(Protocol):
    """The control of one server. All methods but `gauges` raise `EngineError`."""

    async def connect(self) -> None:
        """Check the server, and prepare it for updates of its weights."""

    async def reset(self, label: str) -> None:
        """Pause a server that this engine has not started, and end what its former user
        has left. The model's weights must follow.
        """

    async def pause(self) -> None:
        """Stop before the next step and keep all requests; their KV is recomputed after
        `resume`, since it may have other weights by then.
        """

    async def resume(self) -> None:
        """Continue all requests."""

    async def check(self, weights: HeldWeights) -> None:
        """Have the paused server check the weights. Raises `RefusedError` if it refuses
        them, after which nothing has changed and `give_up` must follow.
        """

    async def give_up(self, label: str) -> None:
        """End an update that was refused: `label` stays the version of the tokens."""

    async def swap(self, weights: HeldWeights, label: str) -> None:
        """Give the paused server these weights. `label` is the version of the tokens
        from now on.
        """

    async def rerank(self, request_id: str, priority: int) -> bool:
        """Change the priority of a request, in a server that preempts. Return False if
        the call fails, or the server does not have the request.
        """

    async def gauges(self) -> Mapping[str, float]:
        """Return what the server measures, of `running`, `waiting`, `kv_share` and
        `preemptions`; nothing if it does not answer now.
        """

    async def close(self) -> None:
        """Close this client."""


class Calls:
    """The control routes of the server `name` at `url`, with their methods. A call
    takes at most `limit_s`.
    """

    def __init__(
        self, name: str, url: str, routes: Mapping[str, str], *, token: str, limit_s: float
    ) -> None:
        self._name, self._url, self._routes, self._limit_s = name, url, routes, limit_s
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True),
            headers={"Authorization": f"Bearer {token}"},
            timeout=aiohttp.ClientTimeout(total=limit_s),
        )

    async def close(self) -> None:
        await self._session.close()

    async def rerank(self, request_id: str, priority: int) -> bool:
        """See `Control`."""
        body = msgspec.json.encode({"id": request_id, "priority": priority})
        limit, url = aiohttp.ClientTimeout(total=RERANK_S), f"{self._url}{RERANK}"
        failures = (TimeoutError, aiohttp.ClientError, OSError, msgspec.DecodeError)
        with contextlib.suppress(*failures):
            async with self._session.post(url, data=body, timeout=limit) as response:
                return bool(msgspec.json.decode(await response.read()) == FOUND)
        return False

    async def call(
        self, route: str, body: dict[str, Any] | None = None, **query: str
    ) -> dict[str, Any]:
        """Call a route, and return the JSON object that it answers."""
        answer = await self.text(route, body, **query)
        try:
            return msgspec.json.decode(answer, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ControlError(f"{self._name}'s answer to {route} cannot be read: {error}") from (
                error
            )

    async def text(self, route: str, body: dict[str, Any] | None = None, **query: str) -> bytes:
        """Call a route, and return its answer."""
        status, answer = await self.status(route, body, **query)
        if status != 200:
            text = answer[:ERROR_CHARS].decode(errors="replace")
            raise RefusedError(f"{self._name} answered {route} with status {status}: {text}")
        return answer

    async def status(
        self, route: str, body: dict[str, Any] | None = None, **query: str
    ) -> tuple[int, bytes]:
        """Call a route, and return the status and the body of its answer."""
        try:
            async with self._session.request(
                self._routes[route],
                self._url + route,
                params=query,
                data=msgspec.json.encode(body) if body is not None else None,
                headers={"Content-Type": "application/json"},
            ) as response:
                return response.status, await response.read()
        except TimeoutError:
            raise ControlError(
                f"{self._name} did not answer {route} within {self._limit_s:g} s"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise ControlError(f"{self._name}'s answer to {route} broke off: {error}") from error

    async def sample(self, route: str, limit_s: float) -> bytes:
        """Return the answer to a GET of a route; nothing if it fails or takes longer
        than `limit_s`.
        """
        limit = aiohttp.ClientTimeout(total=limit_s)
        try:
            async with self._session.get(f"{self._url}{route}", timeout=limit) as response:
                return await response.read() if response.status == 200 else b""
        except (TimeoutError, aiohttp.ClientError, OSError):
            return b""
