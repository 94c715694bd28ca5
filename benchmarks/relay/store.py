"""Weights between clusters through a remote store: the gain of each of ROSE's steps
(§6.3, Fig. 10).

There are two trainer ranks, each with its own slow link, a store, and two engine ranks
on hosts near it. The variants in `VARIANTS` build on one another: `batch` gathers the
version, sends all of it from one rank, and pulls it afterwards; `async` pulls each
bucket as soon as the store has it; `shard` has each rank send its shard and each engine
pull its shard; `sparse` sends deltas, which each engine's relay fetches.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch

from benchmarks.network import Network
from benchmarks.relay.peer import Moved, Peer, PullPart, PushPart, Range
from benchmarks.relay.tier import Tier, checked, tier
from rollweave.schema.weights import FetchVersion, RelayAddress, WeightManifest
from rollweave.weights.memory import read_payload
from rollweave.weights.parameters import Model
from rollweave.weights.publication import Publication, publish
from rollweave.weights.pushpull import Transfer, TransferCost, split_payload, transfer_cost
from rollweave.weights.shards import Fsdp, TensorParallel, plan

VARIANTS = ("batch", "async", "shard", "sparse")

RANKS = 2
"""Number of ranks that train, and of ranks that serve."""

SENDERS, STORE, RECEIVERS = (0, 1), 2, (3, 4)
"""Hosts of the trainer ranks, of the store and of the engine ranks."""

HEAD_DIM = 64


@dataclass(frozen=True)
class Pair:
    """A version and its predecessor, in memory of this machine."""

    base: WeightManifest
    new: WeightManifest


@dataclass(frozen=True)
class Delivery:
    """Seconds from the first byte until every engine has what it needs, and the bytes
    that crossed the slow links.
    """

    seconds: float
    sent_bytes: int
    mismatches: int
    cost: TransferCost | None = None


class Clusters:
    """The hosts of both clusters and their processes. `clusters` creates it."""

    def __init__(
        self, network: Network, peers: Sequence[Peer], store: RelayAddress, relays: Tier
    ) -> None:
        self._network, self._store, self._relays = network, store, relays
        self._keeper, self._senders, self._pullers = (
            peers[0],
            peers[1 : 1 + RANKS],
            peers[1 + RANKS :],
        )
        self._ids = itertools.count(1)
        self._speeds: tuple[float | None, float | None] = (None, None)

    def slow(self, mbits: float | None, fast: float | None) -> None:
        """Limit the trainer ranks' links to `mbits`, and those of the store and the
        engines to `fast`. Does nothing on loopback.
        """
        if not self._network.why_not and self._speeds != (mbits, fast):
            self._network.limit(mbits, SENDERS)
            self._network.limit(fast, (STORE, *RECEIVERS))
            self._speeds = (mbits, fast)

    async def run(self, variant: str, pair: Pair, model: Model, *, bucket_bytes: int) -> Delivery:
        """Transfer one version by one variant. The caller has set the links' speeds."""
        new = self._renamed(pair.new)
        if variant == "sparse":
            return await self._sparse(new, pair, bucket_bytes)
        full: tuple[Range, ...] = ((0, new.nbytes),)
        shards = plan(model, Fsdp(RANKS), TensorParallel(tp=RANKS))
        sends = (
            [_spans(shards.sent_ranges(rank)) for rank in range(RANKS)]
            if variant == "shard"
            else [full]
        )
        pulls = (
            [_spans(shards.pulled_ranges(rank)) for rank in range(RANKS)]
            if variant == "shard"
            else [full] * RANKS
        )
        if variant == "shard":  # what lies between tensors travels as well
            sends[0] = (*sends[0], *_rest(new.nbytes, [part for parts in sends for part in parts]))
        started = time.monotonic()
        if variant == "batch":
            _gather(pair.new)
            pushes = await self._push(new, sends, bucket_bytes)
            pulled = await self._pull(new, pulls)
        else:
            pushes, pulled = await asyncio.gather(
                self._push(new, sends, bucket_bytes), self._pull(new, pulls)
            )
        cost = transfer_cost(pushes=_transfers(pushes), pulls=_transfers(pulled))
        return Delivery(
            max(moved.verified_at for moved in pulled) - started,
            sum(sent.nbytes for sent in _transfers(pushes)),
            sum(moved.mismatches for moved in pulled),
            cost,
        )

    async def prepare(self, pair: Pair, *, bucket_bytes: int) -> None:
        """Give the base to the store, from its own host, and to the engines' relays."""
        base = self._renamed(pair.base)
        full = ((0, base.nbytes),)
        await self._keeper.move(
            PushPart(address=self._store, manifest=base, ranges=full, bucket_bytes=bucket_bytes)
        )
        await self._fetch(base, None, None)
        self._base = base

    async def _sparse(self, new: WeightManifest, pair: Pair, bucket_bytes: int) -> Delivery:
        """Send a delta. `prepare` must have run."""
        base, halves = self._base, split_payload(new, RANKS, bucket_bytes=bucket_bytes)
        started = time.monotonic()
        pushes, _ = await asyncio.gather(
            self._push(new, halves, bucket_bytes, base), self._fetch(new, self._store, base)
        )
        return Delivery(
            time.monotonic() - started, sum(sent.nbytes for sent in _transfers(pushes)), 0
        )

    async def _push(
        self,
        version: WeightManifest,
        parts: Sequence[Sequence[Range]],
        bucket_bytes: int,
        base: WeightManifest | None = None,
    ) -> list[Moved]:
        requests = [
            PushPart(
                address=self._store,
                manifest=version,
                ranges=tuple(part),
                bucket_bytes=bucket_bytes,
                base=base,
            )
            for part in parts
        ]
        return await asyncio.gather(
            *(peer.move(request) for peer, request in zip(self._senders, requests, strict=False))
        )

    async def _pull(self, version: WeightManifest, parts: Sequence[Sequence[Range]]) -> list[Moved]:
        requests = [
            PullPart(address=self._store, manifest=version, ranges=tuple(part)) for part in parts
        ]
        return await asyncio.gather(
            *(peer.move(request) for peer, request in zip(self._pullers, requests, strict=True))
        )

    async def _fetch(
        self, version: WeightManifest, source: RelayAddress | None, base: WeightManifest | None
    ) -> None:
        base_id = base.weights_id if base is not None else None
        keep = () if base_id is None else (base_id,)
        message = FetchVersion(manifest=version, source=source, base_id=base_id, keep=keep)
        for number, reply in enumerate(
            await asyncio.gather(*(link.fetch(message) for link in self._relays.links))
        ):
            checked(number, reply)

    def _renamed(self, manifest: WeightManifest) -> WeightManifest:
        weights_id = next(self._ids)
        return msgspec.structs.replace(manifest, weights_id=weights_id, version=weights_id)


