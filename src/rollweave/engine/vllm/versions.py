"""vLLM's dialect for a server of ours, the versions of its weights, and the experts
that it has chosen.

Invariant: a request is sent with a salt of the weights that it starts under, so that it
never continues a prefix that other weights have computed.
"""

import base64
import io

from rollweave.engine.clients.dialects import Vllm
from rollweave.engine.clients.responses import ResponseError, VllmChoice, required
from rollweave.engine.servers.versions import PER_RANK, KnownVersions
from rollweave.schema.packing import as_json
from rollweave.schema.serving import GenerateRequest, GenerateResult
from rollweave.schema.work import Routes

ROUTE_DTYPES = {"uint8": "<u1", "uint16": "<u2"}
"""Number formats of the routes that vLLM returns, and those in `Routes`."""


class OwnVllm(Vllm):
    """The dialect of a server that this process has started with its own settings.

    `stop_ids` end a turn beside those of its request. With `routes`, the server records
    them, and an answer without them is an error.
    """

    def __init__(self, *, version: int, stop_ids: tuple[int, ...], routes: bool = False) -> None:
        super().__init__()
        self._stop_ids, self._routes = stop_ids, routes
        self._versions = KnownVersions(version)

    def changed(self, version: int, publication_id: int) -> None:
        """Record that the server gets these weights, while it is paused."""
        self._versions.changed(version, publication_id)

    def encode(self, request: GenerateRequest) -> bytes:
        fields = self.fields(request)
        sampling = fields["sampling_params"]
        sampling["stop_token_ids"] = sorted({*sampling["stop_token_ids"], *self._stop_ids})
        sampling["ignore_eos"] = True  # its own list of such tokens may be another one
        sampling["detokenize"] = any(sampling["stop"])
        if self._routes:
            sampling["routed_experts_prompt_start"] = request.routes_from
        fields["priority"] = -round(request.rank * PER_RANK)
        if self._versions.key:
            fields["cache_salt"] = self._versions.key
        self._versions.sent(request)
        return as_json(fields)

    def decode(self, request: GenerateRequest, body: bytes) -> GenerateResult:
        return self._versions.checked(request, super().decode(request, body))

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
