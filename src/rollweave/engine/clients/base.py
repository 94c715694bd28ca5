"""What whoever wants tokens sees of an engine, wherever it runs.

Invariants, held by every implementation and checked by one conformance suite: each call
is answered exactly once or raises; replies of one kind come in the order of their
calls; once the engine is lost, every pending and every later call raises
`EngineLostError`, and `lost` says why. Nothing waits without a limit except `generate`,
`export_kv` and `import_kv`, whose owners cancel them.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from rollweave.schema.serving import (
    EngineCommand,
    EngineStats,
    GenerateRequest,
    GenerateResult,
    KvManifest,
    KvTransport,
    LoadCheckpoint,
    Ready,
    Suspended,
    TokenDelta,
)
from rollweave.schema.weights import WeightManifest

OnTokens = Callable[[TokenDelta], None]
"""Who is told of a turn while it is sampled. Must not raise.

What it hears it must check: pieces may be lost, or come twice.
"""


class EngineBackend(Protocol):
    """One engine. All calls belong to the event loop's thread."""

    @property
    def lost(self) -> asyncio.Future[str]:
        """Done, with the reason, once the engine is gone, also after `kill` and
        `close`.
        """

    async def ready(self) -> Ready:
        """Wait until the engine serves."""

    def generate(
        self, request: GenerateRequest, heard: OnTokens | None = None
    ) -> asyncio.Future[GenerateResult]:
        """Continue `request.tokens`, and `request.resumed`: sent on return, in order
        with all other calls.

        The future raises `EngineError` where the engine refuses; cancelling it aborts
        the request there. `heard` is called with what is sampled while it comes, piece
        by piece, never after the future is done; an engine may tell nothing of it.
        """

    def abort(self, request_id: str) -> None:
        """Let `generate` return now, with finish `aborted` and what there is.

        Unknown ids are ignored.
        """

    def rerank(self, request_id: str, rank: float) -> None:
        """Change the rank of a request, which may preempt another or be preempted for
        it. Unknown ids are ignored.
        """

    async def export_kv(self, tokens: Sequence[int], over: KvTransport) -> KvManifest:
        """Lay out the KV of the longest cached prefix of `tokens` for `import_kv` of
        another engine.

        It is there until `release_kv`, or for a while. Raises `KvError` where there is
        none, or no room for it.
        """

    async def import_kv(self, tokens: Sequence[int], manifest: KvManifest) -> int:
        """Take the KV of a prefix of `tokens` into the cache; how many of them are
        there now.

        Raises `KvError` where it does not belong to this engine's weights, model and
        layout, or has not arrived whole.
        """

    def release_kv(self, export_id: str) -> None:
        """The export is not needed any more: it is `KvManifest.id`.

        Unknown ids are ignored.
        """

    async def suspend(self) -> Suspended:
        """Stop before the next step. Requests stay; new ones queue."""

    def resume(self) -> None:
        """Go on after `suspend`."""

    async def load(self, weights: WeightManifest | LoadCheckpoint) -> None:
        """Swap the weights in, from memory or from a checkpoint.

        Raises `WeightsError` if the engine refuses them; it then keeps those that it
        had.
        """

    async def stats(self) -> EngineStats:
        """A sample of the engine's state."""

    async def close(self) -> None:
        """Ask the engine to end, and kill it if it does not."""

    def kill(self) -> None:
        """End it now. Does not wait; harmless when repeated."""


class EngineLink(Protocol):
    """The way to one engine's loop: words go in here, replies come out by the callbacks
    that the link was made with.
    """

    def send(self, command: EngineCommand) -> None:
        """Hand over in order, without waiting.

        Words to an engine that is gone are dropped: `lost` says so by itself.
        """

    def kill(self) -> None:
        """End the engine now; the loss callback follows."""

    async def joined(self) -> None:
        """Return when nothing of the engine is left."""
