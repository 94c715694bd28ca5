"""Publication of a version: its tensors as bytes in memory, described by a manifest
that any process on the host can read.

Invariants: the payload, which is in a memfd, is sealed before its manifest exists;
memory for all of it is allocated before the first byte is written; it vanishes with its
last holder, so that nothing is left behind even after a kill; `read_tensors` returns
all tensors verified, or raises `WeightsError` without any effect.
"""

import itertools
import math
import mmap
import os
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Self

import torch
import xxhash

from rollweave.schema.base import Struct
from rollweave.schema.errors import WeightsError
from rollweave.schema.weights import TensorMeta, WeightManifest, WeightPart
from rollweave.weights.memory import READ_CHUNK, hash_file, read_version, seal

ALIGNMENT = 64
"""Alignment of tensors in bytes: a cache line, and a multiple of every element size."""


def lay_out(tensors: Iterable[tuple[str, torch.dtype, Iterable[int]]]) -> tuple[TensorMeta, ...]:
    """Lay tensors (name, dtype, shape) out in a payload: one after the other,
    aligned.
    """
    metas: list[TensorMeta] = []
    end = 0
    for name, dtype, sizes in tensors:
        shape = tuple(int(size) for size in sizes)
        offset, nbytes = end + -end % ALIGNMENT, math.prod(shape) * dtype.itemsize
        metas.append(
            TensorMeta(
                name=name,
                dtype=str(dtype).removeprefix("torch."),
                shape=shape,
                offset=offset,
                nbytes=nbytes,
            )
        )
        end = offset + nbytes
    return tuple(metas)


