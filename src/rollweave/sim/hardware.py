"""GPUs and links, as their makers publish them; the share that software reaches is in
`sim/cost`.

Sources: RollArt Table 2 for H20 and H800 (dense bf16 FLOP/s, memory, NVLink, relative
cost); NVIDIA's data sheets for H100 SXM, H200 SXM and A100 SXM 80 GB (bf16 without
sparsity). The one measured figure is `matmul_efficiency`, because it differs too much
between these chips to be one constant: the "Maximum Achievable Matmul FLOPS" table of
stas00/ml-engineering for A100 (86.9 %) and H100 (80.3 %; H800 and H200 have the same
compute die), and InferSim (`bench_data/gemm/h20`) for H20 (93 %).
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
