"""vLLM as a kind of server of an engine."""

from pathlib import Path

from rollweave.engine.servers.process import Server, settings_of
from rollweave.engine.vllm.attached import attach
from rollweave.engine.vllm.control import VllmControl
from rollweave.engine.vllm.installed import vllm_version
from rollweave.engine.vllm.mapped import Mapped, mapped
from rollweave.engine.vllm.server import VllmServer
from rollweave.engine.vllm.versions import OwnVllm
from rollweave.schema.serving import DialectName, EngineSpec
from rollweave.schema.weights import WeightManifest
from rollweave.weights.checkpoint import ModelShape


class VllmKind:
    """The parts of an engine that are vLLM's."""

    name = "vLLM"
    dialect: DialectName = "vllm"
    copies_weights = False
    restricts_tokens = True

    def version(self, python: str, *, routes: bool = False) -> str:
        return vllm_version(python, routes=routes)

    async def start(self, spec: EngineSpec, shape: ModelShape, folder: Path) -> Server:
        if settings_of(spec).addresses:
            return await attach(spec)
        return VllmServer(spec, shape, folder)

    def speak(self, spec: EngineSpec, shape: ModelShape) -> OwnVllm:
        stop_ids = spec.eos_token_ids or shape.eos_token_ids
        return OwnVllm(version=spec.version, stop_ids=stop_ids, routes=spec.routes)

    def control(self, spec: EngineSpec, server: Server) -> VllmControl:
        limit_s = settings_of(spec).control_s
        return VllmControl(server.url, token=server.token, limit_s=limit_s)

    def hold(
        self, spec: EngineSpec, manifest: WeightManifest, shape: ModelShape, folder: Path
    ) -> Mapped:
        return mapped(manifest, shape)
