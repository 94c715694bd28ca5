"""vLLM as the server of an engine: the parts that it must have, its process, and its
dialect with the versions of its weights and the experts that it has chosen
(`docs/ENGINES.md`).

Invariants: the server listens on the loopback interface only, and admits no request
without a token that only this process knows; it ends when this process ends, with all
of its children (`plugin/rollweave_vllm.py`), and leaves no socket, and once it serves
no shared memory, however it ends; nothing needs to be installed beside vLLM; a request
is sent with a salt of the weights that it starts under, so that it never continues a
prefix that other weights have computed.
"""

import base64
import contextlib
import dataclasses
import io
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollweave.engine.clients.dialects import Vllm, single, version_spans
from rollweave.engine.clients.responses import (
    ResponseError,
    Usage,
    VllmChoice,
    VllmEvent,
    VllmLogprobs,
    VllmResponse,
    VllmTokenLogprob,
    parse,
    required,
)
from rollweave.engine.clients.streams import Part
from rollweave.engine.matchers import lark_of
from rollweave.io.processes import family
from rollweave.schema.errors import EngineError
from rollweave.schema.serving import (
    DialectName,
    EngineSpec,
    GenerateRequest,
    GenerateResult,
    ServerSpec,
)
from rollweave.schema.weights import NUMBER_BYTES, WeightManifest
from rollweave.schema.work import Routes
from rollweave.weights.checkpoint import ModelShape
from rollweave.weights.transport import group_end
from rollweave_servers.attached import About, Rule, at_least, attach
from rollweave_servers.interpreters import installed_version
from rollweave_servers.process import (
    HOST,
    PLUGIN,
    Server,
    ServerProcess,
    command_line,
    free_port,
    has_tokenizer,
    inherited,
    max_context,
    settings_of,
)
from rollweave_servers.published import verified
from rollweave_servers.versions import PER_RANK, KnownVersions
from rollweave_servers.vllm_control import (
    ABORT,
    ATTACHED_ROUTES,
    GENERATE,
    ROUTES,
    Mapped,
    VllmControl,
)
from rollweave_servers.vllm_group import BACKEND, Announced, GroupControl
from rollweave_servers.vllm_kv import LEASE_S, NixlKv

NEEDED: dict[str, tuple[str, ...]] = {
    "entrypoints": (*ROUTES, GENERATE, ABORT, "stream_interval"),
    "distributed/weight_transfer": ("register_engine",),
    "v1": (
        "apply_grammar_bitmask",
        "GuidanceBackend",
        "all_stop_token_ids",
        "_preempt_request",
        "kv_holding_waiting",
        "max_num_active_reqs",
        "num_stale_output_tokens",
        "requires_kv_delivery",
    ),
    "model_executor/model_loader/reload": (
        "initialize_layerwise_reload",
        "finalize_layerwise_reload",
    ),
}
"""Routes and functions that a vLLM must have, by the folder whose modules mention
them.
"""


NEEDED_FOR_ROUTES: dict[str, tuple[str, ...]] = {
    "distributed/aux_output_connector": ("AuxOutputWorkerConnector",),
    "config": ("enable_return_routed_experts",),
}
"""The same, of a vLLM that returns routes as they are read here."""


NEEDED_TO_MOVE_KV: dict[str, tuple[str, ...]] = {
    "distributed/kv_transfer": (
        "NixlConnector",
        "kv_lease_duration",
        "blocks_expiry_time",
        "_engine_clock_offset",
        "_pop_done_transfers",
    ),
}
"""The same, of a vLLM whose KV moves."""


NAME = "rollweave"
TOKEN = "ROLLWEAVE_VLLM_TOKEN"
"""The environment variable with the token, as in the plug-in, which cannot be imported
here.
"""

RECORD_ROUTES = "ROLLWEAVE_VLLM_ROUTES"
"""The environment variable with which the plug-in records routes on a CPU."""

RELEASE_KV = "ROLLWEAVE_VLLM_KV"
"""The environment variable with which the plug-in can end the leases of moved KV."""

GRAMMARS = "guidance"
"""The library by which vLLM constrains answers: llguidance, as in the embedded engine.
"""

