"""Relays as processes: a chain of them is killed, hung and restarted, over loopback
addresses that stand for several hosts.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from rollweave.io.child import child_of
from rollweave.runtime.supervisors.relays import (
    SUSPECT_BEATS,
    OnStalled,
    OnSuspected,
    RelayLink,
    RelayLostError,
)
from rollweave.schema import weights
from rollweave.weights.tcp import Tcp
from rollweave.weights.transport import KeepAlive, Raw, Request
from tests.support.weight_host import KIB, Memory, tapped, versions

ROOT = Path(__file__).parents[3]
Start = Callable[..., RelayLink]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    relays: list[RelayLink] = []

    def one(
        number: int,
        *,
        suspected: OnSuspected = lambda silent: None,
        stalled: OnStalled = lambda word: None,
        silent_s: float = 20.0,
        module: str = "rollweave.runtime.entrypoints.relay",
        file_bytes: int | None = None,
    ) -> RelayLink:
        spec = weights.RelaySpec(id=f"r{number}", host=f"127.0.0.{number + 1}")
        env = {"OMP_NUM_THREADS": "1"}
        if file_bytes is not None:
            module, env["FILE_BYTES"] = "tests.runtime.small_relay", str(file_bytes)
        log = tmp_path / f"r{number}.log"
        env["PYTHONPATH"] = f"{ROOT}:{ROOT / 'src'}"
        relays.append(
            RelayLink(
                spec,
                suspected,
                stalled,
                spawn=child_of(module, env=env),
                log=log,
                silent_s=silent_s,
            )
        )
        return relays[-1]

    yield one
    for relay in relays:
        await relay.close()
    for relay in relays:
        assert relay.lost.done()
        with pytest.raises(ProcessLookupError):
            os.kill(relay.pid, 0)


async def take(
    relay: RelayLink,
    manifest: weights.WeightManifest,
    source: weights.RelayAddress | None = None,
    *,
    base_id: int | None = None,
) -> weights.FetchReply:
    answer = await relay.fetch(command(manifest, source, base_id=base_id))
    assert answer is not None
    return answer


def command(
    manifest: weights.WeightManifest,
    source: weights.RelayAddress | None = None,
    *,
    base_id: int | None = None,
) -> weights.FetchVersion:
    keep = (base_id,) if base_id is not None else ()
    return weights.FetchVersion(
        manifest=manifest, source=source, base_id=base_id, keep=keep, chunk_bytes=64 * KIB
    )


def payload(answer: weights.FetchReply | None) -> bytes:
    assert isinstance(answer, weights.VersionFetched), answer
    return Path(answer.manifest.location).read_bytes()


async def all_arrive_once(memory: Memory, *answers: asyncio.Future[Any]) -> None:
    """Every answer has the whole version, of which no byte was received twice."""
    for result in await asyncio.gather(*answers):
        assert payload(result) == memory.payload
        assert isinstance(result, weights.VersionFetched)
        assert result.nbytes == memory.manifest.nbytes


async def test_a_broadcast_survives_a_killed_relay(start: Start) -> None:
    """Its successor continues from its predecessor, and the one after that does not
    even notice.
    """
    with versions(1) as (memory,):
        relays = [start(number) for number in range(4)]
        addresses = [(await relay.ready()).address for relay in relays]
        expected = ["127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"]
        assert [address.host for address in addresses] == expected
        async with tapped(memory) as (slow, address):
            answers = [
                relay.fetch(command(memory.manifest, source))
                for relay, source in zip(relays, (address, *addresses), strict=False)
            ]
            slow.allow(3)
            await passed(addresses[3], memory, 3 * 256 * KIB)
            os.kill(relays[1].pid, signal.SIGKILL)
            assert "SIGKILL" in await relays[1].lost
            assert await answers[1] is None
            failed = await answers[2]
            assert isinstance(failed, weights.VersionFailed)
            assert failed.reason == "source"
            assert not answers[3].done()
            again = relays[2].fetch(command(memory.manifest, addresses[0]))
            slow.allow_all()
            await all_arrive_once(memory, answers[0], again, answers[3])
        assert [ask.ranges for ask in slow.requests] == [((0, memory.manifest.nbytes),)]


async def passed(address: weights.RelayAddress, memory: Memory, nbytes: int) -> None:
    """Wait until the relay at `address` offers byte `nbytes - 1`."""
    manifest = memory.manifest
    channel = await Tcp(idle_timeout_s=20.0).connect(address)
    try:
        ranges = ((nbytes - 1, nbytes),)
        await channel.send(
            Request(
                publication_id=manifest.publication_id,
                digest=manifest.digest,
                nbytes=manifest.nbytes,
                ranges=ranges,
            )
        )
        word, _ = await channel.receive(lambda word, size: memoryview(bytearray(size)))
        while isinstance(word, KeepAlive):
            word, _ = await channel.receive(lambda word, size: memoryview(bytearray(size)))
        assert word == Raw(start=nbytes - 1, stop=nbytes)
    finally:
        channel.close()


async def test_a_broadcast_survives_a_killed_master(start: Start) -> None:
    """Its successor reads the missing bytes from the trainer's memory, and the
    following relays continue; only deltas are transferred.
    """
    with versions(2) as (old, new):
        relays = [start(number) for number in range(3)]
        addresses = [(await relay.ready()).address for relay in relays]
        for relay, source in zip(relays, (None, *addresses), strict=False):
            assert isinstance(await take(relay, old.manifest, source), weights.VersionFetched)
        os.kill(relays[0].pid, signal.SIGSTOP)  # it reads nothing and sends nothing
        answers = [
            relay.fetch(command(new.manifest, source, base_id=1))
            for relay, source in zip(relays, (None, *addresses), strict=False)
        ]
        relays[0].kill()
        assert "was killed" in await relays[0].lost
        assert await answers[0] is None
        failed = await answers[1]
        assert isinstance(failed, weights.VersionFailed)
        assert failed.reason == "source"
        again = relays[1].fetch(command(new.manifest, base_id=1))
        result = await answers[2]
        assert payload(await again) == payload(result) == new.payload
        assert isinstance(result, weights.VersionFetched)
        assert 0 < result.nbytes < new.manifest.nbytes / 10


async def test_a_hung_relay_is_suspected_then_killed(start: Start) -> None:
    reports: list[bool] = []
    relay = start(0, silent_s=1.5, suspected=reports.append)
    await relay.ready()
    os.kill(relay.pid, signal.SIGSTOP)
    assert "sent nothing for 1.5 s" in await relay.lost
    assert reports[-1] is True
    with versions(1) as (memory,):
        assert await relay.fetch(command(memory.manifest)) is None


class Suspicions:
    """Records what a link reports about its relay's silence."""

    def __init__(self) -> None:
        self.reports: asyncio.Queue[bool] = asyncio.Queue()

    def __call__(self, silent: bool) -> None:
        self.reports.put_nowait(silent)

    async def until(self, silent: bool) -> None:
        """Wait for this report; on a busy machine others may come before."""
        async with asyncio.timeout(30):
            while await self.reports.get() is not silent:
                pass


