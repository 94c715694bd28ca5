"""The kinds of inference servers: what differs between them, and their names."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rollweave.engine.servers.attached import LeasedKind
from rollweave.engine.servers.control import Control
from rollweave.engine.servers.process import Server
from rollweave.engine.servers.published import HeldWeights
from rollweave.engine.servers.sglang import SglangKind
from rollweave.engine.servers.versions import OwnDialect
from rollweave.engine.servers.vllm import VllmKind
from rollweave.schema.serving import DialectName, EngineSpec, KvManifest, ServerName
from rollweave.schema.weights import WeightManifest
from rollweave.weights.checkpoint import ModelShape


class KvMover(Protocol):
    """Moves KV between the caches of two servers of a kind. `publication_id` names the
    weights that the server has, -1 the model's own.
    """

    publication_id: int

    async def export(self, id: str, tokens: Sequence[int]) -> KvManifest:
        """Have the server hold the KV of these tokens. Raises KvError."""

    async def take(self, tokens: Sequence[int], manifest: KvManifest) -> int:
        """Have the server read exported KV into its cache; return how many tokens are
        cached then. Raises KvError. In both cases the reading is over.
        """

    def release(self, id: str) -> None:
        """End an export that nothing reads any longer. Unknown ids are ignored."""

    async def pause(self) -> None:
        """Refuse transfers until `resume`, and wait for those that are under way.
        Raises EngineError if the state of the server is not known then.
        """

    def resume(self) -> None:
        """Allow transfers again."""

    async def close(self) -> None:
        """Close this client."""


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

    def mover(self, spec: EngineSpec, shape: ModelShape, server: Server) -> KvMover | None:
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
