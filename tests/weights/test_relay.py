"""A relay fetches complete versions and passes them on while they arrive. A failed
fetch does not affect its other versions.
"""

import asyncio
import gc
import os

import msgspec

from rollweave.schema.weights import HEARTBEAT_S, RelayAddress, VersionFailed, VersionFetched
from rollweave.weights.tcp import STALL_BEATS, Channel, Tcp
from tests.support.weight_host import (
    KIB,
    SHAPES,
    Host,
    Memory,
    changed,
    hosts,
    payload_of,
    tapped,
    tensors_of,
    until,
    versions,
)


def failed(answer: VersionFetched | VersionFailed, reason: str) -> str:
    assert isinstance(answer, VersionFailed), answer
    assert answer.reason == reason, answer
    return answer.error


def received_bytes(host: Host, publication_id: int) -> int:
    """Return the number of bytes of a version that have arrived."""
    pending = host.relay._pending.get(publication_id)
    return pending.writer.contiguous if pending is not None and pending.writer is not None else 0


async def test_fetches_from_memory_and_down_a_chain() -> None:
    with versions(1) as (memory,):
        async with hosts(4) as chain:
            for host, source in zip(chain, (None, *chain), strict=False):
                host.start_fetch(memory.manifest, source)
            for number, host in enumerate(chain):
                answer = await host.answer()
                assert isinstance(answer, VersionFetched), answer
                assert answer.nbytes == (memory.manifest.nbytes if number else 0)
                assert answer.manifest == host.relay.manifest(1)
            memory.close()  # the trainer may be gone now
            assert {host.payload(1) for host in chain} == {memory.payload}