BATCHED_TOKENS = 16384
"""Tokens that a step computes at most on a CPU, where a prompt is computed in one
piece: vLLM's generators of a request with a seed cannot continue one there.
"""

TRANSFERS = 4
"""Number of a server's sequences beside those of turns: the core lets an engine be in
three transfers at once, each of which is a request.
"""

SHARED_MEMORY = " /dev/shm/"
"""Text before the names of shared memory and semaphores in a process's memory map."""

SPARE_BLOCKS = 2
"""Blocks of the cache that vLLM keeps for itself: a sequence of the maximum length must
fit beside them.
"""

OWN_SCHEDULER = "--scheduler-cls"
"""The argument with which a user gives a server a scheduler of his own."""

SCHEDULERS = "rollweave_vllm_scheduler"
"""The module of the schedulers that preempt, which the plug-in has."""

BLOCK_TOKENS = 32
"""Tokens in a block on a CPU, where vLLM's default would be 128; fewer elsewhere."""


class VllmServer(ServerProcess):
    """The process of a server, which starts at once and has its sockets in `folder`.
    Raises EngineError if it cannot start.
    """

    def __init__(self, spec: EngineSpec, shape: ModelShape, folder: Path) -> None:
        settings = settings_of(spec)
        self.preempts = not any(one.startswith(OWN_SCHEDULER) for one in settings.args)
        super().__init__(
            "vLLM",
            settings.python,
            lambda port: (
                "-m",
                "rollweave_vllm",
                str(os.getpid()),
                *arguments(spec, settings, shape, port=port),
            ),
            lambda token: environment(spec, token=token, folder=folder),
        )

    def on_ready(self) -> None:
        """Remove the names of the shared memory and semaphores of the server and its
        children. All of them have opened what they share once the server is ready.
        """
        names = {
            line.split(maxsplit=5)[5]
            for pid in family(self.pid)
            for line in _maps_of(pid)
            if SHARED_MEMORY in line
        }
        for name in names:
            with contextlib.suppress(OSError):  # such as one with the mark "(deleted)"
                os.unlink(name)


def _maps_of(pid: int) -> list[str]:
    """Return the lines of a process's memory map; none if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/maps").read_text().splitlines()
    return []


def arguments(spec: EngineSpec, settings: ServerSpec, shape: ModelShape, *, port: int) -> list[str]:
    """Return the server's arguments. The user's come last, and take precedence."""
    degree, context = settings.degree, max_context(spec, shape)
    own = dataclasses.replace(shape, kv_heads=-(-shape.kv_heads // degree))
    kv_tokens = spec.kv_tokens + SPARE_BLOCKS * BLOCK_TOKENS
    recorded = spec.routes and spec.device == "cpu"  # the recorder takes each step's tokens
    in_order = recorded or "--no-async-scheduling" in settings.args
    ours: dict[str, object] = {
        "model": spec.model,
        "served-model-name": NAME,
        "host": HOST,
        "port": port,
        "dtype": spec.dtype,
        "max-model-len": context,
        "max-num-seqs": spec.max_slots + (TRANSFERS if settings.moves_kv else 0),
        "tensor-parallel-size": degree,
        "kv-cache-memory-bytes": own.kv_bytes(NUMBER_BYTES[spec.dtype]) * kv_tokens,
        "scheduling-policy": "priority",
        "scheduler-cls": f"{SCHEDULERS}.{'Sync' * in_order}PreemptingScheduler",
        "weight-transfer-config": json.dumps({"backend": BACKEND if settings.collective else NAME}),
        "structured-outputs-config": json.dumps({"backend": GRAMMARS, "enable_in_reasoning": True}),
        "middleware": "rollweave_vllm.Guard",
    }
    if settings.moves_kv:
        ours["kv-transfer-config"] = json.dumps(connector(spec.device))
    switches = ["enable-scale-out", "enable-prompt-tokens-details", "disable-uvicorn-access-log"]
    if settings.scaled_logprobs:
        ours["logprobs-mode"] = "processed_logprobs"  # else they are at temperature 1
    if not spec.prefix_cache:
        switches.append("no-enable-prefix-caching")
    if spec.routes:
        switches.append("enable-return-routed-experts")
    if not has_tokenizer(spec.model):
        switches.append("skip-tokenizer-init")
    if spec.device == "cpu":
        ours |= {"block-size": BLOCK_TOKENS, "max-num-batched-tokens": max(BATCHED_TOKENS, context)}
        if degree == 1:
            ours["distributed-executor-backend"] = "uni"
        switches += ["enforce-eager", "no-enable-chunked-prefill"]
        if recorded:
            switches.append("no-async-scheduling")
    return command_line(ours, switches, settings.args)


def connector(device: str) -> dict[str, object]:
    """Return vLLM's settings of the transfer of KV to other servers and from them."""
    return {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": device,
        "kv_load_failure_policy": "fail",  # the turn computes its prompt itself
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
    }


