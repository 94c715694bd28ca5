"""The versions that one host keeps in shared memory. A version is complete and
verified, or not visible at all.

Invariants: a version becomes visible only after the digest of its whole payload has
matched its manifest; its memory is then sealed and never changes; a version that fails
leaves nothing behind and affects no other. Memory is allocated before it is mapped, so
that no write can fail for lack of it (there is no SIGBUS). A process that has mapped a
version keeps it alive after eviction. All versions of a store are of one model. Not
thread-safe, except where stated.
"""

import contextlib
import math
import mmap
import os
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec
import xxhash

from rollweave.schema.errors import DeltaError, WeightsError
from rollweave.schema.weights import WeightManifest
from rollweave.weights import delta
from rollweave.weights.memory import (
    PayloadDigest,
    Ranges,
    available_bytes,
    open_payload,
    read_into,
    seal,
)
from rollweave.weights.transport import Base, FetchError

SPARE_BYTES = 64 << 20
"""Bytes of memory that the host must have left after allocating a new version: the
kernel kills a process when none is left.
"""


class Chunk(NamedTuple):
    """Bytes `[start, stop)` of a payload that travel together, with the blocks of
    weights/delta in them.
    """

    start: int
    stop: int
    spans: tuple[delta.Span, ...]


def chunks_of(manifest: WeightManifest, chunk_bytes: int) -> Iterator[Chunk]:
    """Divide the payload into pieces of whole blocks, each of at most `chunk_bytes` or
    of one block. Raises DeltaError.
    """
    stored: list[delta.Span] = []
    for span in delta.plan(manifest.tensors, manifest.nbytes):
        if stored and span.stop - stored[0].start > chunk_bytes:
            yield Chunk(stored[0].start, stored[-1].stop, tuple(stored))
            stored = []
        stored.append(span)
    if stored:
        yield Chunk(stored[0].start, stored[-1].stop, tuple(stored))


