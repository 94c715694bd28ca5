"""A published version as vLLM's ranks map it."""

import os

from rollweave.engine.servers.published import verified
from rollweave.schema.weights import WeightManifest
from rollweave.weights.checkpoint import ModelShape


class Mapped:
    """A published version, verified, and kept open until the server has it."""

    def __init__(self, manifest: WeightManifest, fd: int) -> None:
        self._manifest, self._fd = manifest, fd

    @property
    def manifest(self) -> WeightManifest:
        return self._manifest

    def layout(self) -> dict[str, object]:
        """Return what the plug-in needs in order to read it."""
        return {
            "location": f"/proc/{os.getpid()}/fd/{self._fd}",
            "nbytes": self._manifest.nbytes,
            "tensors": [
                (meta.name, meta.dtype, meta.shape, meta.offset) for meta in self._manifest.tensors
            ],
        }

    def close(self) -> None:
        os.close(self._fd)


def mapped(manifest: WeightManifest, shape: ModelShape) -> Mapped:
    """Open a version and verify its bytes and its tensors. Raises WeightsError."""
    fd, _ = verified(manifest, shape)
    return Mapped(manifest, fd)
