"""vLLM's dialect for a server of ours, and the versions of its weights.

Invariant: a request is sent with a salt of the weights that it starts under, so that it
never continues a prefix that other weights have computed.
"""

from rollweave.engine.clients.dialects import Vllm
from rollweave.engine.servers.versions import PER_RANK, KnownVersions
from rollweave.schema.packing import as_json
from rollweave.schema.serving import GenerateRequest, GenerateResult


class OwnVllm(Vllm):
    """The dialect of a server that this process has started with its own settings.

    `stop_ids` end a turn beside those of its request.
    """

    def __init__(self, *, version: int, stop_ids: tuple[int, ...]) -> None:
        super().__init__()
        self._stop_ids = stop_ids
        self._versions = KnownVersions(version)

    def changed(self, version: int, weights_id: int) -> None:
        """Record that the server gets these weights, while it is paused."""
        self._versions.changed(version, weights_id)

    def encode(self, request: GenerateRequest) -> bytes:
        fields = self.fields(request)
        sampling = fields["sampling_params"]
        sampling["stop_token_ids"] = sorted({*sampling["stop_token_ids"], *self._stop_ids})
        sampling["ignore_eos"] = True  # its own list of such tokens may be another one
        sampling["detokenize"] = any(sampling["stop"])
        fields["priority"] = -round(request.rank * PER_RANK)
        if self._versions.key:
            fields["cache_salt"] = self._versions.key
        self._versions.sent(request)
        return as_json(fields)

    def decode(self, request: GenerateRequest, body: bytes) -> GenerateResult:
        return self._versions.checked(request, super().decode(request, body))