@contextlib.asynccontextmanager
async def hung(start: Start, at: int, *, relays: int) -> AsyncIterator[Any]:
    """Let the relay `at` of a chain hang in the middle of a broadcast."""
    with versions(1) as (memory,):
        doubts = Suspicions()
        chain = [
            start(number, suspected=doubts if number == at else lambda silent: None)
            for number in range(relays)
        ]
        addresses = [(await relay.ready()).address for relay in chain]
        async with tapped(memory) as (slow, address):
            answers = [
                relay.fetch(command(memory.manifest, source))
                for relay, source in zip(chain, (address, *addresses), strict=False)
            ]
            slow.allow(3)
            await passed(addresses[-1], memory, 3 * 256 * KIB)
            os.kill(chain[at].pid, signal.SIGSTOP)
            await doubts.until(True)
            yield memory, doubts, chain, addresses, slow, answers


async def test_a_broadcast_bypasses_a_hung_relay_until_it_recovers(start: Start) -> None:
    """No relay receives a byte twice, and none is restarted."""
    async with hung(start, 1, relays=4) as (memory, doubts, relays, addresses, slow, answers):
        again = relays[2].fetch(command(memory.manifest, addresses[0]))
        slow.allow_all()
        await all_arrive_once(memory, answers[0], again, answers[3])
        assert not answers[1].done()
        os.kill(relays[1].pid, signal.SIGCONT)
        await doubts.until(False)
        assert payload(await answers[1]) == memory.payload
        assert not relays[1].lost.done()
    assert [ask.ranges for ask in slow.requests] == [((0, memory.manifest.nbytes),)]


