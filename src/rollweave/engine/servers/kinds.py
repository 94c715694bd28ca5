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
    """Return why turns with images may find no engine, "" if all engines take them: the
    core does not choose an engine by what a turn shows.
    """
    servers = [group.server and kind_of(group.server) for group in config.engines]
    if all(kind is not None and kind.takes_images for kind in servers):
        return ""
    kinds = ", ".join(sorted({group.kind for group in config.engines}))
    return f"all engines must be of kind vllm, which takes images, got {kinds}"
