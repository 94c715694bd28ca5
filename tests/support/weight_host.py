"""Versions of a small model in memory, relays in this process, and sources that tests
control step by step.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

from rollweave.schema import weights
from rollweave.weights.memory import Ranges, combined_digest, seal
from rollweave.weights.relay import Relay
from rollweave.weights.serve import Broadcast, ServedVersion, serve_version
from rollweave.weights.tcp import Channel, Tcp
from rollweave.weights.transport import Request

KIB = 1 << 10


class Memory:
    """A trainer's publication: a payload in sealed memory."""

    def __init__(
        self,
        payload: bytes,
        *,
        publication_id: int,
        tensors: tuple[weights.TensorMeta, ...],
    ) -> None:
        self.payload = payload
        self.fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.write(self.fd, payload)
        seal(self.fd)
        self.manifest = weights.WeightManifest(
            version=publication_id,
            publication_id=publication_id,
            location=f"/proc/{os.getpid()}/fd/{self.fd}",
            tensors=tensors,
            nbytes=len(payload),
            digest=xxhash.xxh3_128_hexdigest(payload),
        )

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def tensors_of(*sizes: int) -> tuple[weights.TensorMeta, ...]:
    """Lay out fp32 vectors with these numbers of elements, at multiples of 64 bytes."""
    metas, offset = [], 0
    for number, size in enumerate(sizes):
        metas.append(
            weights.TensorMeta(
                name=f"t{number}", dtype="float32", shape=(size,), offset=offset, nbytes=4 * size
            )
        )
        offset += 4 * size + -4 * size % 64
    return tuple(metas)


def payload_of(tensors: tuple[weights.TensorMeta, ...], *, seed: int) -> bytes:
    values = np.random.default_rng(seed)
    data = bytearray(max((meta.offset + meta.nbytes for meta in tensors), default=0))
    for meta in tensors:
        data[meta.offset : meta.offset + meta.nbytes] = values.standard_normal(
            meta.nbytes // 4, np.float32
        ).tobytes()
    return bytes(data)


def changed(payload: bytes, *, seed: int, fraction: float = 0.01) -> bytes:
    """Return the payload after a training step that changed this fraction of it."""
    values = np.random.default_rng(seed)
    data = np.frombuffer(bytearray(payload), np.uint32)
    where = values.integers(0, len(data), max(1, int(fraction * len(data)))) if len(data) else []
    data[where] += 1
    return data.tobytes()


SHAPES = tensors_of(40_000, 7, 0, 90_001, 1_100_000)  # three blocks of a delta


@contextlib.contextmanager
def versions(
    count: int, *, tensors: tuple[weights.TensorMeta, ...] = SHAPES, first: int = 1
) -> Iterator[list[Memory]]:
    """Publish consecutive versions of one model, with ids from `first`."""
    payload, memories = payload_of(tensors, seed=0), []
    for publication_id in range(first, first + count):
        memories.append(Memory(payload, publication_id=publication_id, tensors=tensors))
        payload = changed(payload, seed=publication_id)
    try:
        yield memories
    finally:
        for memory in memories:
            memory.close()


class Parts:
    """A version of which every holder has slices of all tensors in memory of its
    own.
    """

    def __init__(self, whole: Memory, count: int) -> None:
        self.payload, self._fds = whole.payload, []
        held = [Ranges() for _ in range(count)]
        for meta in whole.manifest.tensors:
            rows = meta.nbytes // 4
            for number in range(count):
                first, last = rows * number // count, rows * (number + 1) // count
                held[number].add(meta.offset + 4 * first, meta.offset + 4 * last)
        everything = Ranges()
        for ranges in held[1:]:
            for piece in ranges:
                everything.add(*piece)
        ranges = [everything.missing(0, len(self.payload)), *(list(one) for one in held[1:])]
        parts = tuple(self._part(number, tuple(one)) for number, one in enumerate(ranges))
        self.manifest = msgspec.structs.replace(
            whole.manifest,
            location="",
            digest=combined_digest([part.digest for part in parts]),
            parts=parts,
        )
        self.sizes = [sum(stop - start for start, stop in part.ranges) for part in parts]

    def _part(self, number: int, ranges: tuple[tuple[int, int], ...]) -> weights.WeightPart:
        fd = os.memfd_create("part", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, len(self.payload))
        content = xxhash.xxh3_128()
        for start, stop in ranges:
            os.pwrite(fd, self.payload[start:stop], start)
            content.update(self.payload[start:stop])
        seal(fd)
        self._fds.append(fd)
        return weights.WeightPart(
            rank=number,
            location=f"/proc/{os.getpid()}/fd/{fd}",
            ranges=ranges,
            digest=content.hexdigest(),
        )

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