@contextlib.asynccontextmanager
async def clusters(network: Network, logs: Path) -> AsyncIterator[Clusters]:
    """Start both clusters' processes. Raises WeightsError where one does not start."""
    peers: list[Peer] = []
    try:
        for name, host in (
            ("store", STORE),
            *((f"sender{host}", host) for host in SENDERS),
            *((f"puller{host}", host) for host in RECEIVERS),
        ):
            peers.append(Peer(network, host, name, logs))
        address = await peers[0].serve(network.address(STORE))
        async with tier(network, RECEIVERS, logs) as relays:
            yield Clusters(network, peers, address, relays)
    finally:
        await asyncio.gather(*(peer.close() for peer in peers))


# The payload.


def layers(hidden: int, count: int) -> dict[str, tuple[int, ...]]:
    """Return shapes by name, in hidden widths as Qwen3-0.6B has them; without an
    embedding.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(count):
        for name, rows, columns in (
            ("self_attn.q_proj", 2, 1),
            ("self_attn.k_proj", 1, 1),
            ("self_attn.v_proj", 1, 1),
            ("self_attn.o_proj", 1, 2),
            ("mlp.gate_proj", 3, 1),
            ("mlp.up_proj", 3, 1),
            ("mlp.down_proj", 1, 3),
        ):
            shapes[f"model.layers.{layer}.{name}.weight"] = (rows * hidden, columns * hidden)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{norm}.weight"] = (hidden,)
    return shapes


def model_of(manifest: WeightManifest, hidden: int) -> Model:
    return Model(manifest.tensors, heads=2 * hidden // HEAD_DIM, kv_heads=hidden // HEAD_DIM)


def published(
    bits: "np.ndarray[tuple[int], np.dtype[np.uint16]]",
    shapes: dict[str, tuple[int, ...]],
    directory: Path,
) -> Publication:
    """Publish these elements of bfloat16 in memory, in the shapes' order."""
    flat, start, tensors = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16), 0, {}
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        tensors[name] = flat[start : start + count].reshape(shape)
        start += count
    return publish(tensors, version=1, weights_id=1, directory=directory)


# Helpers.


def _gather(manifest: WeightManifest) -> None:
    """Copy what one rank lacks from the other's memory: no link within the training
    cluster is modeled.
    """
    payload = read_payload(manifest.location, manifest.nbytes, where="the other rank's shard")
    np.frombuffer(payload, np.uint8, manifest.nbytes // RANKS).copy()


def _transfers(moved: Sequence[Moved]) -> list[Transfer]:
    return [Transfer(*transfer) for each in moved for transfer in each.transfers]


def _spans(ranges: Sequence[tuple[int, int]]) -> tuple[Range, ...]:
    """Convert (offset, bytes) to (start, stop)."""
    return tuple((offset, offset + nbytes) for offset, nbytes in ranges)


def _rest(nbytes: int, parts: Sequence[Range]) -> list[Range]:
    """Return the ranges of a payload that none of these parts covers. Parts do not
    overlap.
    """
    rest, end = [], 0
    for start, stop in (*sorted(parts), (nbytes, nbytes)):
        if start > end:
            rest.append((end, start))
        end = max(end, stop)
    return rest
