"""The paths of Rollweave's own engine server, and the bodies that only they take. All
bodies and answers are JSON (`engine/clients/server.py`).
"""

from typing import Final

from rollweave.schema.base import Struct

GENERATE_PATH: Final = "/rollweave/v1/generate"
ABORT_PATH: Final = "/rollweave/v1/abort"
READY_PATH: Final = "/rollweave/v1/ready"
STATS_PATH: Final = "/rollweave/v1/stats"
EXPORT_PATH: Final = "/rollweave/v1/kv/export"
RELEASE_PATH: Final = "/rollweave/v1/kv/release"


class KvExport(Struct, frozen=True, kw_only=True):
    """Ask for the KV of the longest cached prefix of `tokens`."""

    tokens: tuple[int, ...]


class KvRelease(Struct, frozen=True, kw_only=True):
    """Free an export. Unknown ids are ignored."""

    id: str
