"""Weights on the way from the trainer to the engines."""

from rollweave.schema.base import Noun


class TensorMeta(Noun, frozen=True, kw_only=True):
    """One tensor at bytes `[offset, offset + nbytes)` of the payload. `dtype` is torch's name without the prefix."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class WeightManifest(Noun, frozen=True, kw_only=True):
    """A published weight version. `version` counts training steps; `weights_id` is never reused, and tags KV and caches.

    `base_version` is None for full weights (deltas name the version that they apply to). `location` is a path that any
    process on the host can open; `digest` is the xxh3-128 of the payload, in hex.
    """

    version: int
    weights_id: int
    location: str
    tensors: tuple[TensorMeta, ...]
    nbytes: int
    digest: str
    base_version: int | None = None
