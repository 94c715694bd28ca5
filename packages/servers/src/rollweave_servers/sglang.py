"""SGLang as the server of an engine: the parts that it must have, its process, and its
dialect with the versions of its weights (`docs/ENGINES.md`). All of this follows the
source of SGLang 0.5.23 and was never run against a real SGLang.

Invariants: the server listens on the loopback interface only, and admits no request but
health checks without a token that only this process knows; it ends when this process
ends, with all of its children (`plugin/sglang_launcher.py`), and leaves no socket; a
request is sent with a key of the weights that it starts under, so that it never
continues a prefix that other weights have computed.
"""

import getpass
import os
import tempfile
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec

from rollweave.engine.clients.dialects import Sglang, version_spans
from rollweave.engine.clients.responses import (
    ResponseError,
    SglangEvent,
    SglangMeta,
    SglangResponse,
    Span,
    parse,
    required,
)
from rollweave.engine.clients.streams import Part
from rollweave.schema.serving import (
    DialectName,
    EngineSpec,
    GenerateRequest,
    GenerateResult,
    ServerSpec,
)
from rollweave.schema.weights import WeightManifest
from rollweave.weights.checkpoint import ModelShape
from rollweave_servers.attached import About, Rule, at_least, attach
from rollweave_servers.interpreters import installed_version
from rollweave_servers.process import (
    HOST,
    PLUGIN,
    Server,
    ServerProcess,
    command_line,
    has_tokenizer,
    inherited,
    max_context,
    settings_of,
)
from rollweave_servers.sglang_control import (
    ABORT,
    GENERATE,
    LOADS,
    ROUTES,
    CheckpointMemory,
    SglangControl,
    checkpoint_of,
)
from rollweave_servers.versions import PER_RANK, KnownVersions

NEEDED = {
    "srt/entrypoints": (*ROUTES, GENERATE, ABORT, LOADS),
    "srt/managers": (
        '"retract"',
        "weight_versions",
        "extra_key",
        "disable_priority_preemption",
        "incremental_streaming_output",
    ),
    "srt/sampling": ("stream_interval",),
}
"""Routes and words that an SGLang must have, by the folder whose modules mention
them.
"""


LAUNCHER = PLUGIN / "sglang_launcher.py"
TOKEN = "ROLLWEAVE_SGLANG_TOKEN"
"""The environment variable with the token, as in `sglang_launcher.py`, which runs
elsewhere.
"""

SPARE_TOKENS = 8
"""Tokens by which the server's context exceeds the model's, which no sequence uses:
SGLang refuses a prompt that ends six tokens before its context, and a sequence ends two
tokens before it.
"""

PAGE_TOKENS = 256
"""Multiple of all page sizes of SGLang's cache, which has whole pages."""


class SglangServer(ServerProcess):
    """The process of a server, which starts at once and has its sockets in `folder`.
    Raises EngineError if it cannot start.
    """

    def __init__(self, spec: EngineSpec, shape: ModelShape, folder: Path) -> None:
        settings = settings_of(spec)
        super().__init__(
            "SGLang",
            settings.python,
            lambda port: (
                str(LAUNCHER),
                str(os.getpid()),
                *arguments(spec, settings, shape, port=port),
            ),
            lambda token: environment(token=token, folder=folder),
        )


