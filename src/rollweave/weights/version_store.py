"""The versions that one host keeps in shared memory: whole and verified, or not at all.

Invariants: nobody sees a version before the digest of its whole payload was found to be
its manifest's; its memory is sealed then, so it never changes; a version that fails
leaves nothing behind and touches no other. Memory is claimed before it is mapped, so
that no write can fail for want of it (there is no SIGBUS); whoever mapped a version
keeps it alive when it is let go. All versions of a depot are of one model. Not safe for
threads, except where it says so.
"""

import contextlib
import math
import mmap
import os
import stat
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec
import xxhash

from rollweave.schema.errors import DeltaError
from rollweave.schema.weights import WeightManifest
from rollweave.weights import delta
from rollweave.weights.memory import READ_CHUNK, Ranges, available_bytes, is_sealed, seal
from rollweave.weights.protocol import Base, FetchError

SPARE_BYTES = 64 << 20
"""Of memory that the host must have left beside a new version: the kernel kills
somebody when it has none.
"""


class Chunk(NamedTuple):
    """Bytes `[start, stop)` of a payload that travel together, and weights/delta's
    blocks in them.
    """

    start: int
    stop: int
    spans: tuple[delta.Span, ...]


def chunks_of(manifest: WeightManifest, chunk_bytes: int) -> Iterator[Chunk]:
    """The payload in pieces of whole blocks, each of at most `chunk_bytes` or of one
    block. Raises DeltaError.
    """
    held: list[delta.Span] = []
    for span in delta.plan(manifest.tensors, manifest.nbytes):
        if held and span.stop - held[0].start > chunk_bytes:
            yield Chunk(held[0].start, held[-1].stop, tuple(held))
            held = []
        held.append(span)
    if held:
        yield Chunk(held[0].start, held[-1].stop, tuple(held))


