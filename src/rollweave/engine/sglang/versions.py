"""SGLang's dialect for a server of ours, and the versions of its weights.

Invariant: a request is sent with a key of the weights that it starts under, so that it
never continues a prefix that other weights have computed.
"""

from collections.abc import Sequence
from http import HTTPStatus
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
from rollweave.engine.servers.versions import PER_RANK, KnownVersions
from rollweave.schema.serving import GenerateRequest, GenerateResult


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

    def encode_streamed(self, request: GenerateRequest) -> bytes:
        return self._versions.encode(request, self.fields(request) | {"stream": True})

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