def environment(spec: EngineSpec, *, token: str, folder: Path) -> dict[str, str]:
    """Return the server's environment."""
    ours = {
        "PYTHONPATH": str(PLUGIN),
        "VLLM_PLUGINS": NAME,
        "VLLM_SERVER_DEV_MODE": "1",  # without it there are no control routes
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": str(folder),  # the folder of its sockets
        TOKEN: token,
    }
    if spec.device == "cpu":
        ours |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
        if settings_of(spec).degree == 1:
            ours["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process is twice as fast
    if settings_of(spec).moves_kv:
        ours |= {
            RELEASE_KV: "1",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": spec.kv_host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port(spec.kv_host)),
        }
        if spec.device == "cpu":
            ours["UCX_TLS"] = "tcp"  # shared memory would be left if the server is killed
        if spec.kv_host == HOST:
            ours["UCX_NET_DEVICES"] = "lo"
    if spec.routes:
        ours[RECORD_ROUTES if spec.device == "cpu" else "VLLM_USE_V2_MODEL_RUNNER"] = "1"
    return inherited() | ours


ROUTE_DTYPES = {"uint8": "<u1", "uint16": "<u2"}
"""Number formats of the routes that vLLM returns, and those in `Routes`."""


class OwnVllm(Vllm):
    """The dialect of a server that this process has started with its own settings.

    `stop_ids` end a turn beside those of its request. With `routes`, the server records
    them, and an answer without them is an error.
    """

    checks_grammars = True

    def __init__(self, *, version: int, stop_ids: tuple[int, ...], routes: bool = False) -> None:
        super().__init__()
        self._stop_ids, self._routes = stop_ids, routes
        self._versions = KnownVersions(version)

    def changed(self, version: int, publication_id: int) -> None:
        """Record that the server gets these weights, while it is paused."""
        self._versions.changed(version, publication_id)

    def fields(self, request: GenerateRequest) -> dict[str, Any]:
        constraint = request.sampling.constraint
        free = msgspec.structs.replace(request.sampling, constraint=None)
        fields = super().fields(msgspec.structs.replace(request, sampling=free))
        sampling = fields["sampling_params"]
        sampling["stop_token_ids"] = sorted({*sampling["stop_token_ids"], *self._stop_ids})
        if constraint is not None:
            if not sampling["stop_token_ids"]:
                raise EngineError("sampling.constraint needs a token that ends the turn, got none")
            sampling["structured_outputs"] = {"grammar": lark_of(constraint)}
        sampling["ignore_eos"] = True  # its own list of such tokens may be another one
        sampling["detokenize"] = any(sampling["stop"])
        if self._routes:
            sampling["routed_experts_prompt_start"] = request.routes_from
        fields["priority"] = -round(request.rank * PER_RANK)
        if self._versions.key:
            fields["cache_salt"] = self._versions.key
        return fields

    def encode(self, request: GenerateRequest) -> bytes:
        return self._versions.encode(request, self.fields(request))

    def encode_streamed(self, request: GenerateRequest, *, every: int) -> bytes:
        fields = self.fields(request)
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
        fields["sampling_params"]["stream_interval"] = every
        return self._versions.encode(request, fields)

    def parts(self, request: GenerateRequest) -> "VllmParts":
        return VllmParts(self, self._versions, request)

    def result(self, request: GenerateRequest, answer: VllmResponse) -> GenerateResult:
        return self._versions.checked(request, super().result(request, answer))

    def routes(self, request: GenerateRequest, choice: VllmChoice, tokens: int) -> Routes | None:
        """Return the routes of an answer of so many tokens."""
        if not self._routes or not tokens:
            return None
        import numpy

        where = "choices[0].routed_experts"
        text = required(choice.routed_experts, where)
        try:
            array = numpy.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise ResponseError(f"its {where} cannot be read: {error}") from error
        start, end = request.routes_from, len(request.tokens) + tokens - 1
        dtype = ROUTE_DTYPES.get(str(array.dtype))
        if dtype is None or array.ndim != 3 or len(array) != end - start:
            raise ResponseError(
                f"its {where} must be of {end - start} tokens, by layer, in uint8 or uint16, got "
                f"{array.dtype} of shape {array.shape}"
            )
        return Routes(
            start=start,
            end=end,
            layers=array.shape[1],
            top_k=array.shape[2],
            data=array.astype(dtype).tobytes(),
        )


class VllmParts:
    """The parts of an answer: each has the tokens behind those of the parts before it.

    vLLM names versions in the last part. With the plug-in
    `rollweave_vllm`, each part has those of all tokens so far.
    """

    def __init__(self, dialect: OwnVllm, versions: KnownVersions, request: GenerateRequest) -> None:
        self._dialect, self._versions, self._request = dialect, versions, request
        self._last, self._usage = VllmChoice(), Usage()

    def read(self, event: bytes, known: int) -> Part | None:
        part = parse(event, VllmEvent)
        if part.error is not None:
            raise ResponseError(f"its answer failed: {part.error.message:.300}")
        self._usage = part.usage or self._usage
        if not part.choices:
            return None
        choice = self._last = single(part.choices)
        tokens = required(choice.token_ids, "choices[0].token_ids")
        content = choice.logprobs.content if choice.logprobs is not None else None
        entries = required(content, "choices[0].logprobs.content")
        if [entry.token_id for entry in entries] != list(tokens):
            raise ResponseError(
                f"its log-probs are of other tokens than its {len(tokens)} token_ids"
            )
        spans = None if choice.weight_versions is None else version_spans(choice.weight_versions)
        return Part(
            start=known,
            tokens=tokens,
            logprobs=[entry.logprob for entry in entries],
            versions=self._versions.so_far(self._request, known + len(tokens), spans),
            ends=choice.finish_reason is not None,
        )

    def result(self, tokens: Sequence[int], logprobs: Sequence[float]) -> GenerateResult:
        pairs = zip(tokens, logprobs, strict=True)
        content = tuple(VllmTokenLogprob(token, logprob) for token, logprob in pairs)
        choice = msgspec.structs.replace(
            self._last, token_ids=tuple(tokens), logprobs=VllmLogprobs(content)
        )
        return self._dialect.result(self._request, VllmResponse((choice,), self._usage))


class VllmKind:
    """The parts of an engine that are vLLM's."""

    name = "vLLM"
    dialect: DialectName = "vllm"
    copies_weights = False
    restricts_tokens = True
    constrains = True
    leased_routes = (*ROUTES, *ATTACHED_ROUTES, GENERATE, ABORT)

    def version(self, python: str, *, routes: bool = False, moves_kv: bool = False) -> str:
        return installed_version(
            self.name,
            python,
            package="vllm",
            distributions=("vllm", "vllm-cpu"),
            needed=NEEDED
            | (NEEDED_FOR_ROUTES if routes else {})
            | (NEEDED_TO_MOVE_KV if moves_kv else {}),
            beside=("nixl",) if moves_kv else (),
        )

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
        settings = settings_of(spec)
        access: Any = {"token": server.token, "limit_s": settings.control_s}
        if not settings.collective:
            return VllmControl(server.url, **access)
        return GroupControl(server.url, receiver=group_end("server")(settings.degree), **access)

    def mover(self, spec: EngineSpec, shape: ModelShape, server: Server) -> NixlKv | None:
        return NixlKv(spec, shape, server) if settings_of(spec).moves_kv else None

    def hold(
        self, spec: EngineSpec, manifest: WeightManifest, shape: ModelShape, folder: Path
    ) -> Mapped | Announced:
        if settings_of(spec).collective:
            return Announced(manifest, shape)
        return Mapped(manifest, verified(manifest, shape)[0])
