"""Measure how long a chain stalls when one of its relays dies, hangs or loses its link
during a broadcast (Laminar §4.3).
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.network import Network
from benchmarks.relay.tier import Tier, chain, checked, tier
from rollweave.core.policy.relay import LEAST_CHUNK_BYTES
from rollweave.schema.errors import WeightsError
from rollweave.schema.weights import (
    FetchReply,
    FetchVersion,
    RelayAddress,
    WeightManifest,
)
from rollweave.weights.tcp import transport_of
from rollweave.weights.transport import Raw, RawRanges, Request

Fault = Literal["killed", "hangs", "cut"]

CHUNK_BYTES = LEAST_CHUNK_BYTES
"""Size of a chunk, as the controller chooses it on links like these."""

PART = 0.4
"""Share of the version that the successor has when its source fails."""

PATIENCE_S = 60.0
"""Maximum seconds for any single wait of this module."""


@dataclass(frozen=True)
class Repaired:
    """Seconds from the failure until the controller knew of it, until the successor had
    a chunk from its new source, and until all relays had the version. `repeated_bytes`
    were received twice.
    """

    known_s: float
    repair_s: float
    complete_s: float
    repeated_bytes: int


@dataclass
class Arrivals:
    """Times at which a relay received each chunk."""

    times: list[float] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def reach(self, count: int) -> float:
        """Return the time at which it had so many chunks. Raises WeightsError."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while len(self.times) < count:
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            raise WeightsError(
                f"a relay had {len(self.times)} chunks after {PATIENCE_S:g} s, not {count}"
            ) from None
        return self.times[count - 1]


async def watch(address: RelayAddress, manifest: WeightManifest, arrivals: Arrivals) -> None:
    """Ask a relay for the first byte of each chunk, which it serves as soon as it has
    the chunk.
    """
    channel = await transport_of("tcp", host="").connect(address)
    try:
        ranges = tuple((start, start + 1) for start in range(0, manifest.nbytes, CHUNK_BYTES))
        await channel.send(
            Request(
                publication_id=manifest.publication_id,
                digest=manifest.digest,
                nbytes=manifest.nbytes,
                ranges=ranges,
            )
        )
        while len(arrivals.times) < len(ranges):
            message, _ = await channel.receive(lambda _, nbytes: memoryview(bytearray(nbytes)))
            if isinstance(message, Raw | RawRanges):
                count = len(message.ranges) if isinstance(message, RawRanges) else 1
                arrivals.times += [time.monotonic()] * count
                arrivals.changed.set()
    finally:
        channel.close()


async def repaired(
    network: Network,
    manifest: WeightManifest,
    logs: Path,
    *,
    relays: int,
    victim: int,
    fault: Fault = "killed",
) -> Repaired:
    """Start a chain, and inflict the fault on relay `victim` once its successor has a
    part of the version.

    Raises WeightsError.
    """
    async with tier(network, range(relays), logs) as running:
        version, arrivals = running.version(manifest), Arrivals()
        watching = asyncio.create_task(watch(running.addresses[victim + 1], version, arrivals))
        try:
            return await _repaired(
                running,
                version,
                arrivals,
                victim=victim,
                strike=lambda: strike(network, running, victim, fault),
            )
        except TimeoutError:
            raise WeightsError(
                f"a chain without relay r{victim} was not complete after {PATIENCE_S:g} s"
            ) from None
        finally:
            if fault == "cut":
                network.join(victim)
            elif fault == "hangs":
                with contextlib.suppress(ProcessLookupError):  # it was given up
                    os.kill(running.links[victim].pid, signal.SIGCONT)
            watching.cancel()
            await asyncio.wait([watching])


def strike(network: Network, running: Tier, victim: int, fault: Fault) -> None:
    if fault == "cut":
        network.cut(victim)
    else:
        os.kill(running.links[victim].pid, signal.SIGSTOP if fault == "hangs" else signal.SIGKILL)


async def _repaired(
    running: Tier,
    version: WeightManifest,
    arrivals: Arrivals,
    *,
    victim: int,
    strike: Callable[[], None],
) -> Repaired:
    order = [f"r{number}" for number in range(len(running.links))]
    successor = victim + 1

    def fetch(relay: int, source: int | None) -> "asyncio.Future[FetchReply | None]":
        return running.links[relay].fetch(
            FetchVersion(manifest=version, source=running.source(source), chunk_bytes=CHUNK_BYTES)
        )

    fetches = [fetch(relay, source) for relay, source in enumerate(chain(len(running.links)))]
    await arrivals.reach(max(1, int(PART * version.nbytes / CHUNK_BYTES)))
    failed_at = time.monotonic()
    running.stalled[successor].clear()  # earlier stalls do not count
    strike()
    async with asyncio.timeout(PATIENCE_S):
        suspicions = [
            asyncio.ensure_future(event.wait())
            for event in (running.suspected[victim], running.stalled[successor])
        ]
        signs: list[asyncio.Future[Any]] = [
            running.links[victim].lost,
            fetches[successor],
            *suspicions,
        ]
        await asyncio.wait(signs, return_when=asyncio.FIRST_COMPLETED)
        for suspicion in suspicions:
            suspicion.cancel()
    known = time.monotonic()
    source = victim - 1 if victim else None  # only its successor changes its source
    arrived = len(arrivals.times)
    fetches[successor] = fetch(successor, source)
    # The next chunk may still be one of the dead relay's; the second is
    # not. Where links are so fast that all have arrived already, the chain does not
    # stall after the controller knows.
    resumed = max(known, await arrivals.reach(min(arrived + 2, -(-version.nbytes // CHUNK_BYTES))))
    async with asyncio.timeout(PATIENCE_S):
        fetched = [
            checked(relay, await fetches[relay]) for relay in range(len(order)) if relay != victim
        ]
    complete = time.monotonic()
    # A relay that reads from memory receives nothing.
    repeated = sum(max(0, reply.nbytes - version.nbytes) for reply in fetched)
    return Repaired(known - failed_at, resumed - failed_at, complete - failed_at, repeated)
