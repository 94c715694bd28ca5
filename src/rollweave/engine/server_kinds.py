"""The interface to a kind of inference server that engines can have, and the function
that finds a kind.

The kinds are a distribution of their own: in this repository `rollweave-servers`, for
vLLM and SGLang. A distribution announces each kind by an entry point of the group
`rollweave.engine_servers`, which has the name of the kind, a value of `engines.kind`,
and leads to a `ServerKind`.
"""

import asyncio
import functools
from collections.abc import Callable
from typing import Protocol, cast

from rollweave.io.extras import announced
from rollweave.schema.config.root import RunConfig
from rollweave.schema.serving import EngineCommand, EngineReply, EngineSpec, ServerName

GROUP = "rollweave.engine_servers"

DISTRIBUTION = "rollweave-servers"
"""The distribution in this repository that announces kinds."""

ENGINE_TOKEN = "ROLLWEAVE_ENGINE_TOKEN"
"""Environment variable with the token of the servers that a run does not start."""


class ServerKind(Protocol):
    """A kind of inference server. `name` is its name in errors.

    If `copies_weights`, the process of an engine copies each version of the weights
    into its own memory. If `restricts_tokens`, a turn may be restricted to certain
    tokens; if `constrains`, to a form of its text.
    """

    name: str
    copies_weights: bool
    restricts_tokens: bool
    constrains: bool

    def version(self, python: str, *, routes: bool = False, moves_kv: bool = False) -> str:
        """Return the version of the server that an interpreter has. Raises ConfigError,
        whose text is the broken rule, if it has none that can be an engine, return
        `routes` if these are needed, and move its KV if it is to.
        """

    def attached_versions(self, spec: EngineSpec) -> list[str]:
        """Return the versions of the servers at the addresses of a group of engines.
        Each can be an engine with these settings, and no other run leases it.

        Raises ConfigError, whose text is the broken rule.
        """

    async def serve(
        self,
        spec: EngineSpec,
        commands: "asyncio.Queue[EngineCommand]",
        reply: Callable[[EngineReply], None],
    ) -> None:
        """Be an engine with a server until `Shutdown`, or until the server is lost,
        which is reported as `EngineFatal`. `reply` is called on the event loop's
        thread.
        """


@functools.cache
def kind_of(name: ServerName) -> ServerKind:
    """Return the kind of this name. Raises ConfigError as `announced` does."""
    return cast(ServerKind, announced(GROUP, name, field="engines.kind", distribution=DISTRIBUTION))


def check_kinds(config: RunConfig) -> None:
    """Raise ConfigError if the kind of an engine cannot be found."""
    for group in config.engines:
        if group.server is not None:
            kind_of(group.server)
