"""Bench `relay`: broadcasts of new weights to many hosts, in full or as deltas, and
their repair.

Hosts are network namespaces of this machine. `tc` limits the speed of their links, so
that the bench measures links and not cores. Relays and gloo's ranks are processes on
these hosts (Laminar §4, App. C; ROSE §6.3; RollArt §7.4).
"""

import asyncio
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.contract import Figure, Result
from benchmarks.delta_payloads import masked
from benchmarks.harness import Progress, rounded, scratch_folder
from benchmarks.network import Network
from benchmarks.relay import broadcast as relay_broadcast
from benchmarks.relay import repair as relay_repair
from benchmarks.relay import sites as relay_sites
from benchmarks.relay.gloo import Gloo
from benchmarks.relay.tier import tier
from rollweave.schema.weights import WeightManifest
from rollweave.weights.publication import publish

TENSORS = 32
"""Number of tensors in the payload."""

CHANGED = 0.015
"""Share of the weights that an update between sites changes."""


@dataclass(frozen=True, kw_only=True)
class RelayPlan:
    """Extent of the bench: `nbytes` over links of `mbits` to each number of `relays`.
    The other fields are numbers of rounds.
    """

    relays: tuple[int, ...]
    mbits: float
    nbytes: int
    rounds: int
    fits: int
    repairs: int
    sites: relay_sites.SitesPlan


FULL = RelayPlan(
    relays=(2, 4, 8, 16),
    mbits=100.0,
    nbytes=8 << 20,
    rounds=5,
    fits=5,
    repairs=5,
    sites=relay_sites.SitesPlan(
        elements=1 << 22, rates=(10.0, 30.0, 100.0, 300.0, 1000.0), reference=100.0, rounds=5
    ),
)
QUICK = RelayPlan(
    relays=(2, 4),
    mbits=200.0,
    nbytes=4 << 20,
    rounds=3,
    fits=3,
    repairs=1,
    sites=relay_sites.SitesPlan(elements=1 << 21, rates=(30.0, 1000.0), reference=30.0, rounds=1),
)

FAULTS: dict[str, tuple[bool, relay_repair.Fault]] = {
    "repair": (False, "killed"),
    "repair_master": (True, "killed"),
    "repair_hang": (False, "hangs"),
    "repair_master_hang": (True, "hangs"),
    "repair_cut": (False, "cut"),
}
"""Prefix of figures → whether the master fails, or a relay in the middle, and how."""

ON_LINKS = ("repair_cut_s", "gain_all", "push_s", "accumulated_pull_s", "exposed_pull_s", "naive_s")
"""Figures that loopback does not have."""


def bench_relay(
    *,
    quick: bool,
    progress: Progress,
    plan: RelayPlan | None = None,
    network: Network | None = None,
) -> Result:
    """Run the bench. Only tests pass `plan` and `network`."""
    plan = plan or (QUICK if quick else FULL)
    far = relay_sites.FAR
    with scratch_folder() as logs, network or Network(max(*plan.relays, 1 + far), far=far) as net:
        return asyncio.run(_measure(plan, net, logs, progress))


async def _measure(plan: RelayPlan, net: Network, logs: Path, progress: Progress) -> Result:
    conditions = _conditions(plan, net)
    if not net.why_not:
        net.limit(plan.mbits)
    figures: dict[str, Figure] = {}
    with publish(payload(plan.nbytes, TENSORS), version=1, publication_id=1) as publication:
        figures |= await _broadcasts(plan, net, logs, publication.manifest, progress)
        figures |= await _repairs(plan, net, logs, publication.manifest, progress)
    if net.why_not:
        figures |= dict.fromkeys(ON_LINKS)
        conditions |= dict.fromkeys(ON_LINKS, net.why_not)
    else:
        figures |= await _sites(plan.sites, net, logs, progress)
    if figures["link_mb_per_s"] is None:
        unknown = ("link_mb_per_s", "time_over_formula", "curve_time_over_formula")
        conditions |= dict.fromkeys(
            unknown,
            "a larger version took no longer from one relay to the next: cores are the "
            "bottleneck, not a link",
        )
    shown = {name: rounded(value) for name, value in figures.items()}
    return Result(bench="relay", figures=shown, conditions=conditions)


