"""The core and real relays: when one of them hangs for a moment, weights bypass it."""

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollweave.core.core import Core
from rollweave.io.child import Spawn
from rollweave.record.journal import Replay, RunJournal
from rollweave.record.trace import Trace
from rollweave.runtime.hosts.hosts import Hosts, hosts_here
from rollweave.runtime.pump import Pump, RunClock
from rollweave.runtime.supervisors.engines import Manifests
from rollweave.runtime.supervisors.relays import OnStalled, OnSuspected, RelayLink, RelaySupervisor
from rollweave.runtime.tasks import Tasks
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId
from rollweave.schema.commands import Command
from rollweave.schema.weights import RelaySpec
from tests.support.core import config
from tests.support.variants import mostly_extended
from tests.support.weight_host import Memory, Parts, parts_of, until, versions

COUNT = 4
CONFIG = config("partial", engines={"count": COUNT}, weights={"relays": COUNT})


def apart(count: int) -> Hosts:
    """Return hosts that share no memory, as with agents."""
    hosts = hosts_here(count)
    for number, host in hosts.by_number.items():
        hosts.by_number[number] = dataclasses.replace(host, is_here=False)
    return hosts


class Bench:
    """A core, its journal and its relays.

    The test posts the events of engines and trainer.
    """

    def __init__(self, directory: Path, journal: RunJournal, tasks: Tasks, trace: Trace) -> None:
        self.core, self.manifests = Core(CONFIG), Manifests(relayed=True)
        self.links: dict[str, RelayLink] = {}
        self.fetches: list[c.FetchWeights] = []
        self.restarted: list[str] = []
        clock = RunClock()
        self.pump = Pump(self.core, journal=journal, clock=clock.now, execute=self._execute)
        self.relays = RelaySupervisor(
            hosts=apart(COUNT),
            open_relay=self._open,
            transport="tcp",
            manifests=self.manifests,
            tasks=tasks,
            post=self.pump.post,
            clock=clock.now,
            trace=trace,
        )
        self._logs = directory / "logs"

    def account(self) -> object:
        """Return what the core knows about relays, for a test that fails."""
        return self.core.state.mechanisms["relays"], self.fetches, self.restarted

    def _open(
        self, spawn: Spawn, spec: RelaySpec, suspected: OnSuspected, stalled: OnStalled
    ) -> RelayLink:
        log = self._logs / f"{spec.id}.log"
        link = RelayLink(spec, suspected, stalled, spawn=spawn, log=log, silent_s=60.0)
        self.links[spec.id] = link
        return link

    def _execute(self, command: Command) -> None:
        match command:
            case c.FetchWeights():
                self.fetches.append(command)
                self.relays.fetch(command)
            case c.RestartRelay():
                self.restarted.append(command.relay_id)
            case _:
                pass

    async def begin(self) -> None:
        slots = tuple(
            e.EngineSlot(id=EngineId(f"e{number}"), host=number) for number in range(COUNT)
        )
        self.pump.post(e.RunStarted(engines=slots, relays=COUNT))
        self.relays.start(COUNT)
        await until(lambda: len(self.core.state.mechanisms["relays"].order) == COUNT)
        self.pump.post(e.TrainerReady(epoch=0, step=0))

    async def publish(self, memory: Memory | Parts) -> None:
        """Publish as soon as the core requests it, the parts from the first hosts."""
        publication_id = memory.manifest.publication_id
        await until(lambda: self.core.state.publication.next_id == publication_id + 1)
        self.manifests.published(memory.manifest, (), range(len(memory.manifest.parts)))
        self.pump.post(
            e.WeightsPublished(
                epoch=self.core.state.trainer.epoch, version=0, publication_id=publication_id
            )
        )

    def ask_again(self) -> None:
        """Lose the trainer and restart it: the core publishes its weights under a new
        id.
        """
        self.pump.post(e.TrainerLost(epoch=self.core.state.trainer.epoch, error="killed"))
        self.pump.post(e.TrainerReady(epoch=self.core.state.trainer.epoch + 1, step=0))

    def have(self, publication_id: int, *relays: str) -> bool:
        return all(
            publication_id in self.core.state.mechanisms["relays"].relays[relay].versions
            for relay in relays
        )

    def signal(self, relay: str, number: signal.Signals) -> None:
        os.kill(self.links[relay].pid, number)