@contextlib.contextmanager
def parts_of(whole: Memory, count: int = 3) -> Iterator[Parts]:
    made = Parts(whole, count)
    try:
        yield made
    finally:
        made.close()


class Host:
    """A relay in this process, and its answers."""

    def __init__(self, transport: Tcp, *, linger_s: float = 60.0) -> None:
        self.answers: asyncio.Queue[weights.RelayReply] = asyncio.Queue()
        self.stalls: list[weights.VersionStalled] = []
        self.relay = Relay(transport, self._on_reply, linger_s=linger_s)
        self.address = weights.RelayAddress(host="", port=0, secret=b"")

    async def fetch(
        self, *arguments: Any, **options: Any
    ) -> weights.VersionFetched | weights.VersionFailed:
        """Fetch a version, with the arguments of `start_fetch`."""
        self.start_fetch(*arguments, **options)
        return await self.answer()

    def start_fetch(
        self,
        manifest: weights.WeightManifest,
        source: "Host | weights.RelayAddress | None" = None,
        **options: Any,
    ) -> None:
        """Start to fetch a version; `options` are further fields of `FetchVersion`."""
        address = source.address if isinstance(source, Host) else source
        options = {"chunk_bytes": 256 * KIB} | options
        self.relay.fetch(weights.FetchVersion(manifest=manifest, source=address, **options))

    def _on_reply(self, reply: weights.RelayReply) -> None:
        if isinstance(reply, weights.VersionStalled):
            self.stalls.append(reply)
        else:
            self.answers.put_nowait(reply)

    async def answer(self) -> weights.VersionFetched | weights.VersionFailed:
        async with asyncio.timeout(30):
            answer = await self.answers.get()
        assert isinstance(answer, weights.VersionFetched | weights.VersionFailed)
        return answer

    def payload(self, publication_id: int) -> bytes | None:
        """Read the payload as an engine does, through the manifest's location."""
        manifest = self.relay.manifest(publication_id)
        return Path(manifest.location).read_bytes() if manifest is not None else None


@contextlib.asynccontextmanager
async def hosts(count: int, *transports: Tcp, linger_s: float = 60.0) -> AsyncIterator[list[Host]]:
    """Run `count` relays, each over one of the `transports` (the last for the rest) or
    TCP.
    """
    chosen = [
        transports[min(number, len(transports) - 1)] if transports else Tcp(idle_timeout_s=5.0)
        for number in range(count)
    ]
    started = [Host(transport, linger_s=linger_s) for transport in chosen]
    try:
        for host in started:
            host.address = await host.relay.listen("127.0.0.1")
        yield started
    finally:
        for host in started:
            await host.relay.close()


class TappedMaster:
    """A source that serves no more bytes of a version than the test has allowed."""

    def __init__(self, memory: Memory, *, piece: int) -> None:
        self.version = ServedVersion(memory.manifest, memory.fd)
        self.requests: list[Request] = []
        self._piece, self._nbytes, self._open = piece, memory.manifest.nbytes, 0

    async def serve(self, channel: Channel) -> None:
        request, _ = await channel.receive()
        assert isinstance(request, Request)
        self.requests.append(request)
        await serve_version(channel, request, lambda _: self.version, Broadcast())

    def allow(self, pieces: int) -> None:
        """Serve this number of further pieces."""
        for _ in range(pieces):
            if self._open < self._nbytes:
                stop = min(self._open + self._piece, self._nbytes)
                self.version.add_piece(self._open, stop)
                self._open = stop

    def allow_all(self) -> None:
        while self._open < self._nbytes:
            self.allow(1)


@contextlib.asynccontextmanager
async def tapped(
    memory: Memory, *, piece: int = 256 * KIB
) -> AsyncIterator[tuple[TappedMaster, weights.RelayAddress]]:
    tap = TappedMaster(memory, piece=piece)
    listener = await Tcp(idle_timeout_s=5.0).listen("127.0.0.1", tap.serve)
    try:
        yield tap, listener.address
    finally:
        await listener.close()


async def until(condition: object, account: Callable[[], object] = str) -> None:
    """Wait until `condition()` holds; fail with `account()` if that takes too long."""
    assert callable(condition)
    try:
        async with asyncio.timeout(30):
            while not condition():  # noqa: ASYNC110 (the condition has no event)
                await asyncio.sleep(0.005)
    except TimeoutError:
        pytest.fail(f"not within 30 s: {account()}")
