"""Weights of one version as bytes in memory, described by a manifest that any process on the host can read.

Invariants: the payload never changes after `publish` returned its manifest (a memfd is sealed); a payload in a memfd
vanishes with its last holder, so nothing is left behind even after a kill; `read_tensors` returns every tensor verified,
or raises `WeightsError` and has done nothing.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import torch
import xxhash

from rollweave.schema.errors import WeightsError
from rollweave.schema.weights import TensorMeta, WeightManifest
from rollweave.weights.memory import READ_CHUNK, read_payload, seal

ALIGNMENT = 64
"""Bytes: a cache line, and a multiple of every element size."""


class Publication:
    """Holds the memory of one published version. Readers that already mapped it keep it alive after `close`."""

    def __init__(self, manifest: WeightManifest, *, fd: int | None, path: Path | None) -> None:
        self.manifest = manifest
        self._fd = fd
        self._path = path

    def close(self) -> None:
        """Let the memory go. A second call does nothing."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Publisher:
    """Publishes version after version and keeps the last `keep` open, for engines that are still loading an older one."""

    def __init__(self, directory: Path, *, keep: int = 3, memfd: bool = hasattr(os, "memfd_create")) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self._directory = directory
        self._keep = keep
        self._memfd = memfd
        self._open: list[Publication] = []
        _remove_leftovers(directory)

    def publish(self, tensors: Mapping[str, torch.Tensor], *, version: int, weights_id: int) -> WeightManifest:
        """Publish `tensors` and close the oldest publication beyond `keep`."""
        publication = publish(tensors, version=version, weights_id=weights_id, directory=self._directory, memfd=self._memfd)
        self._open.append(publication)
        while len(self._open) > self._keep:
            self._open.pop(0).close()
        return publication.manifest

    def close(self) -> None:
        """Close every publication."""
        while self._open:
            self._open.pop().close()


def publish(
    tensors: Mapping[str, torch.Tensor],
    *,
    version: int,
    weights_id: int,
    directory: Path,
    memfd: bool = hasattr(os, "memfd_create"),
) -> Publication:
    """Copy `tensors` (any device, dtype and shape) into one payload: a memfd, or a file in `directory` without `memfd`.

    The memfd's location is `/proc/<pid>/fd/<n>`: whoever may read this process's descriptors may read it.
    Raises `WeightsError` where neither memory nor disk has room.
    """
    name = f"weights-{os.getpid()}-{weights_id}.bin"
    path: Path | None = None
    fd = -1
    try:
        if memfd:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            location = f"/proc/{os.getpid()}/fd/{fd}"
        else:
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / name
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            location = str(path)
        metas, nbytes, digest = _write(fd, tensors)
        if memfd:
            seal(fd)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        if path is not None:
            path.unlink(missing_ok=True)
        raise WeightsError(f"cannot publish weights version {version}: {error}") from error
    manifest = WeightManifest(
        version=version, weights_id=weights_id, location=location, tensors=metas, nbytes=nbytes, digest=digest
    )
    return Publication(manifest, fd=fd, path=path)


def read_tensors(manifest: WeightManifest) -> dict[str, torch.Tensor]:
    """Map the payload and return its tensors by name, on the CPU, after checking sizes, metadata and digest.

    The tensors share one private mapping (writes to them stay here), which lives as long as any of them.
    Raises `WeightsError` where the publisher is gone or anything does not match.
    """
    dtypes = [_checked_dtype(meta, manifest.nbytes) for meta in manifest.tensors]
    _check_layout(manifest)
    where = f"weights version {manifest.version} at {manifest.location}"
    buffer = read_payload(manifest.location, manifest.nbytes, where=where)
    found = xxhash.xxh3_128()
    with memoryview(buffer) as view:
        for start in range(0, len(view), READ_CHUNK):
            found.update(view[start : start + READ_CHUNK])
    if found.hexdigest() != manifest.digest:
        raise WeightsError(f"{where}: digest {found.hexdigest()}, the manifest says {manifest.digest}")
    tensors = {}
    for meta, dtype in zip(manifest.tensors, dtypes, strict=True):
        if meta.nbytes == 0:
            tensors[meta.name] = torch.empty(meta.shape, dtype=dtype)
            continue
        flat = torch.frombuffer(buffer, dtype=dtype, count=math.prod(meta.shape), offset=meta.offset)
        tensors[meta.name] = flat.reshape(meta.shape)
    return tensors


def _write(fd: int, tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[TensorMeta, ...], int, str]:
    """Write all tensors, each aligned, and return their metadata, the payload's bytes, and its digest."""
    digest = xxhash.xxh3_128()
    metas: list[TensorMeta] = []
    offset = 0
    for name, tensor in tensors.items():
        padding = -offset % ALIGNMENT
        flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        offset += padding
        for piece in (memoryview(bytes(padding)), flat.numpy().data):
            digest.update(piece)
            _write_all(fd, piece)
        shape = tuple(int(size) for size in tensor.shape)
        dtype = str(tensor.dtype).removeprefix("torch.")
        metas.append(TensorMeta(name=name, dtype=dtype, shape=shape, offset=offset, nbytes=flat.numel()))
        offset += flat.numel()
    return tuple(metas), offset, digest.hexdigest()


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data[:READ_CHUNK]) :]


def _checked_dtype(meta: TensorMeta, nbytes: int) -> torch.dtype:
    dtype = getattr(torch, meta.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightsError(f"tensor {meta.name}: dtype must be a torch dtype, got {meta.dtype!r}")
    if any(size < 0 for size in meta.shape) or math.prod(meta.shape) * dtype.itemsize != meta.nbytes:
        raise WeightsError(f"tensor {meta.name}: {meta.nbytes} bytes do not hold {meta.dtype} of shape {meta.shape}")
    if meta.offset < 0 or meta.offset % dtype.itemsize or meta.offset + meta.nbytes > nbytes:
        raise WeightsError(f"tensor {meta.name}: bytes {meta.offset}+{meta.nbytes} are not aligned within {nbytes}")
    return dtype


def _check_layout(manifest: WeightManifest) -> None:
    names = [meta.name for meta in manifest.tensors]
    if len(set(names)) != len(names):
        raise WeightsError("tensor names must be distinct")
    end = 0
    for meta in sorted(manifest.tensors, key=lambda meta: (meta.offset, meta.nbytes)):
        if meta.nbytes and meta.offset < end:
            raise WeightsError(f"tensor {meta.name} overlaps another one at byte {meta.offset}")
        end = max(end, meta.offset + meta.nbytes)


def _remove_leftovers(directory: Path) -> None:
    """Remove payload files whose publisher is dead. Only the fallback without memfd leaves any."""
    for path in sorted(directory.glob("weights-*-*.bin")):
        pid = path.name.split("-")[1]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            path.unlink(missing_ok=True)
