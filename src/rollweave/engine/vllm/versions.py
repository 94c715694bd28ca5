"""vLLM's dialect for a server of ours, and the versions of its weights.

Invariants: a request is sent with a salt of the weights that it starts under, so that
it never continues a prefix that other weights have computed; every version that an
answer names is one that the server has had since the request was sent, in that order.
"""

from rollweave.engine.clients.dialects import Vllm
from rollweave.engine.clients.responses import ResponseError
from rollweave.schema.packing import as_json
from rollweave.schema.serving import GenerateRequest, GenerateResult

PER_RANK = 1000
"""Number of vLLM's priorities between two ranks that differ by 1: ranks may be seconds,
and priorities are integers.
"""

MAX_SENT = 1 << 14
"""Maximum number of requests that are remembered: many times those in flight."""


class OwnVllm(Vllm):
    """The dialect of a server that this process has started with its own settings.

    `stop_ids` end a turn beside those of its request.
    """

    def __init__(self, *, version: int, stop_ids: tuple[int, ...]) -> None:
        super().__init__()
        self._stop_ids = stop_ids
        self._versions = [max(0, version)]
        self._salt = ""
        self._sent: dict[str, int] = {}

    def changed(self, version: int, weights_id: int) -> None:
        """Record that the server gets these weights, while it is paused."""
        self._versions.append(version)
        self._salt = str(weights_id)

    def encode(self, request: GenerateRequest) -> bytes:
        fields = self.fields(request)
        sampling = fields["sampling_params"]
        sampling["stop_token_ids"] = sorted({*sampling["stop_token_ids"], *self._stop_ids})
        sampling["ignore_eos"] = True  # its own list of such tokens may be another one
        sampling["detokenize"] = any(sampling["stop"])
        fields["priority"] = -round(request.rank * PER_RANK)
        if self._salt:
            fields["cache_salt"] = self._salt
        self._sent[request.id] = len(self._versions) - 1
        if len(self._sent) > MAX_SENT:
            del self._sent[next(iter(self._sent))]
        return as_json(fields)

    def decode(self, request: GenerateRequest, body: bytes) -> GenerateResult:
        result = super().decode(request, body)
        left = self._versions[self._sent.pop(request.id, 0) :]
        for span in result.versions:
            while left and left[0] != span.version:
                left = left[1:]
            if not left:
                raise ResponseError(
                    f"its tokens {span.start} to {span.end} are of version {span.version}, which "
                    "it has not had since the request was sent"
                )
        return result
