"""Loads the model that the trainer trains: this package's own implementation of its
architecture, or transformers' implementation.
"""

from pathlib import Path
from typing import Literal

import torch

from rollweave.train.distributed import ALONE, RankGroup
from rollweave.train.lora import NewAdapters
from rollweave.train.model import Model, load_model
from rollweave.train.transformers_loading import load_transformers_model
from rollweave.train.transformers_model import TransformersModel
from rollweave.weights.checkpoint import has_native_shape

Implementation = Literal["native", "transformers"]

TrainedModel = Model | TransformersModel


def implementation_of(path: Path) -> Implementation:
    """Return the implementation of a checkpoint's model unless the user names one."""
    return "native" if has_native_shape(path) else "transformers"


def load_trained_model(
    path: Path,
    implementation: Implementation | None,
    *,
    dtype: str,
    device: torch.device,
    ranks: RankGroup = ALONE,
    adapters: NewAdapters | None = None,
) -> TrainedModel:
    """Read a Hugging Face checkpoint directory, sharded over `ranks`. Weights are kept
    in float32; `dtype` is the number format of the computation. With `adapters`, only
    the adapters are trained.

    Raises `TrainerError`, which names what is not supported or missing.
    """
    if (implementation or implementation_of(path)) == "transformers":
        return load_transformers_model(
            path, dtype=dtype, device=device, ranks=ranks, adapters=adapters
        )
    return load_model(path, dtype=dtype, device=device, ranks=ranks, adapters=adapters)
