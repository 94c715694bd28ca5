"""The kinds of inference servers by their names in the configuration."""

from rollweave.engine.servers.engine import ServerKind
from rollweave.engine.sglang.kind import SglangKind
from rollweave.engine.vllm.kind import VllmKind
from rollweave.schema.config.root import RunConfig
from rollweave.schema.serving import ServerName


def kind_of(name: ServerName) -> ServerKind:
    """Return the kind of this name."""
    match name:
        case "vllm":
            return VllmKind()
        case "sglang":
            return SglangKind()


def engines_refuse_images(config: RunConfig) -> str:
    """Return why no engine of the run takes images, "" if one does: the core gives it
    the turns that others refuse.
    """
    servers = [kind_of(group.server) for group in config.engines if group.server is not None]
    if any(kind.takes_images for kind in servers):
        return ""
    kinds = ", ".join(sorted({group.kind for group in config.engines}))
    return f"engines of kind vllm take images, got {kinds}"
