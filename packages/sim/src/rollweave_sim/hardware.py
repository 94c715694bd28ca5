"""GPUs and links, as their makers publish them; the share that software reaches is in
`sim/cost`. And the shapes of models: parameters and bytes, from the `config.json` that
Qwen publishes with its weights.

Sources: RollArt Table 2 for H20 and H800 (dense bf16 FLOP/s, memory, NVLink, relative
cost); NVIDIA's data sheets for H100 SXM, H200 SXM and A100 SXM 80 GB (bf16 without
sparsity). The one measured figure is `matmul_efficiency`, because it differs too much
between these chips to be one constant: the "Maximum Achievable Matmul FLOPS" table of
stas00/ml-engineering for A100 (86.9 %) and H100 (80.3 %; H800 and H200 have the same
compute die), and InferSim (`bench_data/gemm/h20`) for H20 (93 %).

Weights and KV are bf16. Norms, biases and the query and key norms of Qwen3 are left
out: under 0.1 % of any model here.

"""

import difflib
from collections.abc import Mapping
from typing import TypeVar

from rollweave.schema.base import Struct
from rollweave.schema.errors import FieldError

GB = 1e9
GIB = 2.0**30
"""Bytes of a data sheet's GB of HBM: an "80 GB" H100 reports 81,559 MiB to nvidia-smi.
"""

GPUS_PER_MACHINE = 8
"""GPUs that share NVLink: every machine of the papers (Laminar §8, RollArt §7.1) and
NVIDIA's HGX boards.
"""


class Gpu(Struct, frozen=True, kw_only=True):
    """One accelerator.

    `nvlink_bytes_per_s` is as published, the sum of both directions.
    """

    name: str
    bf16_flops: float
    matmul_efficiency: float
    hbm_bytes_per_s: float
    hbm_bytes: float
    nvlink_bytes_per_s: float


