"""The parts of an engine that depend on the kind of its server."""

from pathlib import Path
from typing import Protocol

from rollweave.schema.serving import DialectName, EngineSpec
from rollweave.schema.weights import WeightManifest
from rollweave.weights.checkpoint import ModelShape
from rollweave_servers.attached import LeasedKind
from rollweave_servers.control import Control
from rollweave_servers.process import Server
from rollweave_servers.published import HeldWeights
from rollweave_servers.versions import OwnDialect
from rollweave_servers.vllm_kv import NixlKv


class ServerParts(LeasedKind, Protocol):
    """The parts of an engine that depend on the kind of its server. `dialect` is that
    of the server's requests.
    """

    dialect: DialectName

    def version(self, python: str, *, routes: bool = False, moves_kv: bool = False) -> str:
        """See Rollweave's `ServerKind`."""

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
