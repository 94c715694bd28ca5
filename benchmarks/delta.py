"""Bench `delta`: bytes and speed of weight deltas.

The payloads are consecutive checkpoints of trainings, with `--model` also of a
pretrained model with all weights and with adapters, and masks of growing density.

Every delta is applied, and every element compared with the original; `mismatches`
counts differences. Speeds are those of one thread, by its CPU time, over copies of the
same payload, which alternate with them.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contract import Figure, Result
from benchmarks.delta_payloads import Versions, masked, own_update
from benchmarks.harness import Progress
from benchmarks.runs import CHAT, OWN
from rollweave.schema.weights import TensorMeta
from rollweave.weights.delta import apply, encode, plan
from rollweave.weights.delta_body import FORMS, differences_of

COO_POSITION_BYTES = 4
"""Bytes of a position in the usual format of sparse updates: an int32 for each change,
beside the new element.
"""

DENSITIES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.5)

OWN_CASES = {
    "_own_1e6": ("trainer.lr.peak=1e-6",),
    "_own_2e3": ("trainer.lr.peak=2e-3",),
}
MODEL_CASES = {
    "": ("trainer.lr.peak=1e-6",),
    "_1e5": ("trainer.lr.peak=1e-5",),
    "_lora_1e5": ("trainer.lr.peak=1e-5", "lora.rank=16"),
    "_lora_1e4": ("trainer.lr.peak=1e-4", "lora.rank=16"),
}


@dataclass(frozen=True, kw_only=True)
class DeltaPlan:
    """Extent of the bench: `own` and `chat` are settings of the trainings from scratch
    and of the pretrained model.
    """

    rounds: int
    masked: int
    own: tuple[str, ...]
    chat: tuple[str, ...]


FULL = DeltaPlan(
    rounds=7,
    masked=1 << 24,
    own=("run.steps=6", "model.scratch.hidden=256", "model.scratch.layers=4"),
    chat=("run.steps=20", "rollout.groups_per_step=4"),
)
QUICK = DeltaPlan(
    rounds=5,
    masked=1 << 21,
    own=("run.steps=2", "warmup.steps=4", "rollout.groups_per_step=2", "rollout.group_size=4"),
    chat=("run.steps=2",),
)


@dataclass(frozen=True, kw_only=True)
class DeltaMeasurement:
    """A payload's delta: its bytes, its blocks by form; seconds are medians."""

    nbytes: int
    forms: dict[str, int]
    mismatches: int
    copy_s: float
    encode_s: float
    apply_s: float


def bench_delta(*, quick: bool, model: Path | None, progress: Progress) -> Result:
    """Return figures. Those without a suffix are of the pretrained `model` in bfloat16
    at 1e-6, `_1e5` and `_lora_…` of other learning rates and of adapters, `_own_…` of a
    model from scratch, `_smaller` of the codec for slow links; `curve_…` are lists by
    density.
    """
    plan = QUICK if quick else FULL
    figures: dict[str, Figure] = {}
    measured: dict[str, DeltaMeasurement] = {}

    def take(suffix: str, versions: Versions, *, smaller: bool = False) -> None:
        measured[suffix] = measurement = measure(versions, rounds=plan.rounds, smaller=smaller)
        values = figures_of(versions, measurement)
        figures.update({f"{name}{suffix}": value for name, value in values.items()})

    runs: list[tuple[Path | None, str, tuple[str, ...]]] = [
        *((model, suffix, plan.chat + own) for suffix, own in MODEL_CASES.items() if model),
        *((None, suffix, plan.own + own) for suffix, own in OWN_CASES.items()),
    ]
    for number, (source, suffix, own) in enumerate(runs):
        progress(f"{source or 'a model from scratch'}: {', '.join(own)}")
        versions = own_update(own, source)
        take(suffix, versions)
        if number == 0:
            take("_smaller", versions, smaller=True)
            figures["entropy_per_changed"] = round(entropy(versions), 4)
    rng = np.random.default_rng(0)
    curve: dict[str, list[float]] = {}
    for density in DENSITIES:
        progress(f"a mask of density {density:g}")
        versions = masked(rng, plan.masked, density)
        measured[f"{density:g}"] = measurement = measure(versions, rounds=plan.rounds)
        for name, value in figures_of(versions, measurement).items():
            curve.setdefault(f"curve_{name}", []).append(value)
    mismatches = sum(measurement.mismatches for measurement in measured.values())
    forms = {suffix or "model": measurement.forms for suffix, measurement in measured.items()}
    return Result(
        bench="delta",
        figures={"mismatches": mismatches, **figures, **curve},
        conditions=conditions(plan, model) | {"forms": forms},
    )