class StoredVersion:
    """A version in memory. `manifest.location` is this host's memory."""

    def __init__(self, manifest: WeightManifest, fd: int) -> None:
        self.manifest = manifest
        self.fd = fd
        self._mapped = (
            mmap.mmap(fd, manifest.nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ)
            if manifest.nbytes
            else b""
        )

    @property
    def identity(self) -> Base:
        """The base that a delta against this version must name."""
        return Base(publication_id=self.manifest.publication_id, digest=self.manifest.digest)

    def view(self) -> memoryview:
        """The payload. It stays readable as long as the view exists."""
        return memoryview(self._mapped)

    def close(self) -> None:
        """Release the memory. A second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._mapped = b""


class VersionWriter:
    """Receives a version in pieces, in any order, but no piece twice. Either `finish`
    turns it into a `StoredVersion`, or `close` discards it.

    Created by `VersionStore.create` or `VersionStore.open_local`. `load`,
    `mark_received` and `apply_delta` may run in a thread, one at a time.
    """

    def __init__(self, manifest: WeightManifest, fd: int, *, owned: bool) -> None:
        """`fd` is a memory file of the payload's size. A file that is not `owned` is
        sealed and contains the bytes to verify.
        """
        self.manifest, self.fd = manifest, fd
        self._mapped: mmap.mmap | None = None
        if manifest.nbytes:
            flags, prot = (
                (mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
                if owned
                else (mmap.MAP_PRIVATE, mmap.PROT_READ)
            )
            self._mapped = mmap.mmap(fd, manifest.nbytes, flags, prot)
        self._view = memoryview(self._mapped if self._mapped is not None else b"")
        self._owned = owned
        self._spans: dict[int, tuple[int, delta.Span]] | None = None
        self._plan: tuple[delta.Span, ...] = ()
        self._hash = PayloadDigest(manifest.parts)
        self.received = Ranges()
        self.contiguous = 0
        """Number of bytes received without a gap before them."""

    def destination(self, start: int, stop: int) -> memoryview:
        """Return the memory for bytes `[start, stop)`, which the caller releases before
        `finish`.

        Raises FetchError (broken).
        """
        if not 0 <= start < stop <= self.manifest.nbytes:
            raise FetchError(
                "broken",
                f"bytes {start} to {stop} are not within the version's {self.manifest.nbytes}",
            )
        return self._view[start:stop]

    def mark_received(self, start: int, stop: int) -> None:
        """Record that bytes `[start, stop)` have been received.

        Raises FetchError (broken) if some were received before.
        """
        if self.received.touches(start, stop):
            raise FetchError("broken", f"bytes {start} to {stop} were received twice")
        self.received.add(start, stop)
        for low, high in self.received:
            if low <= self.contiguous < high:
                self._hash.update(self._view[self.contiguous : high])
                self.contiguous = high

    def load(self, start: int, stop: int, *, origin: int | None = None) -> int:
        """Load bytes `[start, stop)`, which are present already if the writer does not
        own its memory, or else come from file `origin`. Return their xxh3-64.

        Raises FetchError (source).
        """
        view = self.destination(start, stop)
        if origin is not None and read_into(view, origin, start) < stop - start:
            raise FetchError(
                "source", f"{self.manifest.location} shrank below {stop} bytes while it was read"
            )
        self.mark_received(start, stop)
        return xxhash.xxh3_64_intdigest(view)

    def apply_delta(
        self, start: int, stop: int, body: memoryview, sizes: Collection[int], base: StoredVersion
    ) -> None:
        """Make bytes `[start, stop)` from `base` and a delta.

        Raises FetchError (base) for a delta that was not made from `base`.
        """
        spans, at = self._blocks(start, stop), 0
        if len(spans) != len(sizes) or sum(sizes) != len(body):
            raise FetchError(
                "broken",
                f"a delta of bytes {start} to {stop} has {len(spans)} blocks, got {len(sizes)}",
            )
        old = base.view()
        for span, size in zip(spans, sizes, strict=True):
            part = slice(span.start, span.stop)
            try:
                delta.apply(
                    body[at : at + size], old[part], self._view[part], itemsize=span.itemsize
                )
            except DeltaError as error:
                raise FetchError("base", f"bytes {span.start} to {span.stop}: {error}") from error
            at += size
        self.mark_received(start, stop)

    def finish(self) -> StoredVersion:
        """Verify and seal the version, and return it. The writer is then closed.

        Raises FetchError (broken) after discarding the version.
        """
        digest = self._hash.hexdigest()
        if self.contiguous != self.manifest.nbytes or digest != self.manifest.digest:
            received, manifest = self.contiguous, self.manifest
            self.close()
            if received != manifest.nbytes:
                raise FetchError(
                    "broken",
                    f"weights version {manifest.version} is incomplete: {received} of "
                    f"{manifest.nbytes} bytes",
                )
            raise FetchError(
                "broken",
                f"weights version {manifest.version}: digest {digest}, its manifest says "
                f"{manifest.digest}",
            )
        self._unmap()
        if self._owned:
            seal(self.fd, in_flight=True)
        fd, self.fd = self.fd, -1
        return StoredVersion(
            msgspec.structs.replace(self.manifest, location=f"/proc/{os.getpid()}/fd/{fd}"), fd
        )

    def close(self) -> None:
        """Discard the version. A second call does nothing."""
        self._unmap()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _unmap(self) -> None:
        self._view.release()
        self._view = memoryview(b"")
        if self._mapped is not None:
            # a receiver that still holds a view releases it soon
            with contextlib.suppress(BufferError):
                self._mapped.close()
            self._mapped = None

    def _blocks(self, start: int, stop: int) -> tuple[delta.Span, ...]:
        """Return the blocks of weights/delta in these bytes. The bytes must be whole
        blocks.
        """
        if self._spans is None:
            self._plan = delta.plan(self.manifest.tensors, self.manifest.nbytes)
            self._spans = {span.start: (number, span) for number, span in enumerate(self._plan)}
        first, end = self._spans.get(start), self._spans.get(stop)
        last = end[0] if end is not None else len(self._plan)
        if first is None or (end is None and stop != self.manifest.nbytes) or last <= first[0]:
            raise FetchError(
                "broken", f"a delta of bytes {start} to {stop} must consist of whole blocks"
            )
        return self._plan[first[0] : last]


class VersionStore:
    """All versions of one host, by publication id."""

    def __init__(self) -> None:
        self._versions: dict[int, StoredVersion] = {}

    def get(self, publication_id: int) -> StoredVersion | None:
        return self._versions.get(publication_id)

    def ids(self) -> list[int]:
        return list(self._versions)

    def check(self, manifest: WeightManifest) -> None:
        """Raise FetchError (broken) for a manifest that is invalid, is of another
        model, or has an id that belongs to other content.
        """
        _check_layout(manifest)
        for stored in self._versions.values():
            if stored.manifest.publication_id == manifest.publication_id:
                check_same(stored.manifest, manifest)
            if stored.manifest.tensors != manifest.tensors:
                raise FetchError(
                    "broken",
                    f"weights version {manifest.version} is of another model than "
                    f"version {stored.manifest.version}",
                )

    def base_version(self, base_id: int) -> StoredVersion:
        """Return the version that a delta is made from. Raises FetchError (base)."""
        stored = self._versions.get(base_id)
        if stored is None:
            raise FetchError("base", f"publication {base_id} is not stored; there are {self.ids()}")
        return stored

    def create(self, manifest: WeightManifest) -> VersionWriter:
        """Allocate memory for a version. Raises FetchError (broken, room)."""
        self.check(manifest)
        fd = _allocate(manifest)
        try:
            return VersionWriter(manifest, fd, owned=True)
        except BaseException:
            os.close(fd)
            raise

    def open_local(self, manifest: WeightManifest) -> VersionWriter:
        """Open a version in this host's memory, for `load`. The memory is shared, not
        copied.

        Raises FetchError (broken; source if the memory is gone).
        """
        self.check(manifest)
        fd = open_source(manifest.location, manifest.nbytes)
        try:
            return VersionWriter(manifest, fd, owned=False)
        except BaseException:
            os.close(fd)
            raise

    def add(self, stored: StoredVersion) -> None:
        """Make a version visible."""
        assert stored.manifest.publication_id not in self._versions, "an id is added once"
        self._versions[stored.manifest.publication_id] = stored

    def evict_except(self, ids: Collection[int]) -> list[StoredVersion]:
        """Remove all versions except `ids` and return them. The caller closes them:
        freeing gigabytes takes seconds, and may be done in a thread.
        """
        return [
            self._versions.pop(publication_id)
            for publication_id in list(self._versions)
            if publication_id not in ids
        ]

    def close(self) -> None:
        """Release all versions."""
        close_all(self.evict_except(()))


def close_all(evicted: Collection[StoredVersion]) -> None:
    for stored in evicted:
        stored.close()


ReadBytes = Callable[[slice], memoryview]
"""Reads bytes of a payload."""


def encode_spans(
    spans: Collection[delta.Span], old: ReadBytes, new: ReadBytes, pool: ThreadPoolExecutor
) -> list[bytes]:
    """Encode these bytes as blocks of weights/delta. Waits for `pool`."""

    def one(span: delta.Span) -> bytes:
        part = slice(span.start, span.stop)
        return delta.encode(old(part), new(part), itemsize=span.itemsize)

    return list(pool.map(one, spans))


def open_source(location: str, nbytes: int) -> int:
    """Open a payload, or a part of it, in this host's memory. Raises FetchError
    (source).
    """
    try:
        return open_payload(location, nbytes, where=location)
    except WeightsError as error:
        raise FetchError("source", str(error)) from error


def check_same(here: WeightManifest, other: WeightManifest) -> None:
    """Raise FetchError (broken) for two contents under one id."""
    if (here.digest, here.nbytes, here.tensors) != (other.digest, other.nbytes, other.tensors):
        raise FetchError(
            "broken",
            f"publication {other.publication_id} is stored with another content "
            f"({here.digest}, not {other.digest}): are two trainers publishing at once?",
        )


def _allocate(manifest: WeightManifest) -> int:
    """Allocate a memory file with all its pages. Raises FetchError (room)."""
    left = available_bytes()
    if manifest.nbytes + SPARE_BYTES > left:
        raise FetchError(
            "room", f"no room for {manifest.nbytes} bytes of weights: the host has {left} left"
        )
    fd = -1
    try:
        fd = os.memfd_create(
            f"weights-{manifest.publication_id}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        )
        if manifest.nbytes:
            os.posix_fallocate(fd, 0, manifest.nbytes)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise FetchError(
            "room", f"no room for {manifest.nbytes} bytes of weights: {error}"
        ) from error
    return fd


def _check_layout(manifest: WeightManifest) -> None:
    """Raise FetchError (broken) for an invalid manifest."""
    name = f"weights version {manifest.version}"
    if manifest.nbytes < 0 or len({meta.name for meta in manifest.tensors}) != len(
        manifest.tensors
    ):
        raise FetchError("broken", f"{name}: tensor names must be distinct, and nbytes at least 0")
    for meta in manifest.tensors:
        elements = math.prod(meta.shape)
        if meta.offset < 0 or meta.nbytes < 0 or meta.offset + meta.nbytes > manifest.nbytes:
            raise FetchError(
                "broken", f"{name}: tensor {meta.name} is not within {manifest.nbytes} bytes"
            )
        if (
            min(meta.shape, default=0) < 0
            or (elements == 0) != (meta.nbytes == 0)
            or (elements and meta.nbytes % elements)
        ):
            raise FetchError(
                "broken",
                f"{name}: {meta.nbytes} bytes do not hold tensor {meta.name} of shape {meta.shape}",
            )
    end = 0
    for meta in sorted(manifest.tensors, key=lambda meta: (meta.offset, meta.nbytes)):
        if meta.nbytes and meta.offset < end:
            raise FetchError(
                "broken",
                f"{name}: tensor {meta.name} overlaps another one at byte {meta.offset}",
            )
        end = max(end, meta.offset + meta.nbytes)
    pieces = sorted(piece for part in manifest.parts for piece in part.ranges)
    edges = [0, *(stop for _, stop in pieces)]
    if manifest.parts and (
        [start for start, _ in pieces] != edges[:-1]
        or edges[-1] != manifest.nbytes
        or any(start >= stop for start, stop in pieces)
    ):
        raise FetchError("broken", f"{name}: its parts must have every byte once")
