"""The protocols of an engine as its callers see it, wherever it runs.

Every engine `Generates`. What only some engines can do is a separate protocol, for
which a caller asks with `isinstance`: an engine that cannot do it has no such methods.

Invariants, held by every implementation and checked by one conformance suite for each
protocol: each call is answered exactly once or raises; replies of one kind arrive in
the order of their calls; once the engine is lost, every pending and every later call
raises `EngineLostError`, and `lost` holds the reason. Nothing waits without a limit
except `generate`, `export_kv` and `import_kv`, whose owners cancel them.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from rollweave.schema.errors import EngineError
from rollweave.schema.serving import (
    STREAM_S,
    Beating,
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

T = TypeVar("T")

OnTokens = Callable[[TokenDelta], None]
"""Called with the tokens of a turn while it is sampled. It must not raise.

It must check what it receives: deltas may be lost or repeated.
"""


class Generates(Protocol):
    """An engine. All calls belong to the event loop's thread."""

    @property
    def lost(self) -> asyncio.Future[str]:
        """A future that holds the reason once the engine is gone, also after `kill` and
        `close`.
        """

    async def ready(self) -> Ready:
        """Wait until the engine serves."""

    def generate(
        self,
        request: GenerateRequest,
        on_tokens: OnTokens | None = None,
        *,
        report_s: float = STREAM_S,
    ) -> asyncio.Future[GenerateResult]:
        """Continue `request.tokens`, and `request.resumed`. The request is sent before
        this returns, in order with all other calls.

        The future raises `EngineError` if the engine refuses; cancelling it aborts the
        request at the engine. `on_tokens` is called with the sampled tokens while they
        arrive, delta by delta, at most about `report_s` seconds after they were
        sampled, and never after the future is done; an engine may not report any.
        """

    def abort(self, request_id: str) -> None:
        """Make `generate` return now, with finish `aborted` and the tokens so far.

        Unknown ids are ignored.
        """

    async def stats(self) -> EngineStats:
        """Return a sample of the engine's state."""

    async def close(self) -> None:
        """Ask the engine to end, and kill it if it does not."""

    def kill(self) -> None:
        """End the engine now. This does not wait, and is harmless when repeated."""


@runtime_checkable
class Reranks(Protocol):
    """An engine in which the ranks of live requests can change."""

    def rerank(self, request_id: str, rank: float) -> None:
        """Change the rank of a request, which may preempt another request or be
        preempted. Unknown ids are ignored.
        """


@runtime_checkable
class Beats(Protocol):
    """An engine that answers heartbeats. Others are watched by their client."""

    async def beat(self) -> Beating:
        """Return what the engine is doing, whatever that is: a process that answers is
        alive.
        """


@runtime_checkable
class TakesWeights(Protocol):
    """An engine whose weights can be replaced while it serves."""

    async def suspend(self, *, release: bool = False) -> Suspended:
        """Stop before the next step. Requests stay, and new ones queue. With `release`,
        which engines behind other servers refuse, the memory of weights and KV is given
        back until weights are loaded.
        """

    def resume(self) -> None:
        """Continue after `suspend`."""

    async def stage(self, weights: WeightManifest) -> None:
        """Receive and verify the weights while the engine generates, for a `load` of
        the same manifest.

        Only for an engine whose `Ready.stages` is true. Raises `WeightsError` if they
        cannot be staged; nothing has changed then.
        """

    async def load(self, weights: WeightManifest | LoadCheckpoint) -> None:
        """Swap the weights in, from memory or from a checkpoint. Weights that are
        staged need not be read again.

        Raises `WeightsError` if the engine refuses them; it then keeps its former
        weights.
        """


@runtime_checkable
class MovesKv(Protocol):
    """An engine that can give its KV to others, and take theirs. `Ready.moves_kv` says
    whether the engine behind a link does.
    """

    async def export_kv(self, tokens: Sequence[int], over: KvTransport) -> KvManifest:
        """Export the KV of the longest cached prefix of `tokens` for `import_kv` of
        another engine.

        The export is kept until `release_kv`, or for a limited time. Raises `KvError`
        if nothing is cached, or if there is no room for the export.
        """

    async def import_kv(self, tokens: Sequence[int], manifest: KvManifest) -> int:
        """Import the KV of a prefix of `tokens` into the cache; return how many of the
        tokens are cached then.

        Raises `KvError` if the KV does not match this engine's weights, model and
        layout, or is incomplete.
        """

    def release_kv(self, export_id: str, *, abandoned: bool = False) -> None:
        """Free the export with this `KvManifest.id`; with `abandoned` if its importer
        has not answered, and may still read it.

        Unknown ids are ignored.
        """


class EngineLink(Protocol):
    """A channel to one engine's loop: commands are sent through it, and replies arrive
    by the callbacks that the link was created with.
    """

    def send(self, command: EngineCommand) -> None:
        """Send a command, in order and without waiting.

        Commands to an engine that is gone are dropped; the loss is reported separately.
        """

    def kill(self) -> None:
        """End the engine now; the loss callback follows."""

    async def wait_closed(self) -> None:
        """Return once nothing of the engine is left."""


def duplicate_id(id: str) -> EngineError:
    """Return the refusal of a request whose id another live request has."""
    return EngineError(f"request ids must be unique among live requests, got {id} again")


def resolve(waiter: asyncio.Future[T] | None, value: T) -> None:
    """Give a waiter its value, unless there is none or it is done."""
    if waiter is not None and not waiter.done():
        waiter.set_result(value)


def fail(waiter: asyncio.Future[T] | None, error: Exception) -> None:
    """Give a waiter an error, unless there is none or it is done."""
    if waiter is not None and not waiter.done():
        waiter.set_exception(error)
        waiter.exception()  # mark it as retrieved: nobody need wait for it