class Link(Struct, frozen=True, kw_only=True):
    """A link between machines or devices, in one direction.

    With `per_gpu`, every GPU has its own link; otherwise all GPUs share one.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    per_gpu: bool


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="h20",
            bf16_flops=148e12,
            matmul_efficiency=0.93,
            hbm_bytes_per_s=4000 * GB,
            hbm_bytes=96 * GIB,
            nvlink_bytes_per_s=900 * GB,
        ),
        Gpu(
            name="h800",
            bf16_flops=989.5e12,
            matmul_efficiency=0.803,
            hbm_bytes_per_s=3350 * GB,
            hbm_bytes=80 * GIB,
            nvlink_bytes_per_s=400 * GB,
        ),
        Gpu(
            name="h100",
            bf16_flops=989.5e12,
            matmul_efficiency=0.803,
            hbm_bytes_per_s=3350 * GB,
            hbm_bytes=80 * GIB,
            nvlink_bytes_per_s=900 * GB,
        ),
        Gpu(
            name="h200",
            bf16_flops=989.5e12,
            matmul_efficiency=0.803,
            hbm_bytes_per_s=4800 * GB,
            hbm_bytes=141 * GIB,
            nvlink_bytes_per_s=900 * GB,
        ),
        Gpu(
            name="a100",
            bf16_flops=312e12,
            matmul_efficiency=0.869,
            hbm_bytes_per_s=2039 * GB,
            hbm_bytes=80 * GIB,
            nvlink_bytes_per_s=600 * GB,
        ),
    )
}

LINKS = {
    link.name: link
    for link in (
        # NVLink 4, one direction (NVIDIA H100 data sheet: 900 GB/s both).
        Link(name="nvlink", bytes_per_s=450 * GB, latency_s=2e-6, per_gpu=True),
        # 400 Gb/s InfiniBand, one adapter per GPU (Laminar §8: 8 x 400 Gb/s a machine).
        # Latency: assumption.
        Link(name="rdma", bytes_per_s=50 * GB, latency_s=5e-6, per_gpu=True),
        # 200 Gb/s between clusters, shared by all users (RollArt §7.1, ROSE §6).
        # Latency: assumption, one data center.
        Link(name="ethernet", bytes_per_s=25 * GB, latency_s=1e-4, per_gpu=False),
        # Gen5 x16, one direction: 32 GT/s x 16 lanes at 128b/130b. Latency: assumption.
        Link(name="pcie", bytes_per_s=63 * GB, latency_s=5e-6, per_gpu=True),
    )
}

T = TypeVar("T")


def gpu(name: str) -> Gpu:
    """Return the GPU of that name, ignoring case. Raises FieldError."""
    return named("gpu", name, GPUS)


def link(name: str) -> Link:
    """Return the link of that name, ignoring case. Raises FieldError."""
    return named("link", name, LINKS)


def named(field: str, name: str, known: Mapping[str, T]) -> T:
    """Return the entry of `known` under `name`, ignoring case.

    Raises FieldError with `field`, the known names and the closest one.
    """
    entry = known.get(name.lower())
    if entry is None:
        near = difflib.get_close_matches(name.lower(), list(known), n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise FieldError(field, f"be one of {', '.join(sorted(known))}", f"{name!r}{hint}")
    return entry


BF16 = 2
"""Bytes of a bf16 number."""


class ModelShape(Struct, frozen=True, kw_only=True):
    """A decoder with grouped-query attention and gated MLPs.

    With `experts`, all MLPs are mixtures and `ffn` is unused. With `tied`, the output
    head is the embedding table.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    experts: int = 0
    experts_active: int = 0
    expert_ffn: int = 0

    @property
    def parameters(self) -> int:
        """Return the number of all parameters."""
        return (
            self.dense_parameters
            + self.expert_parameters
            + (1 if self.tied else 2) * self.head_parameters
        )

    @property
    def layer_parameters(self) -> int:
        """Return the layer parameters that one token is multiplied with; an embedding
        look-up multiplies none.
        """
        return self.dense_parameters + self.layers * self.experts_active * self._expert

    @property
    def head_parameters(self) -> int:
        """Return the output head's parameters, used only where a token is sampled; an
        embedding table has as many.
        """
        return self.vocab * self.hidden

    @property
    def dense_parameters(self) -> int:
        """Return the layer parameters that every token uses: attention, and the MLP or
        the router.
        """
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        mlp = self.hidden * self.experts if self.experts else 3 * self.hidden * self.ffn
        return self.layers * (attention + mlp)

    @property
    def expert_parameters(self) -> int:
        """Return the parameters of all experts; 0 for a dense model."""
        return self.layers * self.experts * self._expert

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the weights in bf16."""
        return BF16 * self.parameters

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the bytes of one token's keys and values in all layers, in bf16."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BF16

    @property
    def attention_flops(self) -> int:
        """Return the FLOPs of one query attending to one position in all layers: a
        product with the key and one with the value.
        """
        return 4 * self.layers * self.heads * self.head_dim

    @property
    def _expert(self) -> int:
        return 3 * self.hidden * self.expert_ffn


def _qwen25(
    name: str, *, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int
) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        ffn=ffn,
        vocab=152064,
        tied=False,
    )


def _qwen3(
    name: str,
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int = 8,
    ffn: int,
    tied: bool = False,
    **experts: int,
) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        ffn=ffn,
        vocab=151936,
        tied=tied,
        **experts,
    )


MODELS = {
    shape.name: shape
    for shape in (
        _qwen25("qwen2.5-7b", layers=28, hidden=3584, heads=28, kv_heads=4, ffn=18944),
        _qwen25("qwen2.5-32b", layers=64, hidden=5120, heads=40, kv_heads=8, ffn=27648),
        _qwen25("qwen2.5-72b", layers=80, hidden=8192, heads=64, kv_heads=8, ffn=29568),
        _qwen3("qwen3-0.6b", layers=28, hidden=1024, heads=16, ffn=3072, tied=True),
        _qwen3("qwen3-1.7b", layers=28, hidden=2048, heads=16, ffn=6144, tied=True),
        _qwen3("qwen3-4b", layers=36, hidden=2560, heads=32, ffn=9728, tied=True),
        _qwen3("qwen3-8b", layers=36, hidden=4096, heads=32, ffn=12288),
        _qwen3("qwen3-14b", layers=40, hidden=5120, heads=40, ffn=17408),
        _qwen3("qwen3-32b", layers=64, hidden=5120, heads=64, ffn=25600),
        _qwen3(
            "qwen3-30b-a3b",
            layers=48,
            hidden=2048,
            heads=32,
            kv_heads=4,
            ffn=6144,
            experts=128,
            experts_active=8,
            expert_ffn=768,
        ),
    )
}


def model(name: str) -> ModelShape:
    """Return the model of that name, ignoring case. Raises FieldError."""
    return named("model", name, MODELS)
