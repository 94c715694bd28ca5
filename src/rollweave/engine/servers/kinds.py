"""The kinds of inference servers by their names in the configuration."""

from rollweave.engine.servers.engine import ServerKind
from rollweave.engine.sglang.kind import SglangKind
from rollweave.engine.vllm.kind import VllmKind
from rollweave.schema.serving import ServerName


def kind_of(name: ServerName) -> ServerKind:
    """Return the kind of this name."""
    match name:
        case "vllm":
            return VllmKind()
        case "sglang":
            return SglangKind()
