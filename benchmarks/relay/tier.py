"""Relays on hosts of a `Network`, each a process as in a run, with a controller's
commands.

Invariants: relay `r<i>` is on host i; every broadcast is of a version that no relay
has; processes end with the context.
"""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec

from benchmarks.harness import cpu_s
from benchmarks.network import Network
from rollweave.runtime.hosts.hosts import hosts_here
from rollweave.runtime.supervisors.relays import RelayLink
from rollweave.schema.errors import WeightsError
from rollweave.schema.hosts import Program, Share
from rollweave.schema.weights import (
    FetchReply,
    FetchVersion,
    RelayAddress,
    RelaySpec,
    VersionFetched,
    VersionStalled,
    WeightManifest,
)


class Tier:
    """Relays on the first hosts."""

    def __init__(
        self,
        links: Sequence[RelayLink],
        addresses: Sequence[RelayAddress],
        suspected: Sequence[asyncio.Event],
        stalled: Sequence[asyncio.Event],
    ) -> None:
        """`suspected` events are set while a relay is suspected, `stalled` ones once
        its source has sent it nothing for a moment.
        """
        self.links, self.addresses = list(links), list(addresses)
        self.suspected, self.stalled = suspected, stalled
        self._last_id = 0

    def version(self, manifest: WeightManifest) -> WeightManifest:
        """Return the same bytes under an id that no relay has seen."""
        self._last_id += 1
        return msgspec.structs.replace(
            manifest, publication_id=self._last_id, version=self._last_id
        )

    def cpu_s(self) -> float:
        """Return the CPU seconds of all relays together."""
        return sum(cpu_s(link.pid) for link in self.links)

    def source(self, relay: int | None) -> RelayAddress | None:
        return None if relay is None else self.addresses[relay]

    async def broadcast(
        self, manifest: WeightManifest, sources: Sequence[int | None], *, chunk_bytes: int
    ) -> float:
        """Return the seconds until every relay i has a version from relay `sources[i]`,
        or from memory. All requests are sent at once.

        Raises WeightsError where one fails.
        """
        arrivals = await self.deliver(manifest, sources, chunk_bytes=chunk_bytes)
        return max(seconds for seconds, _ in arrivals)

    async def deliver(
        self,
        manifest: WeightManifest,
        sources: Sequence[int | None],
        *,
        chunk_bytes: int,
        base_id: int | None = None,
        together: bool = True,
    ) -> list[tuple[float, VersionFetched]]:
        """Return when every relay i had a version from relay `sources[i]`, in seconds,
        and its answer. All requests are sent at once, or unless `together` one after
        the other. With `base_id`, relays have that version and need the changes alone.

        Raises WeightsError where one fails.
        """
        started = time.monotonic()

        async def fetch(relay: int, source: int | None) -> tuple[float, VersionFetched]:
            answer = await self.links[relay].fetch(
                FetchVersion(
                    manifest=manifest,
                    source=self.source(source),
                    chunk_bytes=chunk_bytes,
                    base_id=base_id,
                    keep=() if base_id is None else (base_id,),
                )
            )
            return time.monotonic() - started, checked(relay, answer)

        fetches = [fetch(relay, source) for relay, source in enumerate(sources)]
        return await asyncio.gather(*fetches) if together else [await one for one in fetches]


def checked(relay: int, answer: FetchReply | None) -> VersionFetched:
    """Check the type of an answer. Raises WeightsError for any other."""
    if isinstance(answer, VersionFetched):
        return answer
    why = answer.error if answer is not None else "no answer: lost, or replaced by a later request"
    raise WeightsError(f"relay r{relay}: {why}")


def chain(relays: int) -> list[int | None]:
    """Return the source of each relay in a chain (Laminar §4.2); None is the
    trainer.
    """
    return [None, *range(relays - 1)]


def star(relays: int) -> list[int | None]:
    """Return the same source for all: the master."""
    return [None, *(0 for _ in range(relays - 1))]


@contextlib.asynccontextmanager
async def tier(network: Network, hosts: Sequence[int], logs: Path) -> AsyncIterator[Tier]:
    """Start relays on these hosts. Raises WeightsError where one does not start."""
    opened: list[RelayLink] = []
    suspected, stalled = ([asyncio.Event() for _ in hosts] for _ in range(2))

    def mark(number: int, silent: bool) -> None:
        (suspected[number].set if silent else suspected[number].clear)()

    def stop(number: int, message: VersionStalled) -> None:
        stalled[number].set()

    try:
        for number, host in enumerate(hosts):
            with network.inside(host):
                spec = RelaySpec(id=f"r{number}", host=network.address(host))
                link = RelayLink(
                    spec,
                    functools.partial(mark, number),
                    functools.partial(stop, number),
                    spawn=hosts_here(0).host(0).starting(Program.RELAY, Share()),
                    log=logs / f"{spec.id}.log",
                )
            opened.append(link)
        ready = [await link.ready() for link in opened]
        yield Tier(opened, [reply.address for reply in ready], suspected, stalled)
    finally:
        await asyncio.gather(*(link.close() for link in opened))