class Publication:
    """Holds the memory of one published version.

    Readers that have already mapped the memory keep it alive after `close`.
    """

    def __init__(self, manifest: WeightManifest, *, fd: int) -> None:
        self.manifest = manifest
        self._fd = fd

    def close(self) -> None:
        """Release the memory. A second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DraftHandle(Struct, frozen=True, kw_only=True):
    """Identifies a draft to which other processes of this host may write.

    `mark` is part of the memory's name, and globally unique.
    """

    location: str
    nbytes: int
    mark: str


class PayloadWriter:
    """Write access to the payload of a draft. Slices may be written in any order and by
    several processes, but no slice twice.

    Bytes written in order, from the start, are hashed immediately; `digest` reads only
    the rest.
    """

    def __init__(self, fd: int, nbytes: int, gaps: Mapping[int, int] | None = None) -> None:
        """`gaps` maps the start of each padding, which is never written, to its end."""
        self.fd, self.nbytes, self._gaps = fd, nbytes, gaps or {}
        self._hash = xxhash.xxh3_128()
        self._hashed = 0

    @classmethod
    def open(cls, handle: DraftHandle) -> Self | None:
        """Open a draft of another process; return None if its memory is unreachable,
        for example on another machine.
        """
        try:
            fd = os.open(handle.location, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        name = os.readlink(f"/proc/self/fd/{fd}")
        if handle.mark in name and os.fstat(fd).st_size == handle.nbytes:
            return cls(fd, handle.nbytes)
        os.close(fd)  # the path names a process of this machine with the same id
        return None

    def write(self, offset: int, data: memoryview) -> None:
        """Write `data` at `offset`. Raises OSError."""
        assert 0 <= offset <= self.nbytes - len(data), (
            f"{len(data)} bytes at {offset} of {self.nbytes}"
        )
        if self._gaps.get(self._hashed) == offset:
            self._hash.update(bytes(offset - self._hashed))
            self._hashed = offset
        while data:
            count = os.pwrite(self.fd, data[:READ_CHUNK], offset)
            if self._hashed == offset:
                self._hash.update(data[:count])
                self._hashed += count
            data, offset = data[count:], offset + count

    def digest(self) -> str:
        """Return the xxh3-128 of the whole payload, in hex, once it is written.

        Raises OSError.
        """
        hash_file(self._hash, self.fd, self._hashed, self.nbytes)
        self._hashed = self.nbytes
        digest: str = self._hash.hexdigest()
        return digest

    def digest_of(self, ranges: Iterable[tuple[int, int]]) -> str:
        """Return the xxh3-128 of these ranges, in hex. Raises OSError."""
        content = xxhash.xxh3_128()
        for start, stop in ranges:
            hash_file(content, self.fd, start, stop)
        return content.hexdigest()

    def close(self) -> None:
        os.close(self.fd)


class Draft:
    """Memory for one version, allocated but not completely written.

    Ends with `finish` or `abandon`.
    """

    def __init__(
        self,
        metas: tuple[TensorMeta, ...],
        *,
        version: int,
        publication_id: int,
        ranges: Sequence[tuple[int, int]] | None = None,
        rank: int = 0,
    ) -> None:
        """Allocate the memory. Raises `WeightsError` if there is not enough, and leaves
        nothing behind.

        With `ranges`, memory is allocated only for these bytes: the part of the version
        that the ranks on this host write. `rank` is the first of these ranks. The
        memory's location is `/proc/<pid>/fd/<n>`: any process that may read this
        process's descriptors may read it.
        """
        self._metas, self._ranges, self._rank = metas, ranges, rank
        self._version, self._publication_id = version, publication_id
        nbytes = max((meta.offset + meta.nbytes for meta in metas), default=0)
        mark = f"weights-{os.getpid()}-{publication_id}-{secrets.token_hex(8)}.bin"
        fd = -1
        try:
            fd = os.memfd_create(mark, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            location = f"/proc/{os.getpid()}/fd/{fd}"
            gaps = {
                a.offset + a.nbytes: b.offset
                for a, b in itertools.pairwise(metas)
                if a.offset + a.nbytes < b.offset
            }
            self.writer = PayloadWriter(fd, nbytes, gaps)
            self.handle = DraftHandle(location=location, nbytes=nbytes, mark=mark)
            if ranges is None:
                _allocate(fd, nbytes)
            else:
                os.ftruncate(fd, nbytes)
                for start, stop in ranges:
                    _allocate(fd, stop - start, start=start)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise self.error(error) from error

    def error(self, error: OSError) -> WeightsError:
        """Return the error to raise if a slice could not be written."""
        return WeightsError(f"cannot publish weights version {self._version}: {error}")

    def finish(self) -> Publication:
        """Publish the draft, once all of its slices are written. It never changes
        afterwards.

        Raises `WeightsError` after abandoning the draft.
        """
        try:
            seal(self.writer.fd)
            digest = (
                self.writer.digest()
                if self._ranges is None
                else self.writer.digest_of(self._ranges)
            )
        except OSError as error:
            self.abandon()
            raise self.error(error) from error
        manifest = WeightManifest(
            version=self._version,
            publication_id=self._publication_id,
            location=self.handle.location,
            tensors=self._metas,
            nbytes=self.writer.nbytes,
            digest=digest,
            parts=()
            if self._ranges is None
            else (
                WeightPart(
                    rank=self._rank,
                    location=self.handle.location,
                    ranges=tuple(self._ranges),
                    digest=digest,
                ),
            ),
        )
        return Publication(manifest, fd=self.writer.fd)

    def abandon(self) -> None:
        """Release the memory."""
        self.writer.close()


class Publisher:
    """Publishes versions, and keeps the versions open that may still be loaded: the
    requested versions, or the last `keep`.
    """

    def __init__(self, *, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self._keep = keep
        self._open: list[Publication] = []

    def publish(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        version: int,
        publication_id: int,
        needed: Collection[int] | None = None,
    ) -> WeightManifest:
        """Publish `tensors`, and close every other publication whose id is not in
        `needed`. If `needed` is None, close the oldest publications.
        """
        self._close_all_but(needed)
        return self._added(publish(tensors, version=version, publication_id=publication_id))

    def draft(
        self,
        metas: tuple[TensorMeta, ...],
        *,
        version: int,
        publication_id: int,
        ranges: Sequence[tuple[int, int]] | None = None,
        rank: int = 0,
        needed: Collection[int] | None = None,
    ) -> Draft:
        """Allocate memory for a version, or part of a version, that is written slice by
        slice, after closing publications like `publish`.

        Raises `WeightsError`.
        """
        self._close_all_but(needed)
        return Draft(
            metas,
            version=version,
            publication_id=publication_id,
            ranges=ranges,
            rank=rank,
        )

    def finish(self, draft: Draft) -> WeightManifest:
        """Publish a completely written draft. Raises `WeightsError`."""
        return self._added(draft.finish())

    def close(self) -> None:
        """Close every publication."""
        while self._open:
            self._open.pop().close()

    def _close_all_but(self, needed: Collection[int] | None) -> None:
        """Close what is not needed before memory for a new version is allocated."""
        last = self._open[1 - self._keep :] if self._keep > 1 else []
        kept = (
            last
            if needed is None
            else [old for old in self._open if old.manifest.publication_id in needed]
        )
        for old in self._open:
            if old not in kept:
                old.close()
        self._open = [*kept]

    def _added(self, new: Publication) -> WeightManifest:
        self._open.append(new)
        return new.manifest


def publish(
    tensors: Mapping[str, torch.Tensor],
    *,
    version: int,
    publication_id: int,
) -> Publication:
    """Copy `tensors` (of any device, dtype and shape) into one payload.

    Raises `WeightsError` if there is not enough memory.
    """
    return publish_each(
        lay_out((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()),
        (tensor.detach().to("cpu") for tensor in tensors.values()),
        version=version,
        publication_id=publication_id,
    )


def publish_each(
    metas: tuple[TensorMeta, ...],
    tensors: Iterable[torch.Tensor],
    *,
    version: int,
    publication_id: int,
) -> Publication:
    """Copy tensors on the CPU, each valid until the next, into one payload of this
    layout.

    Raises `WeightsError` if there is not enough memory, and what the iteration raises.
    """
    draft = Draft(metas, version=version, publication_id=publication_id)
    try:
        for meta, tensor in zip(metas, tensors, strict=True):
            draft.writer.write(meta.offset, bytes_of(tensor))
    except OSError as error:
        draft.abandon()
        raise draft.error(error) from error
    except BaseException:
        draft.abandon()
        raise
    return draft.finish()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU, row-major: a view of its memory if it is
    contiguous.
    """
    view: memoryview = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return view