async def _broadcasts(
    plan: RelayPlan, net: Network, logs: Path, manifest: WeightManifest, progress: Progress
) -> dict[str, Figure]:
    """Measure a link, and broadcasts to each number of relays."""
    largest = max(plan.relays)
    gloo = Gloo(net, plan.relays, logs, hosts=largest)
    progress(f"{largest} relays and as many ranks of gloo start")
    try:
        async with tier(net, range(largest), logs) as relays:
            await gloo.ready()
            small = publish(payload(plan.nbytes // 4, TENSORS), version=1, publication_id=1)
            async with tier(net, range(2), logs) as others:
                with small:
                    both = [(others, small.manifest), (relays, manifest)]
                    link = await relay_broadcast.measure_link(both, plan.fits)
            times = await relay_broadcast.measure(
                relays,
                gloo,
                manifest,
                link,
                relays=plan.relays,
                rounds=plan.rounds,
                progress=progress,
            )
            return relay_broadcast.figures(times, link)
    finally:
        await gloo.close()


async def _repairs(
    plan: RelayPlan, net: Network, logs: Path, manifest: WeightManifest, progress: Progress
) -> dict[str, Figure]:
    """Kill and suspend a relay in the middle and the master, and cut off one in the
    middle.
    """
    relays = _repaired(plan)
    figures: dict[str, Figure] = {}
    repeated = 0
    for name, (master, fault) in FAULTS.items():
        if fault == "cut" and net.why_not:
            continue
        repairs = []
        for number in range(plan.repairs):
            progress(f"{name.replace('_', ', ')}: {number + 1} of {plan.repairs}")
            victim = 0 if master else relays // 2
            repairs.append(
                await relay_repair.repaired(
                    net, manifest, logs, relays=relays, victim=victim, fault=fault
                )
            )
        figures[f"{name}_s"] = statistics.median(one.repair_s for one in repairs)
        figures[f"{name}_worst_s"] = max(one.repair_s for one in repairs)
        figures[f"{name}_known_s"] = statistics.median(one.known_s for one in repairs)
        figures[f"{name}_whole_s"] = statistics.median(one.complete_s for one in repairs)
        repeated += sum(one.repeated_bytes for one in repairs)
    return figures | {"repair_repeated_bytes": repeated}


async def _sites(
    plan: relay_sites.SitesPlan, net: Network, logs: Path, progress: Progress
) -> dict[str, Figure]:
    progress(f"an update that changes {CHANGED:.1%} of {plan.elements:,} weights")
    update = masked(np.random.default_rng(0), plan.elements, CHANGED)
    far = range(net.hosts - relay_sites.FAR, net.hosts)
    async with tier(net, (0, *far), logs) as relays:
        sites = relay_sites.Sites(net, relays)
        runs = await relay_sites.ablation(sites, update, plan, logs, progress)
    changed = float(np.mean(update.base != update.new))
    return relay_sites.figures(runs, plan) | {"update_changed": changed}


def payload(nbytes: int, tensors: int) -> dict[str, torch.Tensor]:
    """Return bfloat16 tensors of the given total size."""
    generator = torch.Generator().manual_seed(0)
    count = nbytes // (2 * tensors)
    return {
        f"w{number}": torch.randn(count, generator=generator).to(torch.bfloat16)
        for number in range(tensors)
    }


def _repaired(plan: RelayPlan) -> int:
    """Return the number of relays in the chain that is repaired: enough that a relay in
    the middle has a successor.
    """
    return max(3, min(8, max(plan.relays)))


def _conditions(plan: RelayPlan, net: Network) -> dict[str, Any]:
    return {
        "hosts": net.why_not
        or "network namespaces on one machine, joined by a bridge; tc tbf limits each host's link "
        f"to {plan.mbits:g} Mbit/s up and down, unless noted",
        "broadcast": f"{plan.nbytes >> 20} MiB of bfloat16 in {TENSORS} tensors, requested of all "
        f"{list(plan.relays)} relays at once, until the last has verified it; chain, star and gloo "
        f"in turn, medians of {plan.rounds}",
        "time_over_formula": "maximum over the numbers of relays; T_start and T_byte from versions "
        f"of two sizes in {list(relay_broadcast.FIT_CHUNKS)} chunks over one hop, same run",
        "repair": f"chain of {_repaired(plan)}; the fault is inflicted when the successor has "
        f"{relay_repair.PART:.0%}; until its second chunk after the new source was named; `known`: "
        "until the controller knew",
        "sites": "the first relay reads the trainer's memory, 2 more are behind a link of limited "
        f"speed; {plan.sites.elements:,} bfloat16 weights, of which {CHANGED:.1%} change; gains at "
        f"{plan.sites.reference:g} Mbit/s",
        "push_s": "Table 4 of RollArt: until the first relay behind the link has the version; "
        "exposed_pull_s: from then on until the other one has it; accumulated_pull_s: the same in "
        "batch, whose total is naive_s",
    }
