"""The kinds that this distribution announces: `ServerKind` of Rollweave's
`engine/server_kinds.py`, for vLLM and SGLang.
"""

import asyncio
from collections.abc import Callable

from rollweave.engine.server_kinds import ServerKind
from rollweave.schema.serving import EngineCommand, EngineReply, EngineSpec
from rollweave_servers.attached import LeasedKind, check_servers
from rollweave_servers.engine import ServerEngine
from rollweave_servers.kinds import ServerParts
from rollweave_servers.sglang import SglangKind
from rollweave_servers.vllm import VllmKind


class _Engines:
    """The methods of `ServerKind` that are the same for all kinds."""

    def attached_versions(self: LeasedKind, spec: EngineSpec) -> list[str]:
        return [about.version for about in check_servers(self, spec)]

    async def serve(
        self: ServerParts,
        spec: EngineSpec,
        commands: "asyncio.Queue[EngineCommand]",
        reply: Callable[[EngineReply], None],
    ) -> None:
        await ServerEngine(self, spec, reply).run(commands)


class _Vllm(_Engines, VllmKind):
    """Engines of kind vllm."""


class _Sglang(_Engines, SglangKind):
    """Engines of kind sglang."""


VLLM: ServerKind = _Vllm()
SGLANG: ServerKind = _Sglang()