class StoredVersion:
    """A version that is here. `manifest.location` is this host's memory."""

    def __init__(self, manifest: WeightManifest, fd: int) -> None:
        self.manifest = manifest
        self.fd = fd
        self._mapped = (
            mmap.mmap(fd, manifest.nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ)
            if manifest.nbytes
            else b""
        )

    @property
    def name(self) -> Base:
        """What a change that is made from it must name."""
        return Base(weights_id=self.manifest.weights_id, digest=self.manifest.digest)

    def view(self) -> memoryview:
        """The payload. It stays readable as long as anybody has it."""
        return memoryview(self._mapped)

    def close(self) -> None:
        """Let it go. A second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._mapped = b""


class VersionWriter:
    """A version that comes in pieces, each once, in any order. Either `finish` makes it
    a `Held`, or `close` removes it.

    Made by `Depot.begin` or `Depot.adopt`. `load`, `fill`, `apply` may run in a thread,
    one at a time.
    """

    def __init__(
        self, manifest: WeightManifest, fd: int, *, ours: bool, origin: int | None = None
    ) -> None:
        """`fd` is a memory file of the payload's size; not `ours`: it is sealed, and
        holds what shall be verified.

        `origin` is a file of which what `load` takes is copied.
        """
        self.manifest = manifest
        self.fd, self._origin = fd, origin
        self._mapped: mmap.mmap | None = None
        if manifest.nbytes:
            flags, prot = (
                (mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
                if ours
                else (mmap.MAP_PRIVATE, mmap.PROT_READ)
            )
            self._mapped = mmap.mmap(fd, manifest.nbytes, flags, prot)
        self._view = memoryview(self._mapped if self._mapped is not None else b"")
        self._ours = ours
        self._spans: dict[int, tuple[int, delta.Span]] | None = None
        self._plan: tuple[delta.Span, ...] = ()
        self._hash = xxhash.xxh3_128()
        self.filled = Ranges()
        self.done = 0
        """Bytes that are there without a gap before them."""

    @property
    def copies(self) -> bool:
        """Whether `load` copies; else all bytes are there from the first, and it only
        verifies them.
        """
        return self._origin is not None

    def room(self, start: int, stop: int) -> memoryview:
        """Where bytes `[start, stop)` go. The caller lets go of it before `finish`.

        Raises TakeError (broken).
        """
        if not 0 <= start < stop <= self.manifest.nbytes:
            raise FetchError(
                "broken",
                f"bytes {start} to {stop} are not within the version's {self.manifest.nbytes}",
            )
        return self._view[start:stop]

    def fill(self, start: int, stop: int) -> None:
        """Bytes `[start, stop)` are there.

        Raises TakeError (broken) where some were before.
        """
        if self.filled.touches(start, stop):
            raise FetchError("broken", f"bytes {start} to {stop} came twice")
        self.filled.add(start, stop)
        for low, high in self.filled:
            if low <= self.done < high:
                self._hash.update(self._view[self.done : high])
                self.done = high

    def load(self, start: int, stop: int) -> int:
        """Take bytes `[start, stop)` from this host's memory; returns their xxh3-64.

        Raises TakeError (source).
        """
        view = self.room(start, stop)
        if self._origin is not None and _read(self._origin, view, start) < stop - start:
            raise FetchError(
                "source", f"{self.manifest.location} shrank below {stop} bytes while it was read"
            )
        self.fill(start, stop)
        return xxhash.xxh3_64_intdigest(view)

    def apply(
        self, start: int, stop: int, body: memoryview, sizes: Collection[int], base: StoredVersion
    ) -> None:
        """Make bytes `[start, stop)` of `base` and a change.

        Raises TakeError (base) for one that is none of `base`.
        """
        spans, at = self._blocks(start, stop), 0
        if len(spans) != len(sizes) or sum(sizes) != len(body):
            raise FetchError(
                "broken",
                f"a change of bytes {start} to {stop} has {len(spans)} blocks, got {len(sizes)}",
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
        self.fill(start, stop)

    def finish(self) -> StoredVersion:
        """The version, verified and sealed; this draft is over.

        Raises TakeError (broken), and has removed it then.
        """
        found = self._hash.hexdigest()
        if self.done != self.manifest.nbytes or found != self.manifest.digest:
            done, manifest = self.done, self.manifest
            self.close()
            if done != manifest.nbytes:
                raise FetchError(
                    "broken",
                    f"weights version {manifest.version} is torn: {done} of "
                    f"{manifest.nbytes} bytes",
                )
            raise FetchError(
                "broken",
                f"weights version {manifest.version}: digest {found}, its manifest says "
                f"{manifest.digest}",
            )
        self._unmap()
        if self._ours:
            seal(self.fd, in_flight=True)
        fd, self.fd = self.fd, -1
        return StoredVersion(
            msgspec.structs.replace(self.manifest, location=f"/proc/{os.getpid()}/fd/{fd}"), fd
        )

    def close(self) -> None:
        """Remove it. A second call does nothing."""
        self._unmap()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _unmap(self) -> None:
        self._view.release()
        self._view = memoryview(b"")
        if self._mapped is not None:
            # whoever still receives into it lets go of it soon
            with contextlib.suppress(BufferError):
                self._mapped.close()
            self._mapped = None
        if self._origin is not None:
            os.close(self._origin)
            self._origin = None

    def _blocks(self, start: int, stop: int) -> tuple[delta.Span, ...]:
        """weights/delta's blocks of these bytes, which must begin and end with one."""
        if self._spans is None:
            self._plan = delta.plan(self.manifest.tensors, self.manifest.nbytes)
            self._spans = {span.start: (number, span) for number, span in enumerate(self._plan)}
        first, end = self._spans.get(start), self._spans.get(stop)
        last = end[0] if end is not None else len(self._plan)
        if first is None or (end is None and stop != self.manifest.nbytes) or last <= first[0]:
            raise FetchError(
                "broken", f"a change of bytes {start} to {stop} is not of whole blocks"
            )
        return self._plan[first[0] : last]


