"""The kinds of inference servers: what differs between them, and their names."""

from pathlib import Path
from typing import Protocol

from rollweave.engine.servers.attached import LeasedKind
from rollweave.engine.servers.control import Control
from rollweave.engine.servers.process import Server
from rollweave.engine.servers.published import HeldWeights
from rollweave.engine.servers.sglang import SglangKind
from rollweave.engine.servers.versions import OwnDialect
from rollweave.engine.servers.vllm import VllmKind
from rollweave.engine.servers.vllm_kv import NixlKv
from rollweave.schema.serving import DialectName, EngineSpec, ServerName
from rollweave.schema.weights import WeightManifest
from rollweave.weights.checkpoint import ModelShape


class ServerKind(LeasedKind, Protocol):
    """The differences between the kinds of servers.

    `dialect` is that of its requests. If `copies_weights`, a version that `hold`
    returns is a copy in the memory of the engine's process. If `restricts_tokens`, a
    turn may be restricted to certain tokens; if `constrains`, to a form of its text.
    """

    dialect: DialectName
    copies_weights: bool
    restricts_tokens: bool
    constrains: bool

    def version(self, python: str, *, routes: bool = False, moves_kv: bool = False) -> str:
        """Return the version of the server that an interpreter has. Raises ConfigError,
        whose text is the broken rule, if it has none that can be an engine, return
        `routes` if these are needed, and move its KV if it is to.
        """

    async def start(self, spec: EngineSpec, shape: ModelShape, folder: Path) -> Server:
        """Start a server, whose temporary files are in `folder`, or lease one that
        already runs. Raises EngineError.
        """

    def speak(self, spec: EngineSpec, shape: ModelShape) -> OwnDialect:
        """Return the dialect of the server."""

    def control(self, spec: EngineSpec, server: Server) -> Control:
        """Return the control of the server."""

    def mover(self, spec: EngineSpec, shape: ModelShape, server: Server) -> NixlKv | None:
        """Return what moves the server's KV; None if it is not to be moved."""

    def hold(
        self, spec: EngineSpec, manifest: WeightManifest, shape: ModelShape, folder: Path
    ) -> HeldWeights:
        """Verify a version and keep it for `Control.swap`. Raises WeightsError."""


def kind_of(name: ServerName) -> ServerKind:
    """Return the kind of this name."""
    match name:
        case "vllm":
            return VllmKind()
        case "sglang":
            return SglangKind()
