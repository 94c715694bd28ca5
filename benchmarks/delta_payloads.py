"""Two versions of weights: an Adam update at a large model's scale, consecutive
checkpoints of our own trainings, and masks of a density.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.runs import example, recorded
from rollweave.runtime.checkpoints import Checkpoints
from rollweave.train import checkpoint
from rollweave.weights.delta_body import Array

LR, STD, BETA1, BETA2, EPS = 1e-6, 0.02, 0.9, 0.999, 1e-8

LAYER = ((2, 1), (1, 1), (1, 1), (1, 2), (3, 1), (3, 1), (1, 3))
"""Matrices of a layer in hidden widths, as Qwen3-0.6B has them: q, k, v, o, gate, up,
down; and two norms.
"""

OWN = "frozenlake_fixed.toml"
OWN_ALWAYS = (
    "run.checkpoint_every=1",
    "eval={final_episodes=0}",
    "trainer.final_lr=1",
)


@dataclass(frozen=True)
class Versions:
    """Two versions of a payload, [elements], as unsigned integers."""

    base: Array
    new: Array


def adam_update(
    rng: np.random.Generator, *, hidden: int, layers: int, steps: int
) -> tuple[Versions, Versions]:
    """Return the last step of Adam on float32 weights, both as published in bfloat16
    and in float32.

    Gradients have mean 0, scales that differ by decades between rows and between
    columns, and heavier tails than a normal distribution.
    """
    before, after = [], []
    for _ in range(layers):
        for rows, columns in (
            *((a * hidden, b * hidden) for a, b in LAYER),
            (1, hidden),
            (1, hidden),
        ):
            weight = rng.normal(0, STD, (rows, columns)) if rows > 1 else np.ones((rows, columns))
            last = list(adam(rng, weight.astype(np.float32), steps))[-2:]
            before.append(last[0].ravel())
            after.append(last[1].ravel())
    base, new = np.concatenate(before), np.concatenate(after)
    return Versions(bfloat16(base), bfloat16(new)), Versions(base.view("<u4"), new.view("<u4"))


def adam(rng: np.random.Generator, weight: Array, steps: int) -> Iterator[Array]:
    """Return `weight` after each step (Kingma & Ba 2015, Algorithm 1)."""
    rows, columns = weight.shape
    scale = np.exp(rng.normal(0, 1, (rows, 1)) + rng.normal(0, 1, (1, columns))).astype(np.float32)
    mean, square = np.zeros_like(weight), np.zeros_like(weight)
    for step in range(1, steps + 1):
        gradient = rng.standard_normal(weight.shape, np.float32)
        gradient *= np.abs(gradient) * scale
        mean += (1 - BETA1) * (gradient - mean)
        square += (1 - BETA2) * (gradient * gradient - square)
        rate = LR / (1 - BETA1**step)
        weight = weight - rate * mean / (np.sqrt(square / (1 - BETA2**step)) + EPS)
        yield weight


def own_update(rate: float, settings: tuple[str, ...]) -> Versions:
    """Return the last two checkpoints of a run, a step apart, as published in
    bfloat16.
    """
    with recorded(
        example(OWN), [*settings, *OWN_ALWAYS, f"trainer.lr={rate}", "run.name=delta"]
    ) as (_, run, _):
        kept = Checkpoints(run.checkpoints)
        base, new = (checkpoint.load(kept.path(step)).model for step in kept.steps()[-2:])
    return Versions(
        *(
            bfloat16(np.concatenate([tensor.numpy().ravel() for tensor in model.values()]))
            for model in (base, new)
        )
    )


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
