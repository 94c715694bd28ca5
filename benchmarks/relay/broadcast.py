"""Duration of a broadcast along a chain of relays (Laminar §4.2, App. C), beside the
formula, one sender for all, and gloo's broadcast.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.contract import Figure
from benchmarks.harness import Progress
from benchmarks.relay.gloo import Gloo
from benchmarks.relay.tier import Tier, chain, star
from rollweave.core.policy.relay import broadcast_s, chunk_bytes
from rollweave.schema.weights import WeightManifest

FIT_CHUNKS = (4, 64)
"""Numbers of chunks of the versions for the fit: few, and many."""

Sample = tuple[int, int, float]
"""Bytes, chunks, and the seconds from one relay to the next."""


@dataclass(frozen=True)
class Link:
    """Cost of one hop: `start_s` for each chunk, `byte_s` for each byte (T_start and
    T_byte of App. C), and `fixed_s` for the broadcast itself.
    """

    start_s: float
    byte_s: float
    fixed_s: float


def fit(samples: Sequence[Sample]) -> Link:
    """Fit a link to samples of two sizes, each in two counts of chunks, repeated any
    number of times. Slopes are those between medians, and at least 0.

    Raises ValueError for other samples.
    """
    sizes, counts = (
        sorted({nbytes for nbytes, _, _ in samples}),
        sorted({chunks for _, chunks, _ in samples}),
    )
    if len(sizes) != 2 or len(counts) != 2:
        raise ValueError(
            f"samples must be of two sizes in two counts of chunks, got {sizes} and {counts}"
        )
    (small, large), (few, many) = sizes, counts
    mid = {
        (nbytes, chunks): statistics.median(s for n, k, s in samples if (n, k) == (nbytes, chunks))
        for nbytes in sizes
        for chunks in counts
    }
    start = statistics.mean(mid[nbytes, many] - mid[nbytes, few] for nbytes in sizes) / (many - few)
    byte = statistics.mean(mid[large, chunks] - mid[small, chunks] for chunks in counts) / (
        large - small
    )
    start, byte = max(0.0, start), max(0.0, byte)
    fixed = statistics.mean(
        seconds - nbytes * byte - chunks * start for (nbytes, chunks), seconds in mid.items()
    )
    return Link(start_s=start, byte_s=byte, fixed_s=max(0.0, fixed))


async def measure_link(versions: Sequence[tuple[Tier, WeightManifest]], rounds: int) -> Link:
    """Measure the link between the first two relays from versions of two sizes. Each
    size has its own relays, since a relay serves a single model.
    """
    samples = []
    for _ in range(rounds):
        for tier, manifest in versions:
            for chunks in FIT_CHUNKS:
                size = -(-manifest.nbytes // chunks)
                seconds = await tier.broadcast(tier.version(manifest), chain(2), chunk_bytes=size)
                samples.append((manifest.nbytes, chunks, seconds))
    return fit(samples)


@dataclass(frozen=True)
class Times:
    """Seconds by number of relays."""

    nbytes: int
    chain: dict[int, list[float]] = field(default_factory=dict)
    star: dict[int, list[float]] = field(default_factory=dict)
    gloo: dict[int, list[float]] = field(default_factory=dict)
    chunks: dict[int, int] = field(default_factory=dict)
    cpu_s: dict[int, list[float]] = field(default_factory=dict)
    """CPU seconds of all relays together during a chain's broadcast."""


async def measure(
    tier: Tier,
    gloo: Gloo,
    manifest: WeightManifest,
    link: Link,
    *,
    relays: Sequence[int],
    rounds: int,
    progress: Progress,
) -> Times:
    """Measure each kind of broadcast in turn, for each number of relays."""
    times = Times(manifest.nbytes)
    for number in range(rounds):
        progress(f"broadcasts, round {number + 1} of {rounds}")
        for nodes in relays:
            size = chunk_bytes(
                manifest.nbytes, nodes=nodes, start_s=link.start_s, byte_s=link.byte_s
            )
            times.chunks[nodes] = -(-manifest.nbytes // size)
            before = tier.cpu_s()
            seconds = await tier.broadcast(tier.version(manifest), chain(nodes), chunk_bytes=size)
            times.cpu_s.setdefault(nodes, []).append(tier.cpu_s() - before)
            times.chain.setdefault(nodes, []).append(seconds)
            seconds = await tier.broadcast(tier.version(manifest), star(nodes), chunk_bytes=size)
            times.star.setdefault(nodes, []).append(seconds)
            seconds = await gloo.broadcast(nodes, manifest.nbytes)
            times.gloo.setdefault(nodes, []).append(seconds)
    return times


def figures(times: Times, link: Link) -> dict[str, Figure]:
    """Return figures: `time_over_formula` is the maximum over the numbers of relays,
    the other two ratios are those of the largest number.
    """
    chained, starred, glooed = _medians(times.chain), _medians(times.star), _medians(times.gloo)
    over_formula: dict[int, float] = {}
    if link.byte_s:  # else a larger version took no longer: there is no link to compare with
        for nodes, seconds in chained.items():
            chunks = times.chunks[nodes]
            expected = broadcast_s(
                times.nbytes, nodes=nodes, chunks=chunks, start_s=link.start_s, byte_s=link.byte_s
            )
            over_formula[nodes] = seconds / expected
    over_star = {nodes: seconds / starred[nodes] for nodes, seconds in chained.items()}
    over_gloo = {nodes: seconds / glooed[nodes] for nodes, seconds in chained.items()}
    largest = max(chained)
    return {
        "time_over_formula": max(over_formula.values(), default=None),
        "time_over_gloo": over_gloo[largest],
        "time_over_star": over_star[largest],
        "link_start_ms": link.start_s * 1e3,
        "link_mb_per_s": 1e-6 / link.byte_s if link.byte_s else None,
        "link_fixed_ms": link.fixed_s * 1e3,
        "curve_relays": [float(nodes) for nodes in chained],
        "curve_broadcast_s": list(chained.values()),
        "curve_chain_cores": [
            sum(times.cpu_s[nodes]) / sum(times.chain[nodes]) for nodes in chained
        ],
        "curve_time_over_formula": list(over_formula.values()) or None,
        "curve_time_over_star": list(over_star.values()),
        "curve_time_over_gloo": list(over_gloo.values()),
    }


def _medians(times: Mapping[int, Sequence[float]]) -> dict[int, float]:
    return {nodes: statistics.median(seconds) for nodes, seconds in sorted(times.items())}
