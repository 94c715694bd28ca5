"""The inference server of an engine, as the configuration describes it."""

from pathlib import Path
from typing import Any

from rollweave.engine.servers.attached import holder_name, server_token
from rollweave.schema.config.engines import EngineConfig
from rollweave.schema.config.root import RunConfig
from rollweave.schema.serving import ServerSpec


def server_spec(
    config: RunConfig, group: EngineConfig, *, degree: int, directory: Path
) -> ServerSpec | None:
    """Return the server of an engine of this group and degree; None if the engine is
    embedded. `directory` is the run's.

    Raises FieldError if the token of a server that already runs cannot be read.
    """
    if group.server is None:
        return None
    attached: dict[str, Any] = {}
    if group.address:
        assert group.token_env is not None, "the configuration has one with an address"
        attached = {
            "addresses": group.address,
            "token": server_token(group.token_env),
            "holder": holder_name(directory),
            "context": config.max_tokens,
        }
    return ServerSpec(
        kind=group.server,
        python=group.python,
        args=group.args,
        scaled_logprobs=config.scales_logprobs,
        degree=degree,
        start_s=config.watchdog.start_s,
        moves_kv=group.phase != "both",
        control_s=config.watchdog.weights_s / 2,
        **attached,
    )