class VersionStore:
    """All versions of one host, by weights id."""

    def __init__(self) -> None:
        self._held: dict[int, StoredVersion] = {}

    def get(self, weights_id: int) -> StoredVersion | None:
        return self._held.get(weights_id)

    def ids(self) -> list[int]:
        return list(self._held)

    def check(self, manifest: WeightManifest) -> None:
        """Raises TakeError (broken) for a manifest that cannot be, is of another model,
        or whose id is another content's.
        """
        _check_layout(manifest)
        for held in self._held.values():
            if held.manifest.weights_id == manifest.weights_id:
                check_same(held.manifest, manifest)
            if held.manifest.tensors != manifest.tensors:
                raise FetchError(
                    "broken",
                    f"weights version {manifest.version} is of another model than "
                    f"version {held.manifest.version}",
                )

    def base(self, base_id: int) -> StoredVersion:
        """What a change is made from. Raises TakeError (base)."""
        held = self._held.get(base_id)
        if held is None:
            raise FetchError("base", f"weights id {base_id} is not here; there are {self.ids()}")
        return held

    def begin(self, manifest: WeightManifest) -> VersionWriter:
        """Memory for a version. Raises TakeError (broken, room)."""
        self.check(manifest)
        fd = _allocate(manifest)
        try:
            return VersionWriter(manifest, fd, ours=True)
        except BaseException:
            os.close(fd)
            raise

    def adopt(self, manifest: WeightManifest) -> VersionWriter:
        """A version from this host's memory, which `load` takes. Sealed memory is
        shared, not copied.

        Raises TakeError (broken, room; source: it is not there).
        """
        self.check(manifest)
        try:
            # Without O_NONBLOCK a recycled descriptor that is a pipe would block for
            # ever.
            origin = os.open(manifest.location, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise FetchError(
                "source", f"{manifest.location}: cannot open, the publisher is gone? ({error})"
            ) from error
        try:
            status = os.fstat(origin)
            if not stat.S_ISREG(status.st_mode) or status.st_size != manifest.nbytes:
                raise FetchError(
                    "source",
                    f"{manifest.location}: {status.st_size} bytes, the "
                    f"manifest says {manifest.nbytes}",
                )
            if is_sealed(origin):
                return VersionWriter(manifest, origin, ours=False)
            fd = _allocate(manifest)
            try:
                return VersionWriter(manifest, fd, ours=True, origin=origin)
            except BaseException:
                os.close(fd)
                raise
        except BaseException:
            os.close(origin)
            raise

    def admit(self, held: StoredVersion) -> None:
        """From now on everybody sees it."""
        assert held.manifest.weights_id not in self._held, "an id is taken once"
        self._held[held.manifest.weights_id] = held

    def hold(self, manifest: WeightManifest) -> StoredVersion:
        """Take a whole version from this host's memory.

        Raises TakeError, and nothing has changed.
        """
        draft = self.adopt(manifest)
        try:
            for start in range(0, manifest.nbytes, READ_CHUNK):
                draft.load(start, min(start + READ_CHUNK, manifest.nbytes))
            held = draft.finish()
        except BaseException:
            draft.close()
            raise
        self.admit(held)
        return held

    def keep(self, ids: Collection[int]) -> list[StoredVersion]:
        """Let go of all others, which the caller closes: freeing gigabytes takes
        seconds, and may be done in a thread.
        """
        return [
            self._held.pop(weights_id) for weights_id in list(self._held) if weights_id not in ids
        ]

    def close(self) -> None:
        """Let go of all."""
        close_all(self.keep(()))


def close_all(gone: Collection[StoredVersion]) -> None:
    for held in gone:
        held.close()


ReadBytes = Callable[[slice], memoryview]
"""Bytes of a payload."""


def encode_spans(
    spans: Collection[delta.Span], old: ReadBytes, new: ReadBytes, pool: ThreadPoolExecutor
) -> list[bytes]:
    """weights/delta's blocks of these bytes. Waits for `pool`."""

    def one(span: delta.Span) -> bytes:
        part = slice(span.start, span.stop)
        return delta.encode(old(part), new(part), itemsize=span.itemsize)

    return list(pool.map(one, spans))


def check_same(here: WeightManifest, other: WeightManifest) -> None:
    """Raises TakeError (broken) for two contents under one id."""
    if (here.digest, here.nbytes, here.tensors) != (other.digest, other.nbytes, other.tensors):
        raise FetchError(
            "broken",
            f"weights id {other.weights_id} is here with another content ({here.digest}, not "
            f"{other.digest}): "
            "do two trainers publish at once?",
        )


def _allocate(manifest: WeightManifest) -> int:
    """A memory file that has all its pages. Raises TakeError (room)."""
    left = available_bytes()
    if manifest.nbytes + SPARE_BYTES > left:
        raise FetchError(
            "room", f"no room for {manifest.nbytes} bytes of weights: the host has {left} left"
        )
    fd = -1
    try:
        fd = os.memfd_create(
            f"weights-{manifest.weights_id}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
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


def _read(fd: int, view: memoryview, offset: int) -> int:
    """Bytes read into `view`; fewer than it has only at the file's end."""
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done : done + READ_CHUNK]], offset + done)
        if count == 0:
            break
        done += count
    return done


def _check_layout(manifest: WeightManifest) -> None:
    """Raises TakeError (broken)."""
    where = f"weights version {manifest.version}"
    if manifest.nbytes < 0 or len({meta.name for meta in manifest.tensors}) != len(
        manifest.tensors
    ):
        raise FetchError("broken", f"{where}: tensor names must be distinct, and bytes at least 0")
    for meta in manifest.tensors:
        elements = math.prod(meta.shape)
        if meta.offset < 0 or meta.nbytes < 0 or meta.offset + meta.nbytes > manifest.nbytes:
            raise FetchError(
                "broken", f"{where}: tensor {meta.name} is not within {manifest.nbytes} bytes"
            )
        if (
            min(meta.shape, default=0) < 0
            or (elements == 0) != (meta.nbytes == 0)
            or (elements and meta.nbytes % elements)
        ):
            raise FetchError(
                "broken",
                f"{where}: {meta.nbytes} bytes do not hold tensor "
                f"{meta.name} of shape {meta.shape}",
            )
    end = 0
    for meta in sorted(manifest.tensors, key=lambda meta: (meta.offset, meta.nbytes)):
        if meta.nbytes and meta.offset < end:
            raise FetchError(
                "broken", f"{where}: tensor {meta.name} overlaps another one at byte {meta.offset}"
            )
        end = max(end, meta.offset + meta.nbytes)
