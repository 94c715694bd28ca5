"""The routes by which a vLLM server is paused and its weights are changed, and a
published version as its ranks map it.
"""

import contextlib
import os
import re

from rollweave.schema.weights import WeightManifest
from rollweave_servers.control import Calls, ControlError, RefusedError
from rollweave_servers.published import HeldWeights


class Mapped:
    """A published version, verified, and kept open until the server has it."""

    def __init__(self, manifest: WeightManifest, fd: int) -> None:
        self._manifest, self._fd = manifest, fd

    @property
    def manifest(self) -> WeightManifest:
        return self._manifest

    def layout(self) -> dict[str, object]:
        """Return what the plug-in needs in order to read it."""
        return {
            "location": f"/proc/{os.getpid()}/fd/{self._fd}",
            "nbytes": self._manifest.nbytes,
            "tensors": [
                (meta.name, meta.dtype, meta.shape, meta.offset) for meta in self._manifest.tensors
            ],
        }

    def close(self) -> None:
        os.close(self._fd)


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

ATTACHED_ROUTES = ("/abort_requests",)
"""Further control routes that a server of another owner must have."""

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


class VllmControl(Calls):
    """The control routes of the server at `url`. A call takes at most `limit_s`."""

    def __init__(self, url: str, *, token: str, limit_s: float) -> None:
        routes = {**ROUTES, **dict.fromkeys(ATTACHED_ROUTES, "POST")}
        super().__init__("vLLM", url, routes, token=token, limit_s=limit_s)

    async def connect(self) -> None:
        """Prepare the server for updates of its weights."""
        await self.call("/init_weight_transfer_engine", {"init_info": {}})

    async def reset(self, label: str) -> None:
        """Pause a server whose state is unknown: its requests end, and so does an
        update that its former user has begun. Its weights may be any, and must be given
        anew.
        """
        await self.pause()
        await self.call("/abort_requests", {})
        await self.give_up(label)

    async def pause(self) -> None:
        """Stop before the next step and keep all requests; their KV is recomputed after
        `resume`, since it may have other weights by then.
        """
        await self.call("/pause", mode="keep", clear_cache="true")
        if (await self.call("/is_paused")).get("is_paused") is not True:
            raise ControlError("vLLM is not paused after /pause")

    async def resume(self) -> None:
        await self.call("/resume")
        if (await self.call("/is_paused")).get("is_paused") is not False:
            raise ControlError("vLLM is still paused after /resume")

    async def check(self, weights: HeldWeights) -> None:
        """Have all ranks check the weights, before any of them swaps."""
        assert isinstance(weights, Mapped), "weights for another kind of server"
        try:
            await self.start_update()
        except RefusedError as error:
            raise ControlError(str(error)) from error
        await self.update({"part": "check", **weights.layout()})

    async def give_up(self, label: str) -> None:
        """End an update that a rank has refused, and with which nothing has changed."""
        with contextlib.suppress(RefusedError):  # it has ended on the rank that refused
            await self.finish_update(label)

    async def swap(self, weights: HeldWeights, label: str) -> None:
        await self.update({"part": "swap"})
        await self.finish_update(label)

    async def start_update(self) -> None:
        await self.call("/start_weight_update")

    async def update(self, info: dict[str, object]) -> None:
        """Run one part of an update on all ranks."""
        await self.call("/update_weights", {"update_info": info})

    async def finish_update(self, label: str) -> None:
        """End the update: `label` is the version of the tokens from now on."""
        await self.call("/finish_weight_update", {"weight_version": label})
        if (loaded := (await self.call("/weight_info")).get("weight_version")) != label:
            raise ControlError(f"vLLM's weights must be version {label!r}, got {loaded!r}")

    async def gauges(self) -> dict[str, float]:
        """Return those of `GAUGES` that the server reports; none if it does not answer
        now.
        """
        text = (await self.sample("/metrics", METRICS_S)).decode(errors="replace")
        return {GAUGES[name]: float(value) for name, value in GAUGE.findall(text) if name in GAUGES}
