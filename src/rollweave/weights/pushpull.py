"""Writing versions to a remote store, and reading them: by buckets, in parts, side by
side (RollArt §6.3; ROSE §4.2).

Invariants: `push` returns once the version is whole and verified in the store, `pull`
once what it has read is known to be of such a version; else they raise TakeError, and
nobody has anything new. What a store has of a push already is not sent again.
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
    """When bytes travelled, in seconds of the monotonic clock, and how many."""

    start: float
    stop: float
    nbytes: int


@dataclass(frozen=True)
class DeltaBase:
    """A push of changes: what they are made from, which the store must have."""

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
    """Send `ranges` of a version (all of it), which nobody else sends, and return once
    the version is whole in the store.

    What the store has of them already is not sent. Raises TakeError: the version is not
    there, and may be pushed again.
    """
    wanted = ((0, manifest.nbytes),) if ranges is None else tuple(ranges)
    wanted = tuple(part for part in wanted if part[0] < part[1])
    channel = await transport.connect(address)
    try:
        with ThreadPoolExecutor(2, thread_name_prefix="encode") as pool:
            start, nbytes, unanswered = time.monotonic(), 0, 0
            await channel.send(
                Push(
                    manifest=manifest, ranges=wanted, base=since.base if since is not None else None
                )
            )
            answer = await _answer(channel)
            assert isinstance(answer, Missing), answer
            for part in _buckets(manifest, answer.ranges, bucket_bytes, changed=since is not None):
                word, body = await in_thread(_bucket_of, part, read, since, pool)
                await channel.send(word, body)
                nbytes += body.nbytes
                unanswered += 1
                if unanswered > 1:  # one bucket is on its way while the one before is written
                    await _answer(channel)
                    unanswered -= 1
            for _ in range(unanswered):
                await _answer(channel)
            stop = time.monotonic()
            await channel.send(Complete())
            while not isinstance(await _answer(channel), Complete):
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
) -> list[Transfer]:
    """Read `ranges` of a version to where `into` says, as they come to be there;
    returns once the version is known to be whole.

    The transfers are those of its pieces: to wait for a bucket is no transfer. Raises
    TakeError: then what `into` has got must not be used.
    """
    channel = await transport.connect(address)
    pulled: list[Transfer] = []
    start, together = 0.0, memoryview(b"")

    def room(word: Message, count: int) -> memoryview:
        nonlocal start, together
        start = time.monotonic()
        if isinstance(word, RawRanges) and count == _checked(word.ranges, wanted):
            together = memoryview(bytearray(count))
            return together[:]
        if (
            not isinstance(word, Raw)
            or count != word.stop - word.start
            or wanted.missing(word.start, word.stop)
        ):
            raise FetchError("broken", f"{count} bytes do not come with {word}")
        return into(word.start, word.stop)

    wanted = Ranges()
    for part in ranges:
        wanted.add(*part)
    try:
        parts = tuple(part for part in ranges if part[0] < part[1])
        ask = Request(
            weights_id=manifest.weights_id,
            digest=manifest.digest,
            nbytes=manifest.nbytes,
            ranges=parts,
            confirm=True,
        )
        await channel.send(ask)
        while not isinstance(word := await _answer(channel, room), Complete):
            if isinstance(word, Raw):
                wanted.remove(word.start, word.stop)
                pulled.append(Transfer(start, time.monotonic(), word.stop - word.start))
            elif isinstance(word, RawRanges):
                at = 0
                for low, high in word.ranges:
                    into(low, high)[:] = together[at : at + high - low]
                    wanted.remove(low, high)
                    at += high - low
                pulled.append(Transfer(start, time.monotonic(), at))
        if list(wanted):
            raise FetchError("broken", f"the store has not sent bytes {list(wanted)[:3]}")
        return pulled
    finally:
        channel.close()


def _checked(ranges: Sequence[Range], wanted: Ranges) -> int:
    """Bytes of ranges that came together.

    Raises TakeError (broken) where they are not in order, or not wanted (any more).
    """
    end = 0
    for start, stop in ranges:
        if not end <= start < stop or wanted.missing(start, stop):
            raise FetchError("broken", f"bytes {start} to {stop} are not wanted, or come twice")
        end = stop
    return sum(stop - start for start, stop in ranges)


def split_payload(
    manifest: WeightManifest, senders: int, *, bucket_bytes: int = BUCKET_BYTES
) -> list[list[Range]]:
    """Disjoint parts of a payload for so many senders who all have it: bucket by bucket
    in turn, so that each has as much.
    """
    parts: list[list[Range]] = [[] for _ in range(senders)]
    for number, cut in enumerate(chunks_of(manifest, bucket_bytes)):
        parts[number % senders].append((cut.start, cut.stop))
    return parts


class _Part(NamedTuple):
    """A bucket. With `spans` it can be a change."""

    start: int
    stop: int
    spans: tuple[delta.Span, ...]


def _buckets(
    manifest: WeightManifest, ranges: Collection[Range], size: int, *, changed: bool
) -> Iterator[_Part]:
    """The ranges in buckets; where they do not end with weights/delta's blocks, the
    rest travels as it is.
    """
    pieces = list(chunks_of(manifest, size))
    for start, stop in ranges:
        for cut in pieces:
            low, high = max(start, cut.start), min(stop, cut.stop)
            if low >= high:
                continue
            spans = (
                tuple(span for span in cut.spans if low <= span.start and span.stop <= high)
                if changed
                else ()
            )
            first, last = (spans[0].start, spans[-1].stop) if spans else (high, high)
            for part in (_Part(low, first, ()), _Part(first, last, spans), _Part(last, high, ())):
                if part.start < part.stop:
                    yield part


def _bucket_of(
    part: _Part, read: ReadBytes, since: DeltaBase | None, pool: ThreadPoolExecutor
) -> tuple[Message, Body]:
    """Blocks."""
    if since is None or not part.spans:
        return Raw(start=part.start, stop=part.stop), Body.of(read(slice(part.start, part.stop)))
    blocks = encode_spans(part.spans, since.read, read, pool)
    word = Delta(start=part.start, stop=part.stop, sizes=tuple(len(block) for block in blocks))
    return word, Body.of(b"".join(blocks))


async def _answer(
    channel: Channel, room: Callable[[Message, int], memoryview] | None = None
) -> Message:
    """The next word. Raises TakeError, also where it is a refusal."""
    word, _ = await channel.receive(room)
    if isinstance(word, Refused):
        raise FetchError(word.reason, f"the store refuses: {word.error}")
    return word


@dataclass(frozen=True)
class TransferCost:
    """Seconds of one version's way, as in RollArt's Table 4; `naive_s` is push and pull
    one after the other.
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
    """`push_s`: from the first sender's start to the last one's end.
    `accumulated_pull_s`: while anybody pulls.

    `exposed_pull_s`: of that, what neither the push nor the `rollout` (times at which
    engines were at work) hides.
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
    """Of the union."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
