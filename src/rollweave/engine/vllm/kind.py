"""vLLM as a kind of server of an engine."""

from collections.abc import Iterator
from pathlib import Path

from rollweave.engine.servers.attached import About, Rule, at_least, attach
from rollweave.engine.servers.process import Server, settings_of
from rollweave.engine.vllm.control import ABORT, ATTACHED_ROUTES, GENERATE, ROUTES, VllmControl
from rollweave.engine.vllm.installed import vllm_version
from rollweave.engine.vllm.kv import NixlKv
from rollweave.engine.vllm.mapped import Mapped, mapped
from rollweave.engine.vllm.server import GRAMMARS, VllmServer
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
    constrains = True
    leased_routes = (*ROUTES, *ATTACHED_ROUTES, GENERATE, ABORT)

    def version(self, python: str, *, routes: bool = False, moves_kv: bool = False) -> str:
        return vllm_version(python, routes=routes, moves_kv=moves_kv)

    async def start(self, spec: EngineSpec, shape: ModelShape, folder: Path) -> Server:
        if settings_of(spec).addresses:
            return await attach(self, spec)
        return VllmServer(spec, shape, folder)

    def rules(self, about: About, spec: EngineSpec) -> Iterator[Rule]:
        settings = settings_of(spec)
        logprobs = "processed_logprobs" if settings.scaled_logprobs else "raw_logprobs"
        chunked = about.device == "cpu" and about.chunked_prefill
        yield "weight transfer", "rollweave", about.transfer, about.transfer == "rollweave"
        grammars = about.grammars == GRAMMARS
        yield "--structured-outputs-config.backend", GRAMMARS, about.grammars, grammars
        # else a reasoning parser would exempt the tokens of the reasoning
        whole = about.constrains_reasoning
        yield "--structured-outputs-config.enable_in_reasoning", True, whole, whole
        yield "--logprobs-mode", logprobs, about.logprobs, about.logprobs == logprobs
        yield "--scheduling-policy", "priority", about.policy, about.policy == "priority"
        yield at_least("--max-model-len", settings.context, about.context)
        yield at_least("--max-num-seqs", spec.max_slots, about.slots)
        yield "chunked prefill on a CPU", False, True, not chunked

    def speak(self, spec: EngineSpec, shape: ModelShape) -> OwnVllm:
        stop_ids = spec.eos_token_ids or shape.eos_token_ids
        return OwnVllm(version=spec.version, stop_ids=stop_ids, routes=spec.routes)

    def control(self, spec: EngineSpec, server: Server) -> VllmControl:
        limit_s = settings_of(spec).control_s
        return VllmControl(server.url, token=server.token, limit_s=limit_s)

    def mover(self, spec: EngineSpec, shape: ModelShape, server: Server) -> NixlKv | None:
        return NixlKv(spec, shape, server) if settings_of(spec).moves_kv else None

    def hold(
        self, spec: EngineSpec, manifest: WeightManifest, shape: ModelShape, folder: Path
    ) -> Mapped:
        return mapped(manifest, shape)
