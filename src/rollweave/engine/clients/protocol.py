"""The paths of Rollweave's own engine server, and the bodies that only they take. All
bodies and answers are JSON (`engine/clients/server.py`).
"""

from typing import Final

from rollweave.schema.base import Struct

GENERATE_PATH: Final = "/rollweave/v1/generate"
ABORT_PATH: Final = "/rollweave/v1/abort"
READY_PATH: Final = "/rollweave/v1/ready"
STATS_PATH: Final = "/rollweave/v1/stats"
PREFILL_PATH: Final = "/rollweave/v1/prefill"
RELEASE_PATH: Final = "/rollweave/v1/kv/release"


class Prefill(Struct, frozen=True, kw_only=True):
    """Compute the prompt `tokens` and offer the KV of its whole blocks, with the `rank`
    of the request that it belongs to. The answer is a KvManifest.
    """

    tokens: tuple[int, ...]
    rank: float = 0.0


class KvRelease(Struct, frozen=True, kw_only=True):
    """Free the KV that a manifest offers. Unknown ids are ignored."""

    id: str
