"""Published weights on their way into an inference server, to which the process of the
engine first adds those of the model if the trainer publishes adapters.
"""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rollweave.schema.errors import ConfigError, WeightsError
from rollweave.schema.serving import LoadCheckpoint
from rollweave.schema.weights import WeightManifest
from rollweave.weights.adapters import AdapterBase
from rollweave.weights.checkpoint import ModelShape, read_tensors_of
from rollweave.weights.memory import open_payload, read_version

if TYPE_CHECKING:
    import torch

    from rollweave.weights.publication import Publication


class HeldWeights(Protocol):
    """A published version, verified, and kept until the server has it."""

    @property
    def manifest(self) -> WeightManifest: ...

    def close(self) -> None:
        """Give up the version."""


def verified(manifest: WeightManifest, shape: ModelShape) -> tuple[int, mmap.mmap | bytearray]:
    """Open a version, and verify its bytes and its tensors. Return its descriptor,
    which the caller closes, and its bytes. Raises WeightsError.
    """
    shapes = {meta.name: meta.shape for meta in manifest.tensors}
    if len(shapes) < len(manifest.tensors):
        raise WeightsError("tensor names must be distinct")
    shape.check(shapes)
    where = f"weights version {manifest.version} at {manifest.location}"
    fd = open_payload(manifest.location, manifest.nbytes, where=where)
    try:
        buffer = read_version(manifest, f"/proc/self/fd/{fd}")
    except BaseException:
        os.close(fd)
        raise
    return fd, buffer


def published_model(model: Path, shape: ModelShape) -> "Publication":
    """Publish the weights of a checkpoint from this process, as version 0. Raises
    WeightsError.
    """
    from rollweave.weights.publication import lay_out, publish_each

    def tensors() -> Iterator[tuple[str, "torch.Tensor"]]:
        wanted = shape.tensors()
        return ((name, tensor) for name, tensor in read_tensors_of(model) if name in wanted)

    try:
        metas = lay_out((name, tensor.dtype, tensor.shape) for name, tensor in tensors())
        each = (tensor for _, tensor in tensors())
        return publish_each(metas, each, version=0, publication_id=0)
    except ConfigError as error:
        raise WeightsError(str(error)) from error


def published(command: LoadCheckpoint) -> "Publication":
    """Publish the weights of a trainer's checkpoint from this process."""
    import torch  # seconds, and only here

    from rollweave.weights.publication import publish
    from rollweave.weights.trainer_checkpoint import read_trainer_checkpoint

    directory, dtype = Path(command.directory), getattr(torch, command.dtype)
    tensors = read_trainer_checkpoint(directory, step=command.version, dtype=dtype)
    return publish(tensors, version=command.version, publication_id=command.publication_id)


class AdapterMerger:
    """Adds adapters to the weights of a model. Torch, which takes seconds, is imported
    with the first version.
    """

    def __init__(self, model: Path, shape: ModelShape, *, scale: float) -> None:
        self._model, self._shape, self._scale = model, shape, scale
        self._base: AdapterBase | None = None

    def merged(self, manifest: WeightManifest) -> "Publication":
        """Publish the weights of a version of adapters from this process, those that
        they change in their number format. Raises WeightsError.
        """
        import torch

        from rollweave.weights.publication import lay_out, publish_each, read_tensors

        adapters, base = read_tensors(manifest), self._base or self._read_base()
        base.check(adapters)
        formats = base.formats(adapters)
        sizes = self._shape.tensors()
        metas = lay_out((name, formats[name], sizes[name]) for name in sizes)
        weights = base.with_adapters(adapters, torch.device("cpu"))
        return publish_each(
            metas,
            (tensor.to(formats[name]) for name, tensor in weights),
            version=manifest.version,
            publication_id=manifest.publication_id,
        )

    def _read_base(self) -> AdapterBase:
        try:
            tensors = dict(read_tensors_of(self._model))
        except ConfigError as error:
            raise WeightsError(str(error)) from error
        self._shape.check({name: tensor.shape for name, tensor in tensors.items()})
        self._base = AdapterBase(tensors, self._shape, scale=self._scale)
        return self._base
