"""SGLang's dialect for a server of ours, and the versions of its weights.

Invariant: a request is sent with a key of the weights that it starts under, so that it
never continues a prefix that other weights have computed.
"""

from collections.abc import Sequence
from typing import Any

from rollweave.engine.clients.dialects import Sglang
from rollweave.engine.clients.responses import ResponseError, SglangMeta, Span
from rollweave.engine.servers.versions import PER_RANK, KnownVersions
from rollweave.schema.packing import as_json
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
        body = as_json(self.fields(request))
        self._versions.sent(request)
        return body

    def spans(self, meta: SglangMeta, count: int) -> Sequence[Span]:
        """Return the versions of the tokens, which this server must report: the label
        of an answer is that of the moment at which it was sent.
        """
        if meta.weight_versions is None and count:
            raise ResponseError("its answer has no meta_info.weight_versions")
        return meta.weight_versions or ()

    def decode(self, request: GenerateRequest, body: bytes) -> GenerateResult:
        return self._versions.checked(request, super().decode(request, body))
