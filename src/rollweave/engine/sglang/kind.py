"""SGLang as a kind of server of an engine."""

from collections.abc import Iterator
from pathlib import Path

from rollweave.engine.servers.attached import About, Rule, at_least, attach
from rollweave.engine.servers.process import Server, max_context, settings_of
from rollweave.engine.sglang.checkpoint import CheckpointMemory, checkpoint_of
from rollweave.engine.sglang.control import ABORT, GENERATE, LOADS, ROUTES, SglangControl
from rollweave.engine.sglang.installed import sglang_version
from rollweave.engine.sglang.server import SPARE_TOKENS, SglangServer
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
    constrains = False
    leased_routes = (*ROUTES, GENERATE, ABORT, LOADS)

    def version(self, python: str, *, routes: bool = False, moves_kv: bool = False) -> str:
        assert not routes, "the configuration has routes with vLLM only"
        assert not moves_kv, "the configuration moves KV with vLLM only"
        return sglang_version(python)

    async def start(self, spec: EngineSpec, shape: ModelShape, folder: Path) -> Server:
        if settings_of(spec).addresses:
            return await attach(self, spec)
        return SglangServer(spec, shape, folder)

    def rules(self, about: About, spec: EngineSpec) -> Iterator[Rule]:
        priority, seeded = about.policy == "priority", about.deterministic
        yield "--enable-priority-scheduling", True, priority, priority
        yield "--disable-priority-preemption", True, not about.preempts, not about.preempts
        fixed = seeded or not spec.deterministic
        yield "--enable-deterministic-inference", spec.deterministic, seeded, fixed
        yield "--dp-size", 1, about.replicas, about.replicas == 1
        context = settings_of(spec).context + SPARE_TOKENS
        yield at_least("--context-length", context, about.context)
        yield at_least("--max-running-requests", spec.max_slots, about.slots)

    def speak(self, spec: EngineSpec, shape: ModelShape) -> OwnSglang:
        settings, context = settings_of(spec), max_context(spec, shape)
        return OwnSglang(
            version=spec.version,
            stop_ids=spec.eos_token_ids or shape.eos_token_ids,
            max_context=min(context, settings.context) if settings.addresses else context,
        )

    def control(self, spec: EngineSpec, server: Server) -> SglangControl:
        settings = settings_of(spec)
        return SglangControl(
            server.url,
            token=server.token,
            limit_s=settings.control_s,
            kv_tokens=spec.kv_tokens,
        )

    def mover(self, spec: EngineSpec, shape: ModelShape, server: Server) -> None:
        return None

    def hold(
        self, spec: EngineSpec, manifest: WeightManifest, shape: ModelShape, folder: Path
    ) -> CheckpointMemory:
        return checkpoint_of(manifest, shape, model=Path(spec.model), parent=folder)
