"""Weights for an inference server from the adapters that the trainer publishes: the
process of the engine adds them to those of the model.
"""

from contextlib import AbstractContextManager
from pathlib import Path

from rollweave.engine.servers.published import Publication
from rollweave.schema.errors import ConfigError, WeightsError
from rollweave.schema.weights import WeightManifest
from rollweave.weights.adapters import AdapterBase
from rollweave.weights.checkpoint import ModelShape, read_tensors_of


class AdapterMerger:
    """Adds adapters to the weights of a model. Torch, which takes seconds, is imported
    with the first version.
    """

    def __init__(self, model: Path, shape: ModelShape, *, scale: float) -> None:
        self._model, self._shape, self._scale = model, shape, scale
        self._base: AdapterBase | None = None

    def merged(self, manifest: WeightManifest, folder: Path) -> AbstractContextManager[Publication]:
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
            directory=folder,
        )

    def _read_base(self) -> AdapterBase:
        try:
            tensors = dict(read_tensors_of(self._model))
        except ConfigError as error:
            raise WeightsError(str(error)) from error
        self._shape.check({name: tensor.shape for name, tensor in tensors.items()})
        self._base = AdapterBase(tensors, self._shape, scale=self._scale)
        return self._base
