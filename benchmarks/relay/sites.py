"""Weights between two sites: the gain of each of ROSE's steps (§6.3, Fig. 10), and
RollArt's Table 4.

The first relay reads the trainer's memory; two more are at the other site, behind a
link of limited speed. The variants in `VARIANTS` build on one another: `batch` passes a
version to the next relay once the one before has all of it; `async` sends pieces along
the chain as they arrive; `sparse` sends deltas.
"""

import itertools
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.contract import Figure
from benchmarks.delta_payloads import Versions
from benchmarks.harness import Progress
from benchmarks.network import Network
from benchmarks.relay.tier import Tier, chain
from rollweave.core.policy.relay import chunk_bytes
from rollweave.runtime.supervisors.relays import CHUNK_S
from rollweave.schema.weights import WeightManifest
from rollweave.weights.delta_body import Array
from rollweave.weights.publication import Publication, publish

VARIANTS = ("batch", "async", "sparse")

FAR = 2
"""Number of relays at the other site."""

FAST_MBITS = 1000.0
"""Speed of the link of each host: what this machine's cores can move."""


@dataclass(frozen=True, kw_only=True)
class SitesPlan:
    """Extent of the measurement: `elements` weights over links of these speeds,
    of which gains are at the `reference`.
    """

    elements: int
    rates: tuple[float, ...]
    reference: float
    rounds: int


@dataclass(frozen=True)
class Pair:
    """A version and its predecessor, in memory of this machine."""

    base: WeightManifest
    new: WeightManifest


@dataclass(frozen=True)
class Delivery:
    """Seconds until all relays of the other site have a version, those until the first
    of them does, and the bytes that this one has received over the link.
    """

    seconds: float
    first_s: float
    crossed_bytes: int

    @property
    def rest_s(self) -> float:
        """Return the seconds from the arrival at the first relay to the last one's."""
        return self.seconds - self.first_s


class Sites:
    """The relays of both sites on their hosts."""

    def __init__(self, network: Network, relays: Tier) -> None:
        self._network, self._relays = network, relays
        self._speed = 0.0

    def slow(self, mbits: float) -> None:
        """Limit the link between the sites. Does nothing on loopback."""
        if not self._network.why_not and self._speed != mbits:
            self._network.limit(FAST_MBITS)
            self._network.limit_sites(mbits)
            self._speed = mbits

    async def run(self, variant: str, pair: Pair, mbits: float) -> Delivery:
        """Transfer one version by one variant over a link of this speed."""
        base_id = None
        if variant == "sparse":
            base = self._relays.version(pair.base)
            base_id = base.publication_id
            await self._send(base, None, mbits, together=True)
        self.slow(mbits)
        new = self._relays.version(pair.new)
        return await self._send(new, base_id, mbits, together=variant != "batch")

    async def _send(
        self, manifest: WeightManifest, base_id: int | None, mbits: float, *, together: bool
    ) -> Delivery:
        """Send a version along the chain."""
        chunk = chunk_bytes(manifest.nbytes, nodes=1 + FAR, start_s=CHUNK_S, byte_s=8e-6 / mbits)
        answers = await self._relays.deliver(
            manifest, chain(1 + FAR), chunk_bytes=chunk, base_id=base_id, together=together
        )
        return Delivery(max(seconds for seconds, _ in answers), answers[1][0], answers[1][1].nbytes)


async def ablation(
    sites: Sites, update: Versions, plan: SitesPlan, directory: Path, progress: Progress
) -> dict[tuple[float, str], list[Delivery]]:
    """Measure each variant over each speed, in turn."""
    deliveries: dict[tuple[float, str], list[Delivery]] = {}
    with pair_of(update, directory) as pair:
        for number in range(plan.rounds):
            for rate in plan.rates:
                progress(
                    f"weights between sites at {rate:g} Mbit/s, round {number + 1} of {plan.rounds}"
                )
                for variant in VARIANTS:
                    deliveries.setdefault((rate, variant), []).append(
                        await sites.run(variant, pair, rate)
                    )
    return deliveries


@contextmanager
def pair_of(versions: Versions, directory: Path) -> Iterator[Pair]:
    """Publish both versions in memory of this machine."""
    with published(versions.base, directory) as base, published(versions.new, directory) as new:
        yield Pair(base.manifest, new.manifest)


def published(bits: Array, directory: Path) -> Publication:
    """Publish these elements of bfloat16 in memory."""
    tensor = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    return publish({"weights": tensor}, version=1, publication_id=1)


def figures(
    deliveries: dict[tuple[float, str], list[Delivery]], plan: SitesPlan
) -> dict[str, Figure]:
    """Return figures. A gain is that of a variant over the one before it, at the
    reference speed; `pull_hidden` is the part of the pull that the push alone hides.
    """
    seconds = {
        key: statistics.median(run.seconds for run in runs) for key, runs in deliveries.items()
    }
    at = {variant: seconds[plan.reference, variant] for variant in VARIANTS}
    overlapping = deliveries[plan.reference, "async"]
    pull = statistics.median(run.rest_s for run in deliveries[plan.reference, "batch"])
    exposed = statistics.median(run.rest_s for run in overlapping)
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
        "push_s": statistics.median(run.first_s for run in overlapping),
        "accumulated_pull_s": pull,
        "exposed_pull_s": exposed,
        "naive_s": at["batch"],
        "pull_hidden": 1 - exposed / pull if pull else None,
        "sparse_over_whole_bytes": deliveries[plan.reference, "sparse"][0].crossed_bytes
        / overlapping[0].crossed_bytes,
        "curve_mbits": list(plan.rates),
        **curves,
        "curve_sparse_over_async": [
            seconds[rate, "sparse"] / seconds[rate, "async"] for rate in plan.rates
        ],
    }
