"""Bench `lora`: steps that adapters of several ranks need to learn the fixed lake, and
the bytes of a published version, beside training all weights.

Each run is that of the bench `losses`. The model is made by the same warm-up of all
weights; with adapters, it stays as it is from then on.
"""

import json
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.contract import Figure, Result
from benchmarks.losses import COMMON, CONFIG, QUICK, SEEDS, TARGET, described, figures_of
from benchmarks.runs import MeasuredRun, conditions_of, example, interleaved
from rollweave.record.rundir import RunDir

LR = "trainer.lr=1e-2"
"""Learning rate of adapters: three times that of all weights."""

VARIANTS: Mapping[str, tuple[str, ...]] = {
    "full": (),
    "rank_16": ("lora.rank=16", LR),
    "rank_4": ("lora.rank=4", "lora.alpha=8.0", LR),
    "rank_1": ("lora.rank=1", "lora.alpha=2.0", LR),
}
"""Variant → its settings."""

QUICK_VARIANTS = ("full", "rank_4")


def bench_lora(*, seeds: int | None, quick: bool, progress: Callable[[str], None]) -> Result:
    """Return the figures of the bench `losses` by variant, and the median
    `published_bytes_…` of a version.
    """
    path = example(CONFIG)
    chosen = {name: VARIANTS[name] for name in QUICK_VARIANTS} if quick else VARIANTS
    overrides = (*COMMON, *QUICK) if quick else COMMON
    count = seeds if seeds is not None else 1 if quick else SEEDS
    runs: dict[str, list[MeasuredRun]] = {name: [] for name in chosen}
    published: dict[str, list[int]] = {name: [] for name in chosen}
    for name, seed, run, measured in interleaved(path, overrides, chosen, range(count)):
        published[name] += published_bytes(run)
        runs[name].append(measured)
        progress(f"seed {seed}, {name}: {described(measured)}")
    conditions: dict[str, Any] = conditions_of(path, overrides) | {
        "seeds": list(range(count)),
        "variants": {name: list(settings) for name, settings in chosen.items()},
        "target_success": TARGET,
    }
    figures: dict[str, Figure] = {}
    for name, measured_runs in runs.items():
        figures |= figures_of(name, measured_runs, conditions, quick=quick)
        figures[f"published_bytes_{name}"] = statistics.median(published[name])
    return Result(bench="lora", figures=figures, conditions=conditions)


def published_bytes(run: RunDir) -> list[int]:
    """Return the bytes of each version that a run has published, from its trace."""
    lines = [line.rstrip().rstrip(",") for line in run.trace.read_text().splitlines()]
    events = [json.loads(line) for line in lines if '"publish v' in line]
    return [event["args"]["nbytes"] for event in events]
