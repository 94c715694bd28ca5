"""A relay takes whole versions, passes them on while they come, and nothing that fails
on the way harms what it has.
"""

import asyncio
import gc
import os

import msgspec
import pytest

from rollweave.schema.weights import HEARTBEAT_S, RelayAddress, VersionFailed, VersionFetched
from rollweave.weights.tcp import Tcp
from rollweave.weights.transport import STALL_BEATS, Channel
from tests.weights.host import (
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


def done(host: Host, weights_id: int) -> int:
    """Bytes of a version that have come."""
    coming = host.relay._coming.get(weights_id)
    return coming.draft.done if coming is not None and coming.draft is not None else 0


async def test_from_memory_and_down_a_chain() -> None:
    with versions(1) as (memory,):
        async with hosts(4) as chain:
            for host, source in zip(chain, (None, *chain), strict=False):
                host.begin(memory.manifest, source)
            for number, host in enumerate(chain):
                answer = await host.answer()
                assert isinstance(answer, VersionFetched), answer
                assert answer.nbytes == (memory.manifest.nbytes if number else 0)
                assert answer.manifest == host.relay.manifest(1)
            memory.close()  # the trainer may be gone by now
            assert {host.payload(1) for host in chain} == {memory.payload}


async def test_only_changes_travel_and_who_has_no_base_gets_the_whole() -> None:
    with versions(2) as (old, new):
        async with hosts(4) as (master, second, third, late):
            for host, source in ((master, None), (second, master), (third, master)):
                assert isinstance(await host.take(old.manifest, source), VersionFetched)
            master.begin(new.manifest, base_id=1, keep=(1,))
            second.begin(new.manifest, master, base_id=1, keep=(1,))
            third.begin(new.manifest, second, base_id=1, keep=(1,))
            late.begin(new.manifest, second)
            answers = [await host.answer() for host in (master, second, third, late)]
            sizes = [answer.nbytes for answer in answers if isinstance(answer, VersionFetched)]
            assert sizes[0] == 0
            assert 0 < sizes[1] == sizes[2] < new.manifest.nbytes / 10
            assert sizes[3] == new.manifest.nbytes
            assert {host.payload(2) for host in (master, second, third, late)} == {new.payload}
            assert {host.payload(1) for host in (master, second, third)} == {old.payload}


async def test_what_is_not_kept_is_let_go_and_whoever_mapped_it_keeps_it() -> None:
    with versions(3) as (one, two, three):
        async with hosts(1) as (host,):
            await host.take(one.manifest)
            await host.take(two.manifest, keep=(1,))
            assert (host.payload(1), host.payload(2)) == (one.payload, two.payload)
            manifest = host.relay.manifest(1)
            assert manifest is not None
            with open(manifest.location, "rb") as reader:  # noqa: ASYNC230 (it is memory)
                await host.take(three.manifest, keep=(2,))
                assert (host.payload(1), host.payload(2), host.payload(3)) == (
                    None,
                    two.payload,
                    three.payload,
                )
                assert reader.read() == one.payload


async def test_it_goes_on_from_another_source_where_it_stood() -> None:
    with versions(1) as (memory,):
        async with (
            hosts(2) as (host, after),
            tapped(memory) as (first, address),
            tapped(memory) as (second, other),
        ):
            second.let_all()
            host.begin(memory.manifest, address)
            after.begin(memory.manifest, host)
            first.let(3)
            await until(lambda: done(host, 1) == 768 * KIB)
            first.offer.withdraw("the test ends it")
            assert "the test ends it" in failed(await host.answer(), "source")
            host.begin(memory.manifest, other)
            for one in (host, after):
                answer = await one.answer()
                assert isinstance(answer, VersionFetched)
                assert answer.nbytes == memory.manifest.nbytes
            assert second.asked[0].ranges == ((768 * KIB, memory.manifest.nbytes),)
            assert host.payload(1) == after.payload(1) == memory.payload


async def test_another_source_overtakes_the_first() -> None:
    with versions(1) as (memory,):
        async with (
            hosts(1) as (host,),
            tapped(memory) as (slow, address),
            tapped(memory) as (fast, other),
        ):
            slow.let(2)
            fast.let_all()
            host.begin(memory.manifest, address)
            await until(lambda: done(host, 1) == 512 * KIB)
            host.begin(memory.manifest, other)
            assert "overtaken" in failed(await host.answer(), "source")
            answer = await host.answer()
            assert isinstance(answer, VersionFetched)
            assert answer.nbytes == memory.manifest.nbytes
            # Two at once, of which the first never gets to begin.
            host.begin(memory.manifest, address)
            host.begin(memory.manifest, other)
            assert "overtaken" in failed(await host.answer(), "source")
            assert isinstance(await host.answer(), VersionFetched)


async def test_a_dead_masters_successor_becomes_the_master_and_the_rest_do_not_notice() -> None:
    with versions(2) as (old, new):
        async with (
            hosts(3) as (second, third, fourth),
            tapped(new, piece=2048 * KIB) as (master, address),
        ):
            for host, source in ((second, None), (third, second), (fourth, third)):
                await host.take(old.manifest, source)
            master.let(1)
            second.begin(new.manifest, address, base_id=1, keep=(1,))
            third.begin(new.manifest, second, base_id=1, keep=(1,))
            fourth.begin(new.manifest, third, base_id=1, keep=(1,))
            await until(lambda: done(fourth, 2) == 2048 * KIB)
            master.offer.withdraw("dead")
            failed(await second.answer(), "source")
            second.begin(new.manifest, base_id=1, keep=(1,))
            answers = [await host.answer() for host in (second, third, fourth)]
            assert all(isinstance(answer, VersionFetched) for answer in answers), answers
            assert {host.payload(2) for host in (second, third, fourth)} == {new.payload}
            # What came before is not sent again, and the rest came as changes.
            assert isinstance(answers[2], VersionFetched)
            assert (
                2048 * KIB
                < answers[2].nbytes
                < 2048 * KIB + (new.manifest.nbytes - 2048 * KIB) / 10
            )


async def test_a_source_that_is_not_there_and_a_wrong_secret() -> None:
    with versions(1) as (memory,):
        async with hosts(2) as (host, source):
            await source.take(memory.manifest)
            wrong = msgspec.structs.replace(source.address, secret=b"guess")
            assert "secret" in failed(await host.take(memory.manifest, wrong), "source")
            nobody = RelayAddress(host="127.0.0.1", port=1, secret=b"")
            assert "cannot be reached" in failed(await host.take(memory.manifest, nobody), "source")
            assert isinstance(await host.take(memory.manifest, source), VersionFetched)


async def test_nothing_comes_and_it_says_so_again_and_again_and_goes_on() -> None:
    """From a source that has taken the connection and says nothing; another one has it."""
    silent = asyncio.Event()

    async def say_nothing(_: Channel) -> None:
        await silent.wait()

    listener = await Tcp(silent_s=30.0).listen("127.0.0.1", say_nothing)
    try:
        with versions(1) as (memory,):
            async with hosts(2) as (source, host):
                await source.take(memory.manifest)
                host.begin(memory.manifest, listener.address)
                await until(lambda: len(host.stalls) > 1)
                assert {(word.weights_id, word.source) for word in host.stalls} == {
                    (1, listener.address)
                }
                assert host.answers.empty()
                host.begin(memory.manifest, source)
                answers = [await host.answer(), await host.answer()]
                assert [type(answer) for answer in answers] == [VersionFailed, VersionFetched]
    finally:
        await listener.close()


async def test_a_source_that_gives_little_by_little_does_not_stall() -> None:
    """A piece may take as long as it likes, as long as bytes come; so may a source that
    waits itself.
    """
    with versions(1) as (memory,):
        sent, total, over = 0, memory.manifest.nbytes, asyncio.Event()

        async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """To the relay's own socket, a slice at a time."""
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
                await asyncio.sleep(2.0 * len(data) / total)
            await task
            for end in (writer, inner):
                end.close()
                await end.wait_closed()
            over.set()

        async with hosts(2) as (source, host):
            await source.take(memory.manifest, chunk_bytes=1 << 30)
            server = await asyncio.start_server(drip, "127.0.0.1", 0)
            async with server:
                address = msgspec.structs.replace(
                    source.address, host="127.0.0.1", port=server.sockets[0].getsockname()[1]
                )
                assert isinstance(await host.take(memory.manifest, address), VersionFetched)
                await over.wait()
        assert sent > total
        assert host.stalls == []


async def test_who_waits_hears_that_its_source_lives() -> None:
    with versions(1) as (memory,):
        async with hosts(1) as (host,), tapped(memory) as (slow, address):
            host.begin(memory.manifest, address)
            await asyncio.sleep(2 * STALL_BEATS * HEARTBEAT_S)
            slow.let_all()
            assert isinstance(await host.answer(), VersionFetched)
            assert host.stalls == []


async def test_a_base_that_nobody_has() -> None:
    with versions(2) as (old, new):
        async with hosts(2) as (master, host):
            await master.take(old.manifest)
            assert "weights id 7 is not here" in failed(
                await master.take(new.manifest, base_id=7, keep=(1,)), "base"
            )
            assert "weights id 1 is not here" in failed(
                await host.take(new.manifest, master, base_id=1), "base"
            )
            assert master.payload(1) == old.payload
            assert isinstance(await master.take(new.manifest, keep=(1,)), VersionFetched)
            assert isinstance(await host.take(new.manifest, master), VersionFetched)


async def test_a_base_of_another_content_is_not_used() -> None:
    """Its changes would not be ours: what comes is the whole."""
    other = Memory(changed(payload_of(SHAPES, seed=0), seed=99), weights_id=1, tensors=SHAPES)
    with versions(2) as (old, new):
        async with hosts(2) as (master, host):
            await master.take(old.manifest)
            await host.take(other.manifest)
            await master.take(new.manifest, base_id=1, keep=(1,))
            answer = await host.take(new.manifest, master, base_id=1, keep=(1,))
            assert isinstance(answer, VersionFetched)
            assert answer.nbytes == new.manifest.nbytes
            assert (host.payload(1), host.payload(2)) == (other.payload, new.payload)
    other.close()


async def test_a_source_without_the_changes_gives_the_whole() -> None:
    """And whoever waits for changes further down gets it too."""
    with versions(2) as (old, new):
        async with hosts(3) as (master, second, third):
            for host, source in ((master, None), (second, master), (third, second)):
                await host.take(old.manifest, source)
            third.begin(new.manifest, second, base_id=1, keep=(1,))
            second.begin(new.manifest, master, base_id=1, keep=(1,))
            await master.take(new.manifest, keep=(1,))
            for host in (second, third):
                answer = await host.answer()
                assert isinstance(answer, VersionFetched)
                assert answer.nbytes == new.manifest.nbytes
                assert host.payload(2) == new.payload


async def test_changes_are_kept_only_of_the_newest_versions() -> None:
    with versions(5) as memories:
        async with hosts(2) as (master, host):
            everything = tuple(range(1, 6))
            for number, memory in enumerate(memories):
                base_id = number or None
                answer = await master.take(memory.manifest, base_id=base_id, keep=everything)
                assert isinstance(answer, VersionFetched)
                await host.take(memory.manifest, master, base_id=base_id, keep=everything)
            for weights_id in everything:
                changes = host.relay._offers[weights_id]._changes
                assert bool(changes) == (weights_id > 3)
                assert host.payload(weights_id) == memories[weights_id - 1].payload
            await host.take(memories[-1].manifest, keep=())
            assert list(host.relay._offers) == [5]


async def test_two_trainers_at_once() -> None:
    with versions(2) as (mine, _):
        theirs = Memory(changed(mine.payload, seed=5), weights_id=1, tensors=SHAPES)
        async with hosts(3) as (one, two, three):
            await one.take(mine.manifest)
            assert "two trainers" in failed(await one.take(theirs.manifest), "broken")
            assert one.payload(1) == mine.payload
            await two.take(theirs.manifest)
            assert "two trainers" in failed(await three.take(mine.manifest, two), "source")
            # While the first is still coming, its rival waits for what becomes of it.
            async with tapped(mine) as (tap, address):
                three.begin(mine.manifest, address)
                three.begin(theirs.manifest, two)
                tap.let_all()
                assert isinstance(await three.answer(), VersionFetched)
                assert "two trainers" in failed(await three.answer(), "broken")
                assert three.payload(1) == mine.payload
        theirs.close()


async def test_a_manifest_for_another_model() -> None:
    shapes = tensors_of(100)
    with versions(1) as (memory,), versions(1, tensors=shapes, first=2) as (other,):
        async with hosts(1) as (host,):
            await host.take(memory.manifest)
            assert "another model" in failed(await host.take(other.manifest, keep=(1,)), "broken")
            assert host.payload(1) == memory.payload


@pytest.mark.parametrize("sealed", [True, False])
async def test_a_payload_that_is_not_what_its_manifest_says(sealed: bool) -> None:
    with versions(1) as (good,):
        bad = Memory(changed(good.payload, seed=3), weights_id=2, tensors=SHAPES, sealed=sealed)
        lies = msgspec.structs.replace(bad.manifest, digest=good.manifest.digest)
        async with hosts(2) as (host, after):
            await host.take(good.manifest)
            after.begin(lies, host)
            assert "digest" in failed(await host.take(lies, keep=(1,)), "broken")
            assert isinstance(await after.answer(), VersionFailed)
            assert host.payload(1) == good.payload
            assert host.payload(2) is after.payload(2) is None
            assert isinstance(await host.take(bad.manifest, keep=(1,)), VersionFetched)
        bad.close()


async def test_a_torn_publication() -> None:
    with versions(2) as (good, next_):
        torn = msgspec.structs.replace(
            next_.manifest, location=good.manifest.location, nbytes=next_.manifest.nbytes + 64
        )
        async with hosts(1) as (host,):
            await host.take(good.manifest)
            assert "bytes, the manifest says" in failed(await host.take(torn, keep=(1,)), "source")
            gone = msgspec.structs.replace(next_.manifest, location="/proc/1/fd/9999")
            assert "cannot open" in failed(await host.take(gone, keep=(1,)), "source")
            assert host.payload(1) == good.payload


async def test_a_version_that_the_next_take_does_not_keep_is_abandoned() -> None:
    with versions(2) as (one, two):
        async with hosts(1) as (host,), tapped(one) as (tap, address):
            tap.let(1)
            host.begin(one.manifest, address)
            await until(lambda: done(host, 1) > 0)
            assert isinstance(await _second(host, two), VersionFetched)
            assert host.relay._coming == {}
            assert host.payload(1) is None


async def _second(host: Host, memory: Memory) -> VersionFetched | VersionFailed:
    host.begin(memory.manifest)
    answers = [await host.answer(), await host.answer()]
    gone = next(answer for answer in answers if isinstance(answer, VersionFailed))
    assert "does not keep it" in failed(gone, "source")
    return next(answer for answer in answers if isinstance(answer, VersionFetched))


async def test_what_has_come_of_a_version_waits_only_a_while() -> None:
    with versions(1) as (memory,):
        async with hosts(2, linger_s=0.2) as (host, after), tapped(memory) as (tap, address):
            tap.let(2)
            host.begin(memory.manifest, address)
            after.begin(memory.manifest, host)
            await until(lambda: done(after, 1) == 512 * KIB)
            tap.offer.withdraw("gone")
            failed(await host.answer(), "source")
            assert "another source" in failed(await after.answer(), "source")
            await until(lambda: not host.relay._coming and not after.relay._coming)


async def test_nothing_at_all_is_a_version_too() -> None:
    with versions(1, tensors=()) as (memory,):
        async with hosts(2) as (one, two):
            assert isinstance(await one.take(memory.manifest), VersionFetched)
            assert isinstance(await two.take(memory.manifest, one), VersionFetched)
            assert two.payload(1) == b""


async def test_closing_leaves_nothing() -> None:
    gc.collect()  # what other tests have forgotten
    before = len(os.listdir("/proc/self/fd"))
    with versions(2) as (old, new):
        async with hosts(3) as (one, two, three), tapped(new) as (tap, address):
            await one.take(old.manifest)
            tap.let(1)
            one.begin(new.manifest, address, keep=(1,))
            two.begin(new.manifest, one)
            three.begin(new.manifest, two)
            await until(lambda: done(two, 2) > 0)
    await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) == before
