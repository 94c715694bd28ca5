"""A remote store over links of many speeds: ROSE's Figure 10, the point at which deltas
stop paying off, and RollArt's Table 4.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contract import Figure
from benchmarks.delta import STD, Versions, bfloat16
from benchmarks.relay.store import VARIANTS, Clusters, Delivery, Pair, layers, model_of, published
from rollweave.weights.delta_body import Array

Progress = Callable[[str], None]

FAST_MBITS = 1000.0
"""Speed of the store's link and of those of the engines' hosts: what this machine's
cores can move.
"""

FRACTIONS = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Fractions of the elements that differ in the next version."""


@dataclass(frozen=True, kw_only=True)
class LinksPlan:
    """Extent of the measurement. `crossed` are the speeds at which growing deltas are
    sent.
    """

    hidden: int
    rates: tuple[float, ...]
    reference: float
    crossed: tuple[float, ...]
    fractions: tuple[float, ...]
    rounds: int
    bucket_bytes: int


async def ablation(
    clusters: Clusters, update: Versions, plan: LinksPlan, directory: Path, progress: Progress
) -> dict[tuple[float, str], list[Delivery]]:
    """Measure each variant over each speed, in turn."""
    deliveries: dict[tuple[float, str], list[Delivery]] = {}
    with _pair(update, plan.hidden, directory) as pair:
        for number in range(plan.rounds):
            for rate in plan.rates:
                progress(
                    f"weights between clusters at {rate:g} Mbit/s, round {number + 1} of "
                    f"{plan.rounds}"
                )
                for variant in VARIANTS:
                    deliveries.setdefault((rate, variant), []).append(
                        await _run(clusters, variant, pair, plan, rate)
                    )
    return deliveries


async def growing(
    clusters: Clusters, plan: LinksPlan, directory: Path, progress: Progress
) -> dict[tuple[float, float], list[float]]:
    """Return the time of a delta over that of the full version, by speed and by the
    changed fraction, in turn.
    """
    ratios_measured: dict[tuple[float, float], list[float]] = {}
    rng = np.random.default_rng(0)
    count = sum(math.prod(shape) for shape in layers(plan.hidden, 1).values())
    for fraction in plan.fractions:
        progress(f"{fraction:.1%} changed")
        with _pair(redrawn(rng, count, fraction), plan.hidden, directory) as pair:
            for rate in plan.crossed:
                for _ in range(plan.rounds):
                    full = await _run(clusters, "shard", pair, plan, rate)
                    sparse = await _run(clusters, "sparse", pair, plan, rate)
                    ratios_measured.setdefault((rate, fraction), []).append(
                        sparse.seconds / full.seconds
                    )
    return ratios_measured


async def _run(
    clusters: Clusters, variant: str, pair: Pair, plan: LinksPlan, rate: float
) -> Delivery:
    clusters.slow(rate, FAST_MBITS)
    if variant == "sparse":
        await clusters.prepare(pair, bucket_bytes=plan.bucket_bytes)
    return await clusters.run(
        variant, pair, model_of(pair.new, plan.hidden), bucket_bytes=plan.bucket_bytes
    )


@contextmanager
def _pair(versions: Versions, hidden: int, directory: Path) -> Iterator[Pair]:
    shapes = layers(hidden, 1)
    with (
        published(versions.base, shapes, directory) as base,
        published(versions.new, shapes, directory) as new,
    ):
        yield Pair(base.manifest, new.manifest)


def redrawn(rng: np.random.Generator, count: int, fraction: float) -> Versions:
    """Return bfloat16 in which so many random elements are drawn anew: their
    differences are as hard to compress as possible.
    """
    base, other = (
        bfloat16(rng.standard_normal(count, np.float32) * np.float32(STD)) for _ in range(2)
    )
    where = rng.random(count, np.float32) < fraction
    new: Array = np.where(where, other, base)
    return Versions(base, new)


def crossing(fractions: Sequence[float], ratios: Sequence[float]) -> float | None:
    """Return the first fraction at which the ratio is 1, interpolated between two
    measured ones by their logarithms, or None if it never is.
    """
    for number, ratio in enumerate(ratios):
        if ratio >= 1:
            if number == 0:
                return fractions[0]
            low, high = math.log(ratios[number - 1]), math.log(ratio)
            part = -low / (high - low)
            return math.exp(
                math.log(fractions[number - 1]) * (1 - part) + math.log(fractions[number]) * part
            )
    return None


def figures(
    deliveries: dict[tuple[float, str], list[Delivery]], plan: LinksPlan
) -> dict[str, Figure]:
    """Return figures. A gain is that of a variant over the one before it, at the
    reference speed; `pull_hidden` is the part that the push alone hides.
    """
    seconds = {
        key: statistics.median(run.seconds for run in runs) for key, runs in deliveries.items()
    }
    at = {variant: seconds[plan.reference, variant] for variant in VARIANTS}
    costs = [run.cost for run in deliveries[plan.reference, "async"] if run.cost is not None]
    naive = [run.cost for run in deliveries[plan.reference, "batch"] if run.cost is not None]
    pull, exposed = (
        statistics.median(getattr(cost, name) for cost in costs)
        for name in ("accumulated_pull_s", "exposed_pull_s")
    )
    gains = {
        f"gain_{variant}": at[before] / at[variant]
        for before, variant in itertools.pairwise(VARIANTS)
    }
    curves = {
        f"curve_{variant}_s": [seconds[rate, variant] for rate in plan.rates]
        for variant in VARIANTS
    }
    return {
        **gains,
        "gain_all": at["batch"] / at["sparse"],
        "ablation_s": list(at.values()),
        "push_s": statistics.median(cost.push_s for cost in costs),
        "accumulated_pull_s": pull,
        "exposed_pull_s": exposed,
        "naive_s": statistics.median(cost.naive_s for cost in naive),
        "pull_hidden": 1 - exposed / pull if pull else None,
        "sparse_over_whole_bytes": deliveries[plan.reference, "sparse"][0].sent_bytes
        / deliveries[plan.reference, "shard"][0].sent_bytes,
        "mismatches": sum(run.mismatches for runs in deliveries.values() for run in runs),
        "curve_mbits": list(plan.rates),
        **curves,
        "curve_sparse_over_shard": [
            seconds[rate, "sparse"] / seconds[rate, "shard"] for rate in plan.rates
        ],
    }


def growing_figures(
    ratios_measured: dict[tuple[float, float], list[float]], plan: LinksPlan
) -> tuple[dict[str, Figure], dict[str, Any]]:
    """Return the crossings, and the reasons for those that are missing."""
    shown: dict[str, Figure] = {"curve_fractions": list(plan.fractions)}
    why: dict[str, Any] = {}
    for rate in plan.crossed:
        ratios = [statistics.median(ratios_measured[rate, fraction]) for fraction in plan.fractions]
        name = f"crossover_{rate:g}_mbits"
        shown[name] = crossing(plan.fractions, ratios)
        shown[f"curve_sparse_over_whole_{rate:g}_mbits"] = ratios
        if shown[name] is None:
            why[name] = f"deltas are faster up to {plan.fractions[-1]:.0%} changed"
    return shown, why
