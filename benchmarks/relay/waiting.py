"""Measure how long engines wait for new weights (Laminar Fig. 14), and how long
publication holds up the trainer, while training continues.

With relays, an engine fetches weights when it wants them, from its host's memory: its
wait begins with its request, whether the version is on its host yet or still on the
chain, and ends with the load. With global synchronization all engines stop at each
publication until gloo has brought it to all of them. The wait for the slowest engine to
stop is not counted.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from benchmarks.contract import Figure
from benchmarks.relay.tier import Tier, chain, checked
from rollweave.schema.weights import FetchVersion, WeightManifest
from rollweave.weights.publication import Publication, publish, read_tensors

KEEP = 2
"""Number of publications that the trainer keeps, so that a running load can end."""


@dataclass
class Waits:
    """Seconds of each update of an engine; of the updates whose version was already on
    the host; of each publication.
    """

    engines: list[float] = field(default_factory=list)
    cached: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)


@dataclass
class _Measurement:
    """The trainer's tensors, its publications, and the versions of each relay."""

    tier: Tier
    tensors: dict[str, torch.Tensor]
    directory: Path
    pool: ThreadPoolExecutor
    waits: Waits = field(default_factory=Waits)
    newest: int = 0
    manifests: dict[int, WeightManifest] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def fetched(self, relay: int, version: int) -> bool:
        return relay in self.manifests and self.manifests[relay].publication_id >= version


async def waits(
    tier: Tier,
    tensors: dict[str, torch.Tensor],
    directory: Path,
    *,
    engines: int,
    chunk_bytes: int,
    publications: int,
    period_s: float,
) -> Waits:
    """Publish every `period_s`, while engine i loads from relay i at random moments.

    Raises WeightsError.
    """
    rng = random.Random(0)
    with ThreadPoolExecutor(engines + 1) as pool:
        run = _Measurement(tier, tensors, directory, pool)
        tasks = [
            asyncio.create_task(_engine(run, relay, period_s, random.Random(rng.random())))
            for relay in range(engines)
        ]
        tasks.append(asyncio.create_task(_train(run, engines, chunk_bytes, publications, period_s)))
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:  # the trainer's, unless one has failed
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
    return run.waits


async def _train(
    run: _Measurement, relays: int, chunk_bytes: int, publications: int, period_s: float
) -> None:
    loop = asyncio.get_running_loop()
    opened: list[Publication] = []
    try:
        for _ in range(publications):
            until = time.monotonic() + period_s
            publication, stall = await loop.run_in_executor(run.pool, _published, run)
            run.waits.stalls.append(stall)
            opened.append(publication)
            keep = (run.newest,) if run.newest else ()
            run.newest = publication.manifest.publication_id
            message = FetchVersion(
                manifest=publication.manifest, keep=keep, chunk_bytes=chunk_bytes
            )
            await asyncio.gather(
                *(_fetch(run, relay, message, source) for relay, source in enumerate(chain(relays)))
            )
            await asyncio.sleep(max(0.0, until - time.monotonic()))
            while len(opened) > KEEP:
                opened.pop(0).close()
    finally:
        for publication in opened:
            publication.close()


async def _fetch(run: _Measurement, relay: int, message: FetchVersion, source: int | None) -> None:
    answer = await run.tier.links[relay].fetch(
        msgspec.structs.replace(message, source=run.tier.source(source))
    )
    manifest = checked(relay, answer).manifest
    async with run.changed:
        run.manifests[relay] = manifest
        run.changed.notify_all()


async def _engine(run: _Measurement, relay: int, period_s: float, rng: random.Random) -> None:
    """At random moments, if there is a new version, wait until the host has it, and
    load it.
    """
    weights = {name: torch.zeros_like(tensor) for name, tensor in run.tensors.items()}
    loaded = 0
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(rng.uniform(0.5, 1.5) * period_s)
        wanted, requested_at = run.newest, time.monotonic()
        if wanted == loaded:
            continue
        cached = run.fetched(relay, wanted)
        async with run.changed:
            while not run.fetched(relay, wanted):
                await run.changed.wait()
            manifest = run.manifests[relay]
        await loop.run_in_executor(run.pool, _load, weights, manifest)
        loaded = manifest.publication_id
        seconds = time.monotonic() - requested_at
        run.waits.engines.append(seconds)
        if cached:
            run.waits.cached.append(seconds)


def _published(run: _Measurement) -> tuple[Publication, float]:
    """Publish the next version. Returns it and the seconds for which the trainer's
    thread was held up.
    """
    version = run.tier.next_id()
    began = time.monotonic()
    publication = publish(
        run.tensors, version=version, publication_id=version, directory=run.directory
    )
    return publication, time.monotonic() - began


def _load(weights: dict[str, torch.Tensor], manifest: WeightManifest) -> None:
    """Load as an engine does: verify everything, then put it in place."""
    for name, tensor in read_tensors(manifest).items():
        weights[name].copy_(tensor)


def payload(nbytes: int, tensors: int) -> dict[str, torch.Tensor]:
    """Return bfloat16 tensors of the given total size."""
    generator = torch.Generator().manual_seed(0)
    count = nbytes // (2 * tensors)
    return {
        f"w{number}": torch.randn(count, generator=generator).to(torch.bfloat16)
        for number in range(tensors)
    }


def figures(
    waits: Waits, global_waits: Sequence[float], chain_s: float, nbytes: int
) -> dict[str, Figure]:
    """Return figures; `global_waits` are those of a global synchronization,
    `chain_s` is the seconds of a broadcast by the chain.
    """
    load = statistics.median(waits.cached) if waits.cached else 0.0
    stall, sync = (
        statistics.median(waits.stalls),
        statistics.median(global_waits) if global_waits else None,
    )
    mean, best = statistics.mean(waits.engines), min(waits.engines)
    return {
        "wait_mean_s": mean,
        "wait_best_s": best,
        "wait_global_s": sync,
        "wait_mean_over_global": mean / statistics.mean(global_waits) if global_waits else None,
        "wait_best_over_global": best / min(global_waits) if global_waits else None,
        "wait_mean_over_chain_for_all": mean / (chain_s + load),
        "wait_updates": len(waits.engines),
        "wait_cached": len(waits.cached) / len(waits.engines),
        "trainer_stall_s": stall,
        "trainer_stall_worst_s": max(waits.stalls),
        "trainer_stall_over_send": stall / (stall + sync) if sync is not None else None,
        "trainer_stall_gb_per_s": nbytes / stall / 1e9,
    }