@contextlib.asynccontextmanager
async def running(directory: Path) -> AsyncIterator[Bench]:
    """Run a running, and replay its journal at the end."""
    path = directory / "journal.bin"
    with RunJournal(path) as journal:
        async with Tasks() as tasks:
            bench = Bench(directory, journal, tasks, Trace(directory / "trace.json"))
            tasks.spawn(bench.pump.run(), "pump")
            try:
                await bench.begin()
                yield bench
            finally:
                await bench.relays.close()
                bench.pump.stop()
                tasks.cancel_all()
    replay = Replay(path, CONFIG)
    assert replay.finish().snapshot() == bench.core.snapshot()
    assert replay.differing == 0


@pytest.mark.variants
@pytest.mark.parametrize("victim", mostly_extended(range(COUNT), {0, 2}))
async def test_weights_bypass_a_relay_that_hangs(victim: int, tmp_path: Path) -> None:
    """All others have the weights before it continues; then it fetches them as well, in
    the same epoch.
    """
    chain = [f"r{number}" for number in range(COUNT)]
    with versions(2, first=0) as (old, new):
        async with running(tmp_path) as bench:
            await bench.publish(old)
            await until(lambda: bench.have(0, *chain))
            chain = list(bench.core.state.mechanisms["relays"].order)
            hung = chain[victim]
            others = [relay for relay in chain if relay != hung]
            bench.ask_again()
            bench.fetches.clear()
            # it neither reads nor sends
            bench.signal(hung, signal.SIGSTOP)
            await bench.publish(new)
            await until(lambda: bench.have(1, *others))
            await until(lambda: bench.core.state.mechanisms["relays"].relays[hung].suspected)
            bench.signal(hung, signal.SIGCONT)
            await until(
                lambda: (
                    bench.have(1, hung)
                    and not bench.core.state.mechanisms["relays"].relays[hung].suspected
                )
            )
            assert (bench.restarted, bench.core.state.mechanisms["relays"].order) == ([], chain)
    sources = {fetch.relay_id: fetch.source for fetch in bench.fetches}  # the last fetch of each
    expected = dict(zip(chain, [None, *chain], strict=False))
    if victim + 1 < COUNT:
        expected[chain[victim + 1]] = chain[victim - 1] if victim else None
    events = [event for _, event, _ in Replay(tmp_path / "journal.bin", CONFIG)]
    suspects = {event.relay_id for event in events if isinstance(event, e.RelaySuspected)}
    assert sources == expected or suspects != {
        hung
    }  # on a busy machine others may be suspected as well


async def test_if_all_relays_hang_all_continue_later(tmp_path: Path) -> None:
    with versions(1, first=0) as (memory,):
        async with running(tmp_path) as bench:
            for relay in bench.links:
                bench.signal(relay, signal.SIGSTOP)
            await until(
                lambda: all(
                    relay.suspected
                    for relay in bench.core.state.mechanisms["relays"].relays.values()
                )
            )
            await bench.publish(memory)
            for relay in bench.links:
                bench.signal(relay, signal.SIGCONT)
            await until(lambda: bench.have(0, *bench.links), bench.account)
            assert bench.restarted == []


async def test_parts_of_several_hosts_reach_all_of_them(tmp_path: Path) -> None:
    """The last host has no part."""
    with versions(1, first=0) as (whole,), parts_of(whole, COUNT - 1) as parts:
        async with running(tmp_path) as bench:
            await bench.publish(parts)
            await until(lambda: bench.have(0, *bench.links), bench.account)
            for host in range(COUNT):
                manifest = bench.manifests.on_host(host, 0)
                assert manifest is not None
                read = await asyncio.to_thread(Path(manifest.location).read_bytes)
                assert read == whole.payload