async def test_a_version_crosses_a_link_once_and_is_passed_on_meanwhile() -> None:
    """Of two hosts behind a link, one receives the version over it, and the other one
    receives each piece before the next has crossed.
    """
    piece = 256 * KIB
    with versions(1) as (memory,):
        async with tapped(memory, piece=piece) as (source, address), hosts(2) as (first, second):
            first.start_fetch(memory.manifest, address)
            second.start_fetch(memory.manifest, first)
            for number in range(1, memory.manifest.nbytes // piece + 1):
                source.allow(1)
                await until(lambda n=number: received_bytes(second, 1) == n * piece)
            source.allow_all()
            for host in (first, second):
                assert isinstance(await host.answer(), VersionFetched)
                assert host.payload(1) == memory.payload
            (request,) = source.requests
            assert request.ranges == ((0, memory.manifest.nbytes),)


async def test_sends_deltas_and_the_full_version_to_a_host_without_the_base() -> None:
    with versions(2) as (old, new):
        async with hosts(4) as (master, second, third, fourth):
            for host, source in ((master, None), (second, master), (third, master)):
                assert isinstance(await host.fetch(old.manifest, source), VersionFetched)
            master.start_fetch(new.manifest, base_id=1, keep=(1,))
            second.start_fetch(new.manifest, master, base_id=1, keep=(1,))
            third.start_fetch(new.manifest, second, base_id=1, keep=(1,))
            fourth.start_fetch(new.manifest, second)
            answers = [await host.answer() for host in (master, second, third, fourth)]
            sizes = [answer.nbytes for answer in answers if isinstance(answer, VersionFetched)]
            assert sizes[0] == 0
            assert 0 < sizes[1] == sizes[2] < new.manifest.nbytes / 10
            assert sizes[3] == new.manifest.nbytes
            assert {host.payload(2) for host in (master, second, third, fourth)} == {new.payload}
            assert {host.payload(1) for host in (master, second, third)} == {old.payload}


async def test_evicts_versions_not_kept_but_open_mappings_survive() -> None:
    with versions(3) as (one, two, three):
        async with hosts(1) as (host,):
            await host.fetch(one.manifest)
            await host.fetch(two.manifest, keep=(1,))
            assert (host.payload(1), host.payload(2)) == (one.payload, two.payload)
            manifest, stored = host.relay.manifest(1), host.relay._store.get(1)
            assert manifest is not None
            assert stored is not None
            with open(manifest.location, "rb") as reader:  # noqa: ASYNC230 (it is memory)
                await host.fetch(three.manifest, keep=(2,))
                expected = (None, two.payload, three.payload)
                assert (host.payload(1), host.payload(2), host.payload(3)) == expected
                assert reader.read() == one.payload
            await until(lambda: stored.fd == -1)


async def test_resumes_from_another_source_where_it_stopped() -> None:
    with versions(1) as (memory,):
        async with (
            hosts(2) as (host, after),
            tapped(memory) as (first, address),
            tapped(memory) as (second, other),
        ):
            second.allow_all()
            host.start_fetch(memory.manifest, address)
            after.start_fetch(memory.manifest, host)
            first.allow(3)
            await until(lambda: received_bytes(host, 1) == 768 * KIB)
            assert host.relay.progress() == (768 * KIB, memory.manifest.nbytes)
            first.version.withdraw("the test ends it")
            assert "the test ends it" in failed(await host.answer(), "source")
            host.start_fetch(memory.manifest, other)
            for one in (host, after):
                answer = await one.answer()
                assert isinstance(answer, VersionFetched)
                assert answer.nbytes == memory.manifest.nbytes
            assert second.requests[0].ranges == ((768 * KIB, memory.manifest.nbytes),)
            assert host.payload(1) == after.payload(1) == memory.payload
            assert host.relay.progress() == (0, 0)


async def test_another_source_supersedes_the_first() -> None:
    with versions(1) as (memory,):
        async with (
            hosts(1) as (host,),
            tapped(memory) as (slow, address),
            tapped(memory) as (fast, other),
        ):
            slow.allow(2)
            fast.allow_all()
            host.start_fetch(memory.manifest, address)
            await until(lambda: received_bytes(host, 1) == 512 * KIB)
            host.start_fetch(memory.manifest, other)
            assert "superseded" in failed(await host.answer(), "source")
            answer = await host.answer()
            assert isinstance(answer, VersionFetched)
            assert answer.nbytes == memory.manifest.nbytes
            # Of two commands at once, the first never starts.
            host.start_fetch(memory.manifest, address)
            host.start_fetch(memory.manifest, other)
            assert "superseded" in failed(await host.answer(), "source")
            assert isinstance(await host.answer(), VersionFetched)


async def test_the_successor_of_a_dead_master_takes_over_unnoticed() -> None:
    with versions(2) as (old, new):
        async with (
            hosts(3) as (second, third, fourth),
            tapped(new, piece=2048 * KIB) as (master, address),
        ):
            for host, source in ((second, None), (third, second), (fourth, third)):
                await host.fetch(old.manifest, source)
            master.allow(1)
            second.start_fetch(new.manifest, address, base_id=1, keep=(1,))
            third.start_fetch(new.manifest, second, base_id=1, keep=(1,))
            fourth.start_fetch(new.manifest, third, base_id=1, keep=(1,))
            await until(lambda: received_bytes(fourth, 2) == 2048 * KIB)
            master.version.withdraw("dead")
            failed(await second.answer(), "source")
            second.start_fetch(new.manifest, base_id=1, keep=(1,))
            answers = [await host.answer() for host in (second, third, fourth)]
            assert all(isinstance(answer, VersionFetched) for answer in answers), answers
            assert {host.payload(2) for host in (second, third, fourth)} == {new.payload}
            # Bytes received before are not sent again, and the rest arrive as deltas.
            assert isinstance(answers[2], VersionFetched)
            assert (
                2048 * KIB
                < answers[2].nbytes
                < 2048 * KIB + (new.manifest.nbytes - 2048 * KIB) / 10
            )


async def test_reports_an_unreachable_source_and_a_wrong_secret() -> None:
    with versions(1) as (memory,):
        async with hosts(2) as (host, source):
            await source.fetch(memory.manifest)
            wrong = msgspec.structs.replace(source.address, secret=b"guess")
            assert "secret" in failed(await host.fetch(memory.manifest, wrong), "source")
            unreachable = RelayAddress(host="127.0.0.1", port=1, secret=b"")
            assert "cannot be reached" in failed(
                await host.fetch(memory.manifest, unreachable), "source"
            )
            assert isinstance(await host.fetch(memory.manifest, source), VersionFetched)


async def test_reports_a_stall_repeatedly_while_the_fetch_continues() -> None:
    """The source accepts the connection but sends nothing; another has the version."""
    silent = asyncio.Event()

    async def send_nothing(_: Channel) -> None:
        await silent.wait()

    listener = await Tcp(idle_timeout_s=30.0).listen("127.0.0.1", send_nothing)
    try:
        with versions(1) as (memory,):
            async with hosts(2) as (source, host):
                await source.fetch(memory.manifest)
                host.start_fetch(memory.manifest, listener.address)
                await until(lambda: len(host.stalls) > 1)
                assert {(word.publication_id, word.source) for word in host.stalls} == {
                    (1, listener.address)
                }
                assert host.answers.empty()
                host.start_fetch(memory.manifest, source)
                answers = [await host.answer(), await host.answer()]
                assert [type(answer) for answer in answers] == [VersionFailed, VersionFetched]
    finally:
        await listener.close()


async def test_a_slow_source_does_not_count_as_stalled() -> None:
    """A piece may take any time as long as bytes arrive, and so may a waiting
    source.
    """
    with versions(1) as (memory,):
        sent, total, over = 0, memory.manifest.nbytes, asyncio.Event()

        async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """Forward to the relay's socket, a slice at a time."""
            nonlocal sent
            inner_reader, inner = await asyncio.open_connection(
                source.address.host, source.address.port
            )

            async def up() -> None:
                while data := await reader.read(1 << 16):
                    inner.write(data)

            task = asyncio.create_task(up())
            while data := await inner_reader.read(1 << 16):
                sent += len(data)
                for start in range(0, len(data), 1 << 14):
                    writer.write(data[start : start + (1 << 14)])
                    await writer.drain()
                await asyncio.sleep(1.2 * len(data) / total)
            await task
            for end in (writer, inner):
                end.close()
                await end.wait_closed()
            over.set()

        async with hosts(2) as (source, host):
            await source.fetch(memory.manifest, chunk_bytes=1 << 30)
            server = await asyncio.start_server(drip, "127.0.0.1", 0)
            async with server:
                address = msgspec.structs.replace(
                    source.address, host="127.0.0.1", port=server.sockets[0].getsockname()[1]
                )
                assert isinstance(await host.fetch(memory.manifest, address), VersionFetched)
                await over.wait()
        assert sent > total
        assert host.stalls == []


async def test_a_waiting_relay_receives_keep_alives() -> None:
    with versions(1) as (memory,):
        async with hosts(1) as (host,), tapped(memory) as (slow, address):
            host.start_fetch(memory.manifest, address)
            await asyncio.sleep(2 * STALL_BEATS * HEARTBEAT_S)
            slow.allow_all()
            assert isinstance(await host.answer(), VersionFetched)
            assert host.stalls == []


async def test_reports_a_missing_base() -> None:
    with versions(2) as (old, new):
        async with hosts(2) as (master, host):
            await master.fetch(old.manifest)
            assert "publication 7 is not stored" in failed(
                await master.fetch(new.manifest, base_id=7, keep=(1,)), "base"
            )
            assert "publication 1 is not stored" in failed(
                await host.fetch(new.manifest, master, base_id=1), "base"
            )
            assert master.payload(1) == old.payload
            assert isinstance(await master.fetch(new.manifest, keep=(1,)), VersionFetched)
            assert isinstance(await host.fetch(new.manifest, master), VersionFetched)


async def test_a_base_with_another_content_is_not_used() -> None:
    """A delta against it would not apply, so the full version is sent."""
    other = Memory(changed(payload_of(SHAPES, seed=0), seed=99), publication_id=1, tensors=SHAPES)
    with versions(2) as (old, new):
        async with hosts(2) as (master, host):
            await master.fetch(old.manifest)
            await host.fetch(other.manifest)
            await master.fetch(new.manifest, base_id=1, keep=(1,))
            answer = await host.fetch(new.manifest, master, base_id=1, keep=(1,))
            assert isinstance(answer, VersionFetched)
            assert answer.nbytes == new.manifest.nbytes
            assert (host.payload(1), host.payload(2)) == (other.payload, new.payload)
    other.close()


async def test_a_source_without_deltas_sends_the_full_version() -> None:
    """A relay further down that waits for deltas receives the full version, too."""
    with versions(2) as (old, new):
        async with hosts(3) as (master, second, third):
            for host, source in ((master, None), (second, master), (third, second)):
                await host.fetch(old.manifest, source)
            third.start_fetch(new.manifest, second, base_id=1, keep=(1,))
            second.start_fetch(new.manifest, master, base_id=1, keep=(1,))
            await master.fetch(new.manifest, keep=(1,))
            for host in (second, third):
                answer = await host.answer()
                assert isinstance(answer, VersionFetched)
                assert answer.nbytes == new.manifest.nbytes
                assert host.payload(2) == new.payload


async def test_keeps_deltas_of_the_newest_versions_only() -> None:
    with versions(5) as memories:
        async with hosts(2) as (master, host):
            everything = tuple(range(1, 6))
            for number, memory in enumerate(memories):
                base_id = number or None
                answer = await master.fetch(memory.manifest, base_id=base_id, keep=everything)
                assert isinstance(answer, VersionFetched)
                await host.fetch(memory.manifest, master, base_id=base_id, keep=everything)
            for publication_id in everything:
                changes = host.relay._served[publication_id]._deltas
                assert bool(changes) == (publication_id > 3)
                assert host.payload(publication_id) == memories[publication_id - 1].payload
            await host.fetch(memories[-1].manifest, keep=())
            assert list(host.relay._served) == [5]


async def test_rejects_two_trainers_with_one_id() -> None:
    with versions(2) as (own, _):
        other = Memory(changed(own.payload, seed=5), publication_id=1, tensors=SHAPES)
        async with hosts(3) as (one, two, three):
            await one.fetch(own.manifest)
            assert "two trainers" in failed(await one.fetch(other.manifest), "broken")
            assert one.payload(1) == own.payload
            await two.fetch(other.manifest)
            assert "two trainers" in failed(await three.fetch(own.manifest, two), "source")
            # While the first is still arriving, its rival waits for the outcome.
            async with tapped(own) as (tap, address):
                three.start_fetch(own.manifest, address)
                three.start_fetch(other.manifest, two)
                tap.allow_all()
                assert isinstance(await three.answer(), VersionFetched)
                error = failed(await three.answer(), "broken")
                assert f"({own.manifest.digest}, not {other.manifest.digest})" in error
                assert three.payload(1) == own.payload
        other.close()


async def test_rejects_a_manifest_for_another_model() -> None:
    shapes = tensors_of(100)
    with versions(1) as (memory,), versions(1, tensors=shapes, first=2) as (other,):
        async with hosts(1) as (host,):
            await host.fetch(memory.manifest)
            assert "another model" in failed(await host.fetch(other.manifest, keep=(1,)), "broken")
            assert host.payload(1) == memory.payload


async def test_rejects_a_payload_that_does_not_match_its_manifest() -> None:
    with versions(1) as (good,):
        bad = Memory(changed(good.payload, seed=3), publication_id=2, tensors=SHAPES)
        lies = msgspec.structs.replace(bad.manifest, digest=good.manifest.digest)
        async with hosts(2) as (host, after):
            await host.fetch(good.manifest)
            after.start_fetch(lies, host)
            assert "digest" in failed(await host.fetch(lies, keep=(1,)), "broken")
            assert isinstance(await after.answer(), VersionFailed)
            assert host.payload(1) == good.payload
            assert host.payload(2) is after.payload(2) is None
            assert isinstance(await host.fetch(bad.manifest, keep=(1,)), VersionFetched)
        bad.close()


async def test_rejects_a_truncated_publication() -> None:
    with versions(2) as (good, next_):
        torn = msgspec.structs.replace(
            next_.manifest, location=good.manifest.location, nbytes=next_.manifest.nbytes + 64
        )
        async with hosts(1) as (host,):
            await host.fetch(good.manifest)
            assert "bytes, the manifest says" in failed(await host.fetch(torn, keep=(1,)), "source")
            missing = msgspec.structs.replace(next_.manifest, location="/proc/1/fd/9999")
            assert "cannot open" in failed(await host.fetch(missing, keep=(1,)), "source")
            assert host.payload(1) == good.payload


async def test_a_fetch_that_the_next_command_does_not_keep_is_cancelled() -> None:
    with versions(2) as (one, two):
        async with hosts(1) as (host,), tapped(one) as (tap, address):
            tap.allow(1)
            host.start_fetch(one.manifest, address)
            await until(lambda: received_bytes(host, 1) > 0)
            assert isinstance(await _second(host, two), VersionFetched)
            assert host.relay._pending == {}
            assert host.payload(1) is None
            host.start_fetch(one.manifest, keep=(2,), chunk_bytes=KIB)
            await until(lambda: received_bytes(host, 1) > 0)
            assert isinstance(await _second(host, two), VersionFetched)


async def _second(host: Host, memory: Memory) -> VersionFetched | VersionFailed:
    host.start_fetch(memory.manifest)
    answers = [await host.answer(), await host.answer()]
    missing = next(answer for answer in answers if isinstance(answer, VersionFailed))
    assert "does not keep it" in failed(missing, "source")
    return next(answer for answer in answers if isinstance(answer, VersionFetched))


async def test_a_partial_version_expires() -> None:
    with versions(1) as (memory,):
        async with hosts(2, linger_s=0.2) as (host, after), tapped(memory) as (tap, address):
            tap.allow(2)
            host.start_fetch(memory.manifest, address)
            after.start_fetch(memory.manifest, host)
            await until(lambda: received_bytes(after, 1) == 512 * KIB)
            writer = host.relay._pending[1].writer
            tap.version.withdraw("gone")
            failed(await host.answer(), "source")
            assert "no other source" in failed(await after.answer(), "source")
            await until(lambda: not host.relay._pending and not after.relay._pending)
            assert writer is not None
            assert writer.fd == -1


async def test_fetches_an_empty_version() -> None:
    with versions(1, tensors=()) as (memory,):
        async with hosts(2) as (one, two):
            assert isinstance(await one.fetch(memory.manifest), VersionFetched)
            assert isinstance(await two.fetch(memory.manifest, one), VersionFetched)
            assert two.payload(1) == b""


async def test_closing_releases_every_descriptor() -> None:
    gc.collect()  # closes what other tests left open
    before = len(os.listdir("/proc/self/fd"))
    with versions(2) as (old, new):
        async with hosts(3) as (one, two, three), tapped(new) as (tap, address):
            await one.fetch(old.manifest)
            tap.allow(1)
            one.start_fetch(new.manifest, address, keep=(1,))
            two.start_fetch(new.manifest, one)
            three.start_fetch(new.manifest, two)
            await until(lambda: received_bytes(two, 2) > 0)
    await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) == before
