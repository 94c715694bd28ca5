"""SGLang as a kind of server of an engine."""

from pathlib import Path

from rollweave.engine.servers.process import Server, max_context, settings_of
from rollweave.engine.sglang.checkpoint import CheckpointMemory, checkpoint_of
from rollweave.engine.sglang.control import SglangControl
from rollweave.engine.sglang.installed import sglang_version
from rollweave.engine.sglang.server import SglangServer
from rollweave.engine.sglang.versions import OwnSglang
from rollweave.schema.serving import DialectName, EngineSpec
from rollweave.schema.weights import WeightManifest
from rollweave.weights.checkpoint import ModelShape


class SglangKind:
    """The parts of an engine that are SGLang's."""

    name = "SGLang"
    dialect: DialectName = "sglang"
    copies_weights = True
    restricts_tokens = False

    def version(self, python: str, *, routes: bool = False) -> str:
        assert not routes, "the configuration has routes with vLLM only"
        return sglang_version(python)

    async def start(self, spec: EngineSpec, shape: ModelShape, folder: Path) -> Server:
        return SglangServer(spec, shape, folder)

    def speak(self, spec: EngineSpec, shape: ModelShape) -> OwnSglang:
        return OwnSglang(
            version=spec.version,
            stop_ids=spec.eos_token_ids or shape.eos_token_ids,
            max_context=max_context(spec, shape),
        )

    def control(self, spec: EngineSpec, server: Server) -> SglangControl:
        settings = settings_of(spec)
        return SglangControl(
            server.url,
            token=server.token,
            limit_s=settings.control_s,
            degree=settings.degree,
            kv_tokens=spec.kv_tokens,
        )

    def hold(
        self, spec: EngineSpec, manifest: WeightManifest, shape: ModelShape, folder: Path
    ) -> CheckpointMemory:
        return checkpoint_of(manifest, shape, model=Path(spec.model), parent=folder)
