"""The work of one training step: its passes through the models, and the share of the
peak FLOP/s that they reach, by size of the model and length of the sequences.

Both are published: the passes are what the settings of a run ask for, and the shares
are measurements of training.
"""

import bisect
import math

from rollweave.schema.base import Struct
from rollweave.schema.config.root import RunConfig
from rollweave_sim.hardware import GPUS, Gpu

BACKWARD = 2
"""FLOPs of a backward pass over those of a forward pass: each product has two
gradients (MosaicML LLM Foundry, "MFU and HFU").
"""


class Passes(Struct, frozen=True, kw_only=True):
    """The passes of one step over all of its tokens.

    `models` have a state and are updated (the policy, and a critic of its size);
    `forwards` are passes without a backward pass, and `epochs` passes with one through
    each of the models. The optimizer takes `updates` steps.
    """

    models: int = 1
    forwards: int = 0
    epochs: int = 1
    updates: int = 1

    @property
    def units(self) -> int:
        """Return the FLOPs of all passes over those of one forward pass."""
        return self.forwards + (1 + BACKWARD) * self.epochs * self.models


ONE_PASS = Passes()
"""A step that trains on its tokens once, and needs nothing else."""


def passes_of(config: RunConfig) -> Passes:
    """Return the passes that the trainer makes for the settings of a run
    (`train/update.py`, `train/critic.py`): one forward pass each for the log-probs
    under the weights before the step, if a correction needs them, for those under the
    reference, if there is a KL divergence to it, and for the critic's values.

    In a streamed step each minibatch is a step of its own.
    """
    algorithm, trainer = config.algorithm, config.trainer
    models = 1 + config.has_critic
    parts = 1 if config.rollout.mode.value == "stream" else trainer.minibatches
    return Passes(
        models=models,
        forwards=(algorithm.correction != "bypass") + bool(algorithm.kl) + config.has_critic,
        epochs=trainer.epochs,
        updates=trainer.epochs * parts,
    )


class Measured(Struct, frozen=True):
    """A published measurement: parameters of the model, tokens of a sequence, tokens
    per second of one GPU, and the percentage of its peak FLOP/s.
    """

    parameters: float
    length: int
    tokens_per_s: float
    percent: float

    def causal(self, peak: float) -> float:
        """Return the share of the peak, if of attention only the pairs are counted that
        a causal mask leaves. The published percentage counts twice as many.
        """
        products = 6 * self.parameters * self.tokens_per_s
        attention = self.percent / 100 * peak - products
        return (products + attention / 2) / peak


H100 = (
    Measured(6.655e9, 1024, 10203, 42.83),
    Measured(6.659e9, 2048, 10643, 46.44),
    Measured(6.667e9, 4096, 8611, 40.42),
    Measured(6.684e9, 8192, 6935, 37.14),
    Measured(6.785e9, 32768, 3318, 30.94),
    Measured(6.919e9, 65536, 1956, 28.59),
    Measured(12.849e9, 1024, 5502, 44.27),
    Measured(12.854e9, 2048, 4792, 39.79),
    Measured(12.864e9, 4096, 4717, 41.60),
    Measured(12.927e9, 16384, 2985, 35.55),
    Measured(13.011e9, 32768, 1976, 31.68),
    Measured(29.968e9, 1024, 2084, 38.76),
    Measured(29.975e9, 2048, 2002, 38.11),
    Measured(29.990e9, 4096, 1802, 35.86),
    Measured(30.019e9, 8192, 1384, 29.92),
)
A100 = (
    Measured(6.655e9, 1024, 4357, 58.01),
    Measured(6.659e9, 2048, 4641, 64.23),
    Measured(6.667e9, 4096, 3684, 54.84),
    Measured(6.684e9, 8192, 3206, 54.47),
    Measured(6.718e9, 16384, 2453, 51.96),
    Measured(6.785e9, 32768, 1672, 49.46),
    Measured(6.919e9, 65536, 1013, 46.97),
    Measured(12.849e9, 1024, 2330, 59.48),
    Measured(12.854e9, 2048, 2262, 59.57),
    Measured(12.864e9, 4096, 2060, 57.62),
    Measured(12.885e9, 8192, 1795, 56.07),
    Measured(12.927e9, 16384, 1431, 54.07),
    Measured(13.011e9, 32768, 1016, 51.69),
    Measured(29.968e9, 1024, 946, 55.82),
    Measured(29.975e9, 2048, 916, 55.30),
    Measured(29.990e9, 4096, 814, 51.37),
    Measured(30.019e9, 8192, 574, 39.38),
)
"""MosaicML LLM Foundry, `scripts/train/benchmarking/README.md` (commit 061f2c7c): MPT
7B, 13B and 30B on the eight GPUs of one machine, in bf16, sharded, mostly with
activations computed again, for which the percentages do not count the FLOPs. H800, H200
and H20 are taken to reach the share of an H100, times their matmuls' over its own.

Passes without a backward pass reach the same share: in NeMo-RL 0.3, with Llama 3.1 8B
on eight H100, two of them take 18 s beside 28 s of training (NVIDIA-NeMo/RL, issue
959), which are 0.64 of its time and 0.67 of its FLOPs.
"""


def _curves(rows: tuple[Measured, ...], gpu: Gpu) -> tuple[tuple[float, "_Curve"], ...]:
    """Return a curve over lengths for each size of model, by the logarithm of both."""
    sizes: dict[int, list[Measured]] = {}
    for row in rows:
        sizes.setdefault(round(row.parameters / 1e9), []).append(row)
    return tuple(
        (
            math.log(same[0].parameters),
            [(math.log(one.length), one.causal(gpu.bf16_flops)) for one in same],
        )
        for same in sizes.values()
    )


_Curve = list[tuple[float, float]]

_CURVES = {"a100": _curves(A100, GPUS["a100"]), "h100": _curves(H100, GPUS["h100"])}


def mfu(gpu: Gpu, *, parameters: float, length: float) -> float:
    """Return the share of the GPU's peak FLOP/s that training reaches, for a model in
    which a token is multiplied with so many parameters, and sequences of so many
    tokens.

    It is interpolated over the logarithms of both; beyond the measured sizes and
    lengths, the nearest one counts. For a mixture of experts these are the active
    parameters, which overestimates its smaller products.
    """
    base = "a100" if gpu.name == "a100" else "h100"
    reached = gpu.matmul_efficiency / GPUS[base].matmul_efficiency
    by_size = [
        (size, _interpolated(curve, math.log(max(1.0, length)))) for size, curve in _CURVES[base]
    ]
    return reached * _interpolated(by_size, math.log(parameters))


def _interpolated(points: _Curve, at: float) -> float:
    """Return the value at `at` of the line through `points`, flat beyond them."""
    place = bisect.bisect_left(points, (at,))
    if place in (0, len(points)):
        return points[min(place, len(points) - 1)][1]
    (low, before), (high, after) = points[place - 1 : place + 1]
    return before + (after - before) * (at - low) / (high - low)
