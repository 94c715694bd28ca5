"""Two versions of weights: consecutive checkpoints of a training, of a model from
scratch or of a pretrained model, and masks of a density.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.runs import recorded, subject
from rollweave.runtime.checkpoints import Checkpoints
from rollweave.schema.config.root import RunConfig
from rollweave.train import checkpoint
from rollweave.weights.adapters import A, B, merged
from rollweave.weights.checkpoint import weight_files
from rollweave.weights.delta_body import Array

STD = 0.02

OWN_ALWAYS = (
    "run.checkpoint_every=1",
    "run.name=delta",
    "eval={final_episodes=0}",
    "trainer.lr.final=1",
)


@dataclass(frozen=True)
class Versions:
    """Two versions of a payload, [elements], as unsigned integers."""

    base: Array
    new: Array


def own_update(settings: tuple[str, ...], model: Path | None = None) -> Versions:
    """Return the last two checkpoints of a run, a step apart, as published in bfloat16:
    of the fixed lake from scratch, or of a pretrained `model` that learns to add.
    """
    with (
        subject(model) as (path, of_model),
        recorded(path, [*settings, *OWN_ALWAYS, *of_model]) as (config, run, _),
    ):
        kept = Checkpoints(run.checkpoints)
        base, new = (
            bfloat16(_whole(checkpoint.load(kept.path(step)).model, config))
            for step in kept.steps()[-2:]
        )
    return Versions(base, new)


def _whole(trained: Mapping[str, torch.Tensor], config: RunConfig) -> Array:
    """Return all weights in float32, with a run's adapters merged into the model's."""
    tensors = dict(trained)
    if config.lora is not None and config.model.path is not None:
        for file in weight_files(Path(config.model.path)):
            for name, weight in load_file(file).items():
                layer = name.removesuffix(".weight")
                if layer + A in trained:
                    a, b = trained[layer + A], trained[layer + B]
                    weight = merged(weight, a, b, scale=config.lora.scale)
                tensors[name] = weight
        tensors = {name: weight for name, weight in tensors.items() if name not in trained}
    return np.concatenate([weight.float().numpy().ravel() for weight in tensors.values()])


def masked(rng: np.random.Generator, count: int, density: float) -> Versions:
    """Return bfloat16 in which random elements are one float higher or lower."""
    base = bfloat16(rng.standard_normal(count, np.float32) * np.float32(STD))
    new = base.copy()
    where = np.flatnonzero(rng.random(count, np.float32) < density)
    new[where] += rng.choice(np.array([1, -1], np.int16), len(where)).view(np.uint16)
    return Versions(base, new)


def bfloat16(values: Array) -> Array:
    """Convert float32 to the bits of bfloat16, rounded to nearest even. NaN is not
    supported.
    """
    bits = values.view(np.uint32)
    rounded: Array = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded
