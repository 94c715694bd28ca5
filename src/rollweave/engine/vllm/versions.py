"""vLLM's dialect for a server of ours, the versions of its weights, and the experts
that it has chosen.

Invariant: a request is sent with a salt of the weights that it starts under, so that it
never continues a prefix that other weights have computed.
"""

import base64
import io
from collections.abc import Sequence
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
from rollweave.engine.servers.versions import PER_RANK, KnownVersions
from rollweave.schema.errors import EngineError
from rollweave.schema.serving import GenerateRequest, GenerateResult
from rollweave.schema.work import Routes

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

    def encode_streamed(self, request: GenerateRequest) -> bytes:
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        return self._versions.encode(request, self.fields(request) | streamed)

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
    `rollweave_vllm_spans`, each part has those of all tokens so far.
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