def figures_of(versions: Versions, measurement: DeltaMeasurement) -> dict[str, float]:
    """Return figures. Ratios of bytes are ours over those of the alternative, ratios of
    speed over memcpy's.
    """
    changed = int(np.count_nonzero(versions.base != versions.new))
    coo = changed * (COO_POSITION_BYTES + versions.new.itemsize)
    values = {
        "changed": changed / len(versions.new),
        "bytes_per_changed": measurement.nbytes / max(1, changed),
        "ratio_to_coo": measurement.nbytes / max(1, coo),
        "ratio_to_dense": measurement.nbytes / versions.new.nbytes,
        "encode_over_memcpy": measurement.copy_s / measurement.encode_s,
        "apply_over_memcpy": measurement.copy_s / measurement.apply_s,
        "encode_gbps": versions.new.nbytes / measurement.encode_s / 1e9,
        "apply_gbps": versions.new.nbytes / measurement.apply_s / 1e9,
    }
    return {name: float(f"{value:.4g}") for name, value in values.items()}


def measure(versions: Versions, *, rounds: int, smaller: bool = False) -> DeltaMeasurement:
    """Copy, encode and apply the payload in turns."""
    base, new = versions.base.view(np.uint8), versions.new.view(np.uint8)
    itemsize, count = versions.new.itemsize, len(versions.new)
    tensor = TensorMeta(
        name="all", dtype=f"uint{8 * itemsize}", shape=(count,), offset=0, nbytes=new.nbytes
    )
    parts = [slice(span.start, span.stop) for span in plan([tensor], new.nbytes)]
    out = np.zeros_like(new)
    blocks: list[bytes] = []

    def copy() -> None:
        np.copyto(out, base)

    def encode_all() -> None:
        blocks[:] = [
            encode(base[part], new[part], itemsize=itemsize, smaller=smaller) for part in parts
        ]

    def apply_all() -> None:
        for part, block in zip(parts, blocks, strict=True):
            apply(block, base[part], out[part], itemsize=itemsize)

    seconds: dict[Callable[[], None], list[float]] = {copy: [], encode_all: [], apply_all: []}
    for _ in range(rounds + 1):  # the first is not counted: it touches memory for the first time
        for action, taken in seconds.items():
            began = time.thread_time()
            action()
            taken.append(time.thread_time() - began)
    copy_s, encode_s, apply_s = (statistics.median(taken[1:]) for taken in seconds.values())
    return DeltaMeasurement(
        nbytes=sum(map(len, blocks)),
        forms=dict(Counter(FORMS[block[1]] for block in blocks)),
        mismatches=int(np.count_nonzero(out.view(versions.new.dtype) != versions.new)),
        copy_s=copy_s,
        encode_s=encode_s,
        apply_s=apply_s,
    )


def entropy(versions: Versions) -> float:
    """Return the bytes for each change below which no code can go that knows neither
    the base nor the distribution of positions: positions at random, and differences by
    their frequencies. 0 without a change.
    """
    where = np.flatnonzero(versions.base != versions.new)
    if not len(where):
        return 0.0
    _, counts = np.unique(
        differences_of(versions.base[where], versions.new[where]), return_counts=True
    )
    density, shares = len(where) / len(versions.new), counts / len(where)
    positions = -np.log2(density) - (1 - density) / density * np.log2(1 - density)
    return float((positions - (shares * np.log2(shares)).sum()) / 8)


def conditions(plan: DeltaPlan, model: Path | None) -> dict[str, Any]:
    named = {
        "model": f"the last two checkpoints, a step apart, of {model}, which learns {CHAT} with "
        f"{', '.join(plan.chat)}, in bfloat16; _lora: of the merged weights"
    }
    return (named if model is not None else {}) | {
        "own": f"the last two checkpoints, a step apart, of {Path(OWN).stem} with "
        f"{', '.join(plan.own)}, in bfloat16",
        "curve": f"{plan.masked:,} bfloat16 elements, random ones one float higher or lower; "
        f"densities {list(DENSITIES)}",
        "bytes": "blocks with heads and checksums; COO is int32 and the element, without either",
        "entropy_per_changed": "of positions at random, and of the differences, in the first case; "
        "_smaller, of the same, may fall below, since it uses the base",
        "speed": "CPU time of one thread, checksums included, alternating with a copy by numpy; "
        f"medians of {plan.rounds}",
    }
