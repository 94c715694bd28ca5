"""The routes by which a vLLM server is paused and its weights are changed.

Invariants: each call has a deadline, and its error names the route; what a call was to
achieve is checked afterwards; each call has a separate connection, because vLLM
closes a connection after an error.
"""

import re
from typing import Any

import aiohttp
import msgspec

from rollweave.schema.errors import EngineError

ROUTES = {
    "/pause": "POST",
    "/resume": "POST",
    "/is_paused": "GET",
    "/init_weight_transfer_engine": "POST",
    "/start_weight_update": "POST",
    "/update_weights": "POST",
    "/finish_weight_update": "POST",
    "/weight_info": "GET",
}
"""The control routes that a server must have, and their methods."""

GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"

GAUGES = {
    "num_requests_running": "running",
    "num_requests_waiting": "waiting",
    "kv_cache_usage_perc": "kv_share",
    "num_preemptions_total": "preemptions",
}
"""Metrics of vLLM that are read, and their names here."""

GAUGE = re.compile(r"^vllm:(\w+)\{[^}]*\} (\S+)$", re.MULTILINE)

METRICS_S = 2.0
"""Maximum seconds to read the metrics, without which a sample is taken as well."""

ERROR_CHARS = 400
"""Maximum number of characters of the server's message in an error."""


class RefusedError(EngineError):
    """The server has answered a control call with an error."""


class ControlError(EngineError):
    """A control call failed in another way: the state of the server is not known."""


class Control:
    """The control routes of the server at `url`. A call takes at most `limit_s`."""

    def __init__(self, url: str, *, token: str, limit_s: float) -> None:
        self._url, self._limit_s = url, limit_s
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True),
            headers={"Authorization": f"Bearer {token}"},
            timeout=aiohttp.ClientTimeout(total=limit_s),
        )

    async def close(self) -> None:
        await self._session.close()

    async def connect(self) -> None:
        """Prepare the server for updates of its weights."""
        await self._call("/init_weight_transfer_engine", {"init_info": {}})

    async def pause(self) -> None:
        """Stop before the next step and keep all requests; their KV is recomputed after
        `resume`, since it may have other weights by then.
        """
        await self._call("/pause", mode="keep", clear_cache="true")
        if (await self._call("/is_paused")).get("is_paused") is not True:
            raise ControlError("vLLM is not paused after /pause")

    async def resume(self) -> None:
        await self._call("/resume")
        if (await self._call("/is_paused")).get("is_paused") is not False:
            raise ControlError("vLLM is still paused after /resume")

    async def start_update(self) -> None:
        await self._call("/start_weight_update")

    async def update(self, info: dict[str, object]) -> None:
        """Run one part of an update on all ranks."""
        await self._call("/update_weights", {"update_info": info})

    async def finish_update(self, label: str) -> None:
        """End the update: `label` is the version of the tokens from now on."""
        await self._call("/finish_weight_update", {"weight_version": label})
        if (found := (await self._call("/weight_info")).get("weight_version")) != label:
            raise ControlError(f"vLLM's weights must be version {label!r}, got {found!r}")

    async def gauges(self) -> dict[str, float]:
        """Return those of `GAUGES` that the server reports; none if it does not answer
        now.
        """
        limit = aiohttp.ClientTimeout(total=METRICS_S)
        try:
            async with self._session.get(f"{self._url}/metrics", timeout=limit) as response:
                text = await response.text()
        except (TimeoutError, aiohttp.ClientError, OSError):
            return {}
        return {GAUGES[name]: float(value) for name, value in GAUGE.findall(text) if name in GAUGES}

    async def _call(
        self, route: str, body: dict[str, Any] | None = None, **query: str
    ) -> dict[str, Any]:
        try:
            async with self._session.request(
                ROUTES[route],
                self._url + route,
                params=query,
                data=msgspec.json.encode(body) if body is not None else None,
                headers={"Content-Type": "application/json"},
            ) as response:
                answer = await response.read()
        except TimeoutError:
            raise ControlError(f"vLLM did not answer {route} within {self._limit_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ControlError(f"vLLM's answer to {route} broke off: {error}") from error
        if response.status != 200:
            text = answer[:ERROR_CHARS].decode(errors="replace")
            raise RefusedError(f"vLLM answered {route} with status {response.status}: {text}")
        try:
            return msgspec.json.decode(answer, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ControlError(f"vLLM's answer to {route} cannot be read: {error}") from error
