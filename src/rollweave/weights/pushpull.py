"""Clients of a remote store: write versions to it and read them, in buckets, in parts,
in parallel (RollArt §6.3; ROSE §4.2).

Invariants: `push` returns once the version is complete and verified in the store, and
`pull` once what it has read is known to belong to such a version; otherwise they raise
FetchError, and no version has changed. What a store already has of a push is not sent
again.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from rollweave.schema.weights import RelayAddress, WeightManifest
from rollweave.weights import delta
from rollweave.weights.memory import Ranges, in_thread
from rollweave.weights.protocol import (
    Base,
    Complete,
    Delta,
    FetchError,
    Message,
    Missing,
    Push,
    Range,
    Raw,
    RawRanges,
    Refused,
    Request,
)
from rollweave.weights.remote import BUCKET_BYTES
from rollweave.weights.transport import Body, Channel, Transport
from rollweave.weights.version_store import ReadBytes, chunks_of, encode_spans


class Transfer(NamedTuple):
    """The interval of a transfer, in seconds of the monotonic clock, and its bytes."""

    start: float
    stop: float
    nbytes: int


@dataclass(frozen=True)
class DeltaBase:
    """The version that pushed deltas are made from, which the store must have."""

    base: Base
    read: ReadBytes


async def push(
    transport: Transport,
    address: RelayAddress,
    manifest: WeightManifest,
    read: ReadBytes,
    *,
    ranges: Sequence[Range] | None = None,
    since: DeltaBase | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Transfer:
    """Send `ranges` of a version (by default all of it), which no one else sends, and
    return once the version is complete in the store.

    Ranges that the store already has are not sent. Raises FetchError if the version is
    not complete in the store; it may then be pushed again.
    """
    requested = ((0, manifest.nbytes),) if ranges is None else tuple(ranges)
    requested = tuple(part for part in requested if part[0] < part[1])
    channel = await transport.connect(address)
    try:
        with ThreadPoolExecutor(2, thread_name_prefix="encode") as pool:
            start, nbytes, unanswered = time.monotonic(), 0, 0
            await channel.send(
                Push(
                    manifest=manifest,
                    ranges=requested,
                    base=since.base if since is not None else None,
                )
            )
            answer = await _receive_answer(channel)
            assert isinstance(answer, Missing), answer
            for part in _buckets(
                manifest, answer.ranges, bucket_bytes, with_deltas=since is not None
            ):
                message, body = await in_thread(_encode_bucket, part, read, since, pool)
                await channel.send(message, body)
                nbytes += body.nbytes
                unanswered += 1
                if unanswered > 1:  # one bucket is in transit while the one before it is written
                    await _receive_answer(channel)
                    unanswered -= 1
            for _ in range(unanswered):
                await _receive_answer(channel)
            stop = time.monotonic()
            await channel.send(Complete())
            while not isinstance(await _receive_answer(channel), Complete):
                pass
            return Transfer(start, stop, nbytes)
    finally:
        channel.close()


async def pull(
    transport: Transport,
    address: RelayAddress,
    manifest: WeightManifest,
    ranges: Sequence[Range],
    into: Callable[[int, int], memoryview],
    *,
    on_piece: Callable[[int, int], None] = lambda start, stop: None,
    on_channel: Callable[[Channel], None] = lambda channel: None,
    confirm: bool = True,
) -> list[Transfer]:
    """Read `ranges` of a version, as they become available, into memory from `into`;
    return once the version is known to be complete, or with `confirm` false once the
    ranges have been read.

    `on_piece` is called with every range that was read. Returns the transfers of its
    pieces, without the waiting between them. Raises FetchError, in which case the bytes
    read must not be used, unless `on_piece` was called with them and they are verified
    otherwise.
    """
    channel = await transport.connect(address)
    on_channel(channel)
    pulled: list[Transfer] = []
    start, together = 0.0, memoryview(b"")

    def allocate(message: Message, count: int) -> memoryview:
        nonlocal start, together
        start = time.monotonic()
        if isinstance(message, RawRanges) and count == _check_ranges(message.ranges, missing):
            together = memoryview(bytearray(count))
            return together[:]
        if (
            not isinstance(message, Raw)
            or count != message.stop - message.start
            or missing.missing(message.start, message.stop)
        ):
            raise FetchError("broken", f"{count} bytes do not fit {message}")
        return into(message.start, message.stop)

    missing = Ranges()
    for part in ranges:
        missing.add(*part)
    try:
        parts = tuple(part for part in ranges if part[0] < part[1])
        request = Request(
            weights_id=manifest.weights_id,
            digest=manifest.digest,
            nbytes=manifest.nbytes,
            ranges=parts,
            confirm=confirm,
        )
        await channel.send(request)
        while confirm or list(missing):
            message = await _receive_answer(channel, allocate)
            if isinstance(message, Complete):
                break
            if isinstance(message, Raw):
                missing.remove(message.start, message.stop)
                on_piece(message.start, message.stop)
                pulled.append(Transfer(start, time.monotonic(), message.stop - message.start))
            elif isinstance(message, RawRanges):
                at = 0
                for low, high in message.ranges:
                    into(low, high)[:] = together[at : at + high - low]
                    missing.remove(low, high)
                    on_piece(low, high)
                    at += high - low
                pulled.append(Transfer(start, time.monotonic(), at))
        if list(missing):
            raise FetchError("broken", f"the store has not sent bytes {list(missing)[:3]}")
        return pulled
    finally:
        channel.close()


def _check_ranges(ranges: Sequence[Range], missing: Ranges) -> int:
    """Return the number of bytes in ranges that came together.

    Raises FetchError (broken) if they are not in order, or are not wanted or no longer
    wanted.
    """
    end = 0
    for start, stop in ranges:
        if not end <= start < stop or missing.missing(start, stop):
            raise FetchError(
                "broken", f"bytes {start} to {stop} are not wanted, or were sent twice"
            )
        end = stop
    return sum(stop - start for start, stop in ranges)


def split_payload(
    manifest: WeightManifest, senders: int, *, bucket_bytes: int = BUCKET_BYTES
) -> list[list[Range]]:
    """Divide a payload among senders that all have it: bucket by bucket in turn, so
    that the parts are about equal.
    """
    parts: list[list[Range]] = [[] for _ in range(senders)]
    for number, chunk in enumerate(chunks_of(manifest, bucket_bytes)):
        parts[number % senders].append((chunk.start, chunk.stop))
    return parts


class _Bucket(NamedTuple):
    """A bucket. It can be sent as a delta if it has `spans`."""

    start: int
    stop: int
    spans: tuple[delta.Span, ...]


def _buckets(
    manifest: WeightManifest, ranges: Collection[Range], size: int, *, with_deltas: bool
) -> Iterator[_Bucket]:
    """Divide the ranges into buckets. Bytes that are not whole blocks of weights/delta
    are sent raw.
    """
    chunks = list(chunks_of(manifest, size))
    for start, stop in ranges:
        for chunk in chunks:
            low, high = max(start, chunk.start), min(stop, chunk.stop)
            if low >= high:
                continue
            spans = (
                tuple(span for span in chunk.spans if low <= span.start and span.stop <= high)
                if with_deltas
                else ()
            )
            first, last = (spans[0].start, spans[-1].stop) if spans else (high, high)
            for part in (
                _Bucket(low, first, ()),
                _Bucket(first, last, spans),
                _Bucket(last, high, ()),
            ):
                if part.start < part.stop:
                    yield part


def _encode_bucket(
    part: _Bucket, read: ReadBytes, since: DeltaBase | None, pool: ThreadPoolExecutor
) -> tuple[Message, Body]:
    """Encode a bucket. Blocks the thread."""
    if since is None or not part.spans:
        return Raw(start=part.start, stop=part.stop), Body.of(read(slice(part.start, part.stop)))
    blocks = encode_spans(part.spans, since.read, read, pool)
    message = Delta(start=part.start, stop=part.stop, sizes=tuple(len(block) for block in blocks))
    return message, Body.of(b"".join(blocks))


async def _receive_answer(
    channel: Channel, allocate: Callable[[Message, int], memoryview] | None = None
) -> Message:
    """Return the next message. Raises FetchError, also for a refusal."""
    message, _ = await channel.receive(allocate)
    if isinstance(message, Refused):
        raise FetchError(message.reason, f"the store refused: {message.error}")
    return message


@dataclass(frozen=True)
class TransferCost:
    """Seconds to transfer one version, as in RollArt's Table 4; `naive_s` is push and
    pull one after the other.
    """

    push_s: float
    accumulated_pull_s: float
    exposed_pull_s: float

    @property
    def naive_s(self) -> float:
        return self.push_s + self.accumulated_pull_s


def transfer_cost(
    *,
    pushes: Sequence[Transfer],
    pulls: Sequence[Transfer],
    rollout: Sequence[tuple[float, float]] = (),
) -> TransferCost:
    """Compute the cost of a version from its transfers.

    `push_s` lasts from the first sender's start to the last one's end.
    `accumulated_pull_s` is the time during which any receiver pulls. `exposed_pull_s`
    is the part of that which neither the push nor the `rollout` (the intervals in which
    engines work) hides.
    """
    pulled, pushed = (
        [(pull.start, pull.stop) for pull in pulls],
        [(push.start, push.stop) for push in pushes],
    )
    covered = [*pushed, *rollout]
    return TransferCost(
        push_s=max(stop for _, stop in pushed) - min(start for start, _ in pushed)
        if pushed
        else 0.0,
        accumulated_pull_s=_length(pulled),
        exposed_pull_s=_length([*pulled, *covered]) - _length(covered),
    )


def _length(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