def arguments(spec: EngineSpec, settings: ServerSpec, shape: ModelShape, *, port: int) -> list[str]:
    """Return the server's arguments. The user's come last, and take precedence."""
    context = max_context(spec, shape) + SPARE_TOKENS
    kv_tokens = -(-(spec.kv_tokens + SPARE_TOKENS) // PAGE_TOKENS) * PAGE_TOKENS
    ours: dict[str, object] = {
        "model-path": spec.model,
        "host": HOST,
        "port": port,
        "device": spec.device,
        "dtype": spec.dtype,
        "context-length": context,
        "max-running-requests": spec.max_slots,
        "max-total-tokens": kv_tokens,
        "tp-size": settings.degree,
        "weight-version": max(0, spec.version),
        "default-priority-value": 0,
        "log-level": "warning",  # at info, its log has the token
    }
    # SGLang could preempt, but not change the priority of a request that it has: a turn
    # that was overtaken too often could not be promoted
    switches = ["enable-priority-scheduling", "disable-priority-preemption"]
    switches.append("incremental-streaming-output")  # else each event repeats the answer
    if not spec.prefix_cache:
        switches.append("disable-radix-cache")
    if spec.deterministic:
        switches.append("enable-deterministic-inference")
    if not has_tokenizer(spec.model):
        switches.append("skip-tokenizer-init")
    return command_line(ours, switches, settings.args)


def environment(*, token: str, folder: Path) -> dict[str, str]:
    """Return the server's environment."""
    kernels = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    return {
        "TORCHINDUCTOR_CACHE_DIR": kernels,  # torch's default, which TMPDIR would move
        **inherited(),
        "TMPDIR": str(folder),  # the folder of its sockets
        # a health check that generates fails while the server is paused
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # at the temperature of the request
        TOKEN: token,
    }


class OwnSglang(Sglang):
    """The dialect of a server that this process has started with its own settings.

    `stop_ids` end a turn beside those of its request. No sequence exceeds
    `max_context`.
    """

    def __init__(self, *, version: int, stop_ids: tuple[int, ...], max_context: int) -> None:
        self._stop_ids, self._max_context = stop_ids, max_context
        self._versions = KnownVersions(version)

    def changed(self, version: int, publication_id: int) -> None:
        """Record that the server gets these weights, while it is paused."""
        self._versions.changed(version, publication_id)

    def fields(self, request: GenerateRequest) -> dict[str, Any]:
        fields = super().fields(request)
        params = fields["sampling_params"]
        # a stop token is ignored with `ignore_eos`, so SGLang's own list applies, too
        params["stop_token_ids"] = sorted({*params["stop_token_ids"], *self._stop_ids})
        room = max(1, self._max_context - len(request.tokens))
        params["max_new_tokens"] = min(params["max_new_tokens"], room)
        fields["priority"] = round(request.rank * PER_RANK)
        if self._versions.key:
            fields["extra_key"] = self._versions.key
        return fields

    def encode(self, request: GenerateRequest) -> bytes:
        return self._versions.encode(request, self.fields(request))

    def encode_streamed(self, request: GenerateRequest, *, every: int) -> bytes:
        fields = self.fields(request) | {"stream": True}
        fields["sampling_params"]["stream_interval"] = every
        return self._versions.encode(request, fields)

    def parts(self, request: GenerateRequest) -> "SglangParts":
        return SglangParts(self, self._versions, request)

    def spans(self, meta: SglangMeta, count: int) -> Sequence[Span]:
        """Return the versions of the tokens, which this server must report: the label
        of an answer is that of the moment at which it was sent.
        """
        if meta.weight_versions is None and count:
            raise ResponseError("its answer has no meta_info.weight_versions")
        return meta.weight_versions or ()

    def result(self, request: GenerateRequest, answer: SglangResponse) -> GenerateResult:
        return self._versions.checked(request, super().result(request, answer))


class SglangParts:
    """The parts of an answer: each has its last tokens, or all of them without
    `--incremental-streaming-output`.

    SGLang names versions in the last part only. Once the weights have changed since the
    request was sent, the versions of tokens are not certain before that.
    """

    def __init__(
        self, dialect: OwnSglang, versions: KnownVersions, request: GenerateRequest
    ) -> None:
        self._dialect, self._versions, self._request = dialect, versions, request
        self._last = SglangMeta()

    def read(self, event: bytes, known: int) -> Part | None:
        part = parse(event, SglangEvent)
        if part.error is not None:
            raise ResponseError(f"its answer failed: {part.error.message:.300}")
        meta = self._last = required(part.meta_info, "meta_info")
        reason = meta.finish_reason
        if reason is not None and (reason.status_code or 0) >= HTTPStatus.BAD_REQUEST:
            raise ResponseError(f"its answer failed: {reason.message or reason.type:.300}")
        count = required(meta.completion_tokens, "meta_info.completion_tokens")
        pairs = meta.output_token_logprobs or ()
        start, tokens = count - len(pairs), [token for _, token, _ in pairs]
        ids = list(part.output_ids or ())
        both = min(len(ids), len(tokens))
        if ids[len(ids) - both :] != tokens[len(tokens) - both :]:
            raise ResponseError(f"its log-probs are of other tokens than its {len(ids)} output_ids")
        spans = None if meta.weight_versions is None else version_spans(meta.weight_versions)
        return Part(
            start=start,
            tokens=tokens,
            logprobs=[logprob for logprob, _, _ in pairs],
            versions=self._versions.so_far(self._request, count, spans),
            ends=reason is not None,
        )

    def result(self, tokens: Sequence[int], logprobs: Sequence[float]) -> GenerateResult:
        pairs = tuple((at, token, None) for token, at in zip(tokens, logprobs, strict=True))
        meta = msgspec.structs.replace(self._last, output_token_logprobs=pairs)
        answer = SglangResponse(meta, output_ids=tuple(tokens))
        return self._dialect.result(self._request, answer)


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
        return installed_version(
            self.name, python, package="sglang", distributions=("sglang",), needed=NEEDED
        )

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
