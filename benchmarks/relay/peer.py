"""A host's process around a remote store: the store itself, a trainer rank that pushes,
or an engine's rank that pulls.

`Peer` starts it as `python -m benchmarks.relay.peer`. Pulled bytes are compared with
the published ones: all hosts of a bench are one machine, and can open its memory.
"""

import asyncio
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.network import Network
from rollweave.io.child import spawn
from rollweave.io.parent import Parent
from rollweave.io.wire import decoder_of, encode
from rollweave.runtime.links.relay import ONE_THREAD
from rollweave.schema.base import TaggedStruct
from rollweave.schema.errors import WeightsError
from rollweave.schema.weights import RelayAddress, WeightManifest
from rollweave.weights.memory import read_payload
from rollweave.weights.protocol import Base
from rollweave.weights.pushpull import DeltaBase, Transfer, pull, push
from rollweave.weights.remote import RemoteStore
from rollweave.weights.tcp import transport_of

Range = tuple[int, int]

T = TypeVar("T")

PATIENCE_S = 300.0
"""Maximum seconds for one request: the full version over the slowest link."""


class Serve(TaggedStruct, frozen=True, kw_only=True):
    """Request: act as a store, and listen on `host`. `Serving` is the reply."""

    host: str


class PushPart(TaggedStruct, frozen=True, kw_only=True):
    """Request: send `ranges` of a version in memory of this machine to a store, with
    `base` as a delta against it.
    """

    address: RelayAddress
    manifest: WeightManifest
    ranges: tuple[Range, ...]
    bucket_bytes: int
    base: WeightManifest | None = None


class PullPart(TaggedStruct, frozen=True, kw_only=True):
    """Request: read `ranges` of a version from a store."""

    address: RelayAddress
    manifest: WeightManifest
    ranges: tuple[Range, ...]


class Serving(TaggedStruct, frozen=True, kw_only=True):
    address: RelayAddress


class Moved(TaggedStruct, frozen=True, kw_only=True):
    """Reply: the transfers, as (start, stop, bytes), and the time at which all of it
    was verified.

    `mismatches` counts the bytes of ranges that differ from what was published.
    """

    transfers: tuple[tuple[float, float, int], ...]
    verified_at: float
    mismatches: int = 0


PeerRequest = Serve | PushPart | PullPart
PeerReply = Serving | Moved


async def reply_of(replies: "asyncio.Queue[T | str]", name: str) -> T:
    """Return the next reply of a child. A lost child's reply is an error text.

    Raises WeightsError.
    """
    try:
        async with asyncio.timeout(PATIENCE_S):
            reply = await replies.get()
    except TimeoutError:
        raise WeightsError(f"{name} did not answer in {PATIENCE_S:g} s") from None
    if isinstance(reply, str):
        raise WeightsError(f"{name}: {reply}")
    return reply


class Peer:
    """The process, on a host. It handles one request at a time."""

    def __init__(self, network: Network, host: int, name: str, logs: Path) -> None:
        self._replies: asyncio.Queue[PeerReply | str] = asyncio.Queue()
        decode: Any = decoder_of(PeerReply)
        with network.inside(host):
            self._child = spawn(
                name=name,
                module="benchmarks.relay.peer",
                log=logs / f"{name}.log",
                env=ONE_THREAD,
                on_frame=lambda payload: self._replies.put_nowait(decode(payload)),
                on_gone=self._replies.put_nowait,
            )

    async def serve(self, host: str) -> RelayAddress:
        """Start serving. Like all methods here, raises WeightsError."""
        reply = await self._ask(Serve(host=host))
        assert isinstance(reply, Serving)
        return reply.address

    async def move(self, request: PushPart | PullPart) -> Moved:
        reply = await self._ask(request)
        assert isinstance(reply, Moved)
        return reply

    async def close(self) -> None:
        self._child.kill()
        await self._child.gone()

    async def _ask(self, request: PeerRequest) -> PeerReply:
        self._child.send(encode(request))
        return await reply_of(self._replies, self._child.name)


async def _serve(parent: Parent) -> None:
    requests: asyncio.Queue[PeerRequest] = asyncio.Queue()
    loop, decode = asyncio.get_running_loop(), decoder_of(PeerRequest)

    def on_frame(payload: bytes) -> None:
        loop.call_soon_threadsafe(requests.put_nowait, decode(payload))

    parent.listen(on_frame)
    stores = []
    while True:
        request = await requests.get()
        match request:
            case Serve(host=host):
                store = RemoteStore(transport_of("tcp", host=host))
                stores.append(store)
                parent.send(encode(Serving(address=await store.listen(host))))
            case PushPart():
                moved = await _push(request)
                parent.send(encode(Moved(transfers=(moved,), verified_at=time.monotonic())))
            case PullPart():
                parent.send(encode(await _pull(request)))


async def _push(request: PushPart) -> Transfer:
    payload, since = _payload(request.manifest), None
    if request.base is not None:
        base = _payload(request.base)
        name = Base(weights_id=request.base.weights_id, digest=request.base.digest)
        since = DeltaBase(name, lambda part: base[part])
    return await push(
        transport_of("tcp", host=""),
        request.address,
        request.manifest,
        lambda part: payload[part],
        ranges=request.ranges,
        since=since,
        bucket_bytes=request.bucket_bytes,
    )


async def _pull(request: PullPart) -> Moved:
    buffer = memoryview(bytearray(request.manifest.nbytes))
    moved = await pull(
        transport_of("tcp", host=""),
        request.address,
        request.manifest,
        request.ranges,
        lambda start, stop: buffer[start:stop],
    )
    verified_at = time.monotonic()
    return Moved(
        transfers=tuple(moved),
        verified_at=verified_at,
        mismatches=_mismatches(buffer, _payload(request.manifest), request.ranges),
    )


def _mismatches(received: memoryview, published: memoryview, ranges: Sequence[Range]) -> int:
    """Return the bytes of ranges that contain any difference."""
    return sum(
        stop - start for start, stop in ranges if received[start:stop] != published[start:stop]
    )


def _payload(manifest: WeightManifest) -> memoryview:
    return memoryview(
        read_payload(
            manifest.location, manifest.nbytes, where=f"weights version {manifest.version}"
        )
    )


def main() -> None:
    """Handle requests until the parent is gone."""
    try:
        asyncio.run(_serve(Parent.from_arguments()))
    except Exception:
        traceback.print_exc(file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