async def test_a_broadcast_bypasses_a_hung_master(start: Start) -> None:
    """The relay behind it reads the missing bytes from the trainer's memory, and the
    following ones continue.
    """
    async with hung(start, 0, relays=3) as (memory, doubts, relays, _, slow, answers):
        again = relays[1].fetch(command(memory.manifest))
        assert payload(await again) == payload(await answers[2]) == memory.payload
        os.kill(relays[0].pid, signal.SIGCONT)
        await doubts.until(False)
        slow.allow_all()
        assert payload(await answers[0]) == memory.payload


async def test_a_blocked_event_loop_suspects_no_relay(start: Start) -> None:
    """Our event loop is blocked for longer than a relay may be silent; the relay sends
    heartbeats during that time, which are read first.
    """
    reports: list[bool] = []
    relay = start(0, suspected=reports.append, silent_s=(SUSPECT_BEATS + 2) * weights.HEARTBEAT_S)
    await relay.ready()
    for _ in range(2):
        time.sleep((SUSPECT_BEATS + 4) * weights.HEARTBEAT_S)  # noqa: ASYNC251 (that is the point)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert reports == []
    assert not relay.lost.done()


async def test_unread_heartbeats_do_not_count_as_silence(start: Start) -> None:
    """While our event loop is blocked nothing is counted, whether heartbeats wait to be
    read or not.
    """
    reports: list[bool] = []
    relay = start(0, suspected=reports.append)
    await relay.ready()
    os.kill(relay.pid, signal.SIGSTOP)
    for _ in range(SUSPECT_BEATS - 1):
        time.sleep((SUSPECT_BEATS + 1) * weights.HEARTBEAT_S)  # noqa: ASYNC251 (that is the point)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert reports == [], "each time counts as one beat"
    os.kill(relay.pid, signal.SIGCONT)


async def test_reports_why_a_relay_cannot_start(start: Start) -> None:
    relay = start(0, module="rollweave.no_such_module")
    with pytest.raises(RelayLostError, match="no_such_module"):
        await relay.ready()
    assert "exit status" in await relay.lost


async def test_a_version_that_does_not_fit_fails(start: Start) -> None:
    """Older versions stay, and there is space again once a smaller one comes."""
    with versions(1) as (memory,), versions(1, first=2) as (other,):
        source, relay = start(0), start(1, file_bytes=memory.manifest.nbytes // 2)
        address = (await source.ready()).address
        await relay.ready()
        assert isinstance(await take(source, memory.manifest), weights.VersionFetched)
        failed = await take(relay, memory.manifest, address)
        assert isinstance(failed, weights.VersionFailed)
        assert failed.reason == "room"
        result = await take(relay, other.manifest)  # shared, not copied
        assert payload(result) == other.payload


async def test_a_relays_memory_is_freed_at_its_end(start: Start) -> None:
    with versions(1) as (memory,):
        relay = start(0)
        await relay.ready()
        result = await take(relay, memory.manifest)
        assert isinstance(result, weights.VersionFetched)
        await relay.close()
        assert "was closed" in relay.lost.result()
        assert not os.path.exists(result.manifest.location)  # noqa: ASYNC240 (it is not on a disk)


async def test_a_replaced_fetch_has_no_result(start: Start) -> None:
    with versions(1) as (memory,):
        relay, other = start(0), start(1)
        await relay.ready()
        address = (await other.ready()).address
        assert isinstance(await take(other, memory.manifest), weights.VersionFetched)
        async with tapped(memory) as (_, nowhere):
            first = relay.fetch(command(memory.manifest, nowhere))
            second = relay.fetch(command(memory.manifest, address))
            assert await first is None
            assert payload(await second) == memory.payload


async def test_ignores_foreign_connections(start: Start) -> None:
    """Neither a port scanner nor a silent client does harm."""
    with versions(1) as (memory,):
        relay, other = start(0), start(1)
        address = (await relay.ready()).address
        await other.ready()
        assert isinstance(await take(relay, memory.manifest), weights.VersionFetched)
        silent = [await asyncio.open_connection(address.host, address.port) for _ in range(20)]
        for noise in (
            b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100,
            os.urandom(5000),
            b"rollweave weights 1\n" + bytes(32),
        ):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(noise)
            assert await _rest(reader) == b""
            writer.close()
        assert payload(await take(other, memory.manifest, address)) == memory.payload
        for _, writer in silent:
            writer.close()


async def _rest(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""
