"""Bench `weights`: an update of real engines by each way in which weights reach them,
in turn: the trainer's memory, a chain of two relays over TCP, the trainer's channel
alone, and a broadcast in a collective group.

The trainer is this process, with the production publication and sender; engines and
relays are processes of a run. All are on this machine, so that "between hosts" is its
loopback interface.
"""

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import torch

from benchmarks.contract import Figure, Result
from benchmarks.harness import Progress, load_average, rounded, scratch_folder
from benchmarks.memory import MODELS, save_llama
from benchmarks.relay.tier import Tier, chain
from rollweave.engine.clients.client import EngineClient, in_process
from rollweave.io.child import child_of
from rollweave.runtime.hosts.hosts import hosts_here
from rollweave.runtime.supervisors.relays import RelayLink
from rollweave.schema.base import EngineId
from rollweave.schema.hosts import Program, Share
from rollweave.schema.serving import EngineSpec
from rollweave.schema.weights import RelaySpec, WeightManifest
from rollweave.weights.checkpoint import read_tensors_of
from rollweave.weights.publication import publish
from rollweave_collective.sender import Sender

ENGINES = 2
WAYS = ("memory", "tcp", "collective", "channel")
"""Names of the ways; the trainer's channel is what a broadcast falls back to."""

PATIENCE_S = 600.0
"""Maximum seconds of a start, and of one transfer."""

CHUNK_BYTES = 4 << 20
"""Bytes of a piece between the relays."""


def bench_weights(*, quick: bool, progress: Progress) -> Result:
    """Return, for each way, the medians of the seconds until all engines have a version
    beside the one that they serve, verified, and of the milliseconds for which an
    engine then stops.
    """
    size, rounds = ("7M", 2) if quick else ("135M", 5)
    with scratch_folder() as folder:
        model = folder / "model"
        save_llama(model, MODELS[size])
        times = asyncio.run(_measure(model, folder, rounds, progress))
    figures: dict[str, Figure] = {}
    for way in WAYS:
        ready, stops = zip(*times[way], strict=True)
        figures[f"ready_s/{way}"] = rounded(statistics.median(ready))
        figures[f"ready_worst_s/{way}"] = rounded(max(ready))
        figures[f"stop_ms/{way}"] = rounded(1e3 * statistics.median(stops))
    conditions = {
        "ready_s": f"from the published version until {ENGINES} engines have it, verified, while "
        f"they serve; {size} parameters in float32, medians of {rounds} rounds, ways in turn",
        "stop_ms": "from suspend to resume, the slower engine, nothing in flight",
        "tcp": "two relays, the second over TCP from the first; engines read its memory",
        "channel": "each engine receives all bytes from the trainer: an engine's first version",
        "load": load_average(),
    }
    return Result(bench="weights", figures=figures, conditions=conditions)


async def _measure(
    model: Path, folder: Path, rounds: int, progress: Progress
) -> dict[str, list[tuple[float, float]]]:
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    sender = Sender("127.0.0.1", torch.device("cpu"))
    tensors = dict(read_tensors_of(model))
    with contextlib.closing(sender), publish(tensors, version=0, publication_id=0) as publication:
        del tensors
        async with _engines(model, folder) as engines, _relays(folder) as relays:
            manifest, number, ways = publication.manifest, 0, _ways(sender, relays)
            for round in range(-1, rounds):  # the first one only warms up
                progress(f"round {round + 1} of {rounds}")
                for way in WAYS:
                    number += 1
                    fresh = msgspec.structs.replace(manifest, version=number, publication_id=number)
                    seconds = await _update(engines, ways[way], fresh)
                    if round >= 0:
                        times[way].append(seconds)
    return times


Way = Callable[[WeightManifest], Awaitable[WeightManifest]]
"""Brings a version to where engines read it, and returns their manifest."""


def _ways(sender: Sender, relays: Tier) -> dict[str, Way]:
    last: list[WeightManifest] = []

    async def memory(manifest: WeightManifest) -> WeightManifest:
        return manifest

    async def tcp(manifest: WeightManifest) -> WeightManifest:
        arrivals = await relays.deliver(manifest, chain(2), chunk_bytes=CHUNK_BYTES)
        return arrivals[-1][1].manifest

    async def collective(manifest: WeightManifest) -> WeightManifest:
        sender.keep(())
        last[:] = [sender.offer(manifest)]
        return last[0]

    async def channel(manifest: WeightManifest) -> WeightManifest:
        return last[-1]  # its broadcast is over

    return {"memory": memory, "tcp": tcp, "collective": collective, "channel": channel}


async def _update(
    engines: list[EngineClient], way: Way, manifest: WeightManifest
) -> tuple[float, float]:
    """Return the seconds until all engines have staged a version, and those for which
    the slower one then stops.
    """
    started = time.monotonic()
    there = await way(manifest)
    await asyncio.gather(*(engine.stage(there) for engine in engines))
    ready_s = time.monotonic() - started

    async def swap(engine: EngineClient) -> float:
        before = time.monotonic()
        await engine.suspend()
        await engine.load(there)
        engine.resume()
        return time.monotonic() - before

    return ready_s, max([await swap(engine) for engine in engines])


@contextlib.asynccontextmanager
async def _engines(model: Path, folder: Path) -> AsyncIterator[list[EngineClient]]:
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    ready.set_result(None)
    engines: list[EngineClient] = []
    try:
        for number in range(ENGINES):
            spec = EngineSpec(
                id=EngineId(f"e{number}"),
                model=str(model),
                device="cpu",
                threads=1,
                max_slots=4,
                kv_tokens=1024,
            )
            spawn = child_of("rollweave.runtime.entrypoints.engine", env={"OMP_NUM_THREADS": "1"})
            link = in_process(spec, spawn=spawn, log=folder / f"{spec.id}.log", model_ready=ready)
            engines.append(EngineClient(spec.id, link, start_s=PATIENCE_S, reply_s=PATIENCE_S))
        await asyncio.gather(*(engine.ready() for engine in engines))
        yield engines
    finally:
        await asyncio.gather(*(engine.close() for engine in engines))


@contextlib.asynccontextmanager
async def _relays(folder: Path) -> AsyncIterator[Tier]:
    links: list[RelayLink] = []
    silent = [asyncio.Event(), asyncio.Event()]
    try:
        for number in range(2):
            spec = RelaySpec(id=f"r{number}")
            spawn = hosts_here(0).host(0).starting(Program.RELAY, Share())
            log = folder / f"{spec.id}.log"
            ignored: Callable[[object], None] = lambda message: None  # noqa: E731
            links.append(RelayLink(spec, ignored, ignored, spawn=spawn, log=log))
        ready = [await link.ready() for link in links]
        yield Tier(links, [reply.address for reply in ready], silent, silent)
    finally:
        await asyncio.gather(*(link.close() for link in links))