def read_tensors(manifest: WeightManifest) -> dict[str, torch.Tensor]:
    """Map the payload and return its tensors by name, on the CPU, after checking sizes,
    metadata and digest.

    The tensors share one private mapping (writes to them stay private), which lives as
    long as any of the tensors. Raises `WeightsError` if the publisher is gone or
    anything does not match.
    """
    check_layout(manifest)
    return tensors_in(manifest, tensor_of(read_version(manifest, manifest.location)))


def tensor_of(payload: mmap.mmap | bytearray) -> torch.Tensor:
    """Return the bytes of a payload as a tensor, which shares its memory."""
    if not payload:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(payload, dtype=torch.uint8)


def tensors_in(manifest: WeightManifest, payload: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of a version, whose layout is checked, by name; they share the
    memory of `payload`.
    """
    return {
        meta.name: payload[meta.offset : meta.offset + meta.nbytes]
        .view(getattr(torch, meta.dtype))
        .view(meta.shape)
        for meta in manifest.tensors
    }


def _allocate(fd: int, nbytes: int, *, start: int = 0) -> None:
    """Allocate these bytes of the file now, so that lack of memory is an error here and
    not a signal later. Raises OSError.
    """
    if nbytes:
        os.posix_fallocate(fd, start, nbytes)


def _check_tensor(meta: TensorMeta, nbytes: int) -> None:
    dtype = getattr(torch, meta.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightsError(f"tensor {meta.name}: dtype must be a torch dtype, got {meta.dtype!r}")
    if (
        any(size < 0 for size in meta.shape)
        or math.prod(meta.shape) * dtype.itemsize != meta.nbytes
    ):
        raise WeightsError(
            f"tensor {meta.name}: {meta.nbytes} bytes do not hold {meta.dtype} of "
            f"shape {meta.shape}"
        )
    if meta.offset < 0 or meta.offset % dtype.itemsize or meta.offset + meta.nbytes > nbytes:
        raise WeightsError(
            f"tensor {meta.name}: bytes {meta.offset}+{meta.nbytes} are not aligned within {nbytes}"
        )


def check_layout(manifest: WeightManifest) -> None:
    """Raise `WeightsError` unless the tensors have numbers of torch, fit into the
    payload and do not overlap.
    """
    for meta in manifest.tensors:
        _check_tensor(meta, manifest.nbytes)
    names = [meta.name for meta in manifest.tensors]
    if len(set(names)) != len(names):
        raise WeightsError("tensor names must be distinct")
    end = 0
    for meta in sorted(manifest.tensors, key=lambda meta: (meta.offset, meta.nbytes)):
        if meta.nbytes and meta.offset < end:
            raise WeightsError(f"tensor {meta.name} overlaps another one at byte {meta.offset}")
        end = max(end, meta.offset + meta.nbytes)
