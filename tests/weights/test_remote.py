"""A remote store is written in parts by several senders while it is read, and never
shows an incomplete version.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from rollweave.schema.weights import RelayAddress, VersionFetched, WeightManifest
from rollweave.weights.protocol import Base, FetchError, Missing, Push, Range, Raw, RawRanges
from rollweave.weights.pushpull import DeltaBase, Transfer, pull, push, split_payload, transfer_cost
from rollweave.weights.remote import RemoteStore
from rollweave.weights.tcp import Tcp
from rollweave.weights.transport import Body, Channel
from tests.support.properties import examples
from tests.weights.host import KIB, SHAPES, Memory, changed, hosts, tensors_of, versions
from tests.weights.wires import wired

BUCKET = 256 * KIB


@asynccontextmanager
async def running_store(
    *, keep: int = 2, linger_s: float = 60.0
) -> AsyncIterator[tuple[RemoteStore, RelayAddress]]:
    store = RemoteStore(Tcp(idle_timeout_s=5.0), keep=keep, linger_s=linger_s)
    try:
        yield store, await store.listen("127.0.0.1")
    finally:
        await store.close()


async def push_version(
    address: RelayAddress,
    memory: Memory,
    *,
    ranges: list[Range] | None = None,
    since: Memory | None = None,
) -> Transfer:
    view = memoryview(memory.payload)
    delta_base = None
    if since is not None:
        base = Base(weights_id=since.manifest.weights_id, digest=since.manifest.digest)
        delta_base = DeltaBase(base, memoryview(since.payload).__getitem__)
    return await push(
        Tcp(idle_timeout_s=5.0),
        address,
        memory.manifest,
        view.__getitem__,
        ranges=ranges,
        since=delta_base,
        bucket_bytes=BUCKET,
    )


async def read(
    address: RelayAddress, manifest: WeightManifest, ranges: list[Range] | None = None
) -> tuple[bytearray, list[Transfer]]:
    """Return the payload, with zeros where it was not read."""
    data = bytearray(manifest.nbytes)
    view = memoryview(data)
    ranges_ = [(0, manifest.nbytes)] if ranges is None else ranges
    transfers = await pull(
        Tcp(idle_timeout_s=5.0), address, manifest, ranges_, lambda start, stop: view[start:stop]
    )
    return data, transfers


async def test_pushes_and_pulls_overlap() -> None:
    """Readers connect first, senders share the work, and one reader pulls only a part."""
    with versions(1) as (memory,):
        async with running_store() as (store, address):
            nbytes = memory.manifest.nbytes
            own = [(1000, 300_000), (900_001, 900_002)]
            everything = asyncio.create_task(read(address, memory.manifest))
            part = asyncio.create_task(read(address, memory.manifest, own))
            parts = split_payload(memory.manifest, 3, bucket_bytes=BUCKET)
            pushes = await asyncio.gather(
                *(push_version(address, memory, ranges=ranges) for ranges in parts)
            )
            assert sum(one.nbytes for one in pushes) == nbytes
            data, pulls = await everything
            assert bytes(data) == memory.payload
            assert sum(one.nbytes for one in pulls) == nbytes
            data, _ = await part
            for start, stop in own:
                assert data[start:stop] == memory.payload[start:stop]
            assert data.count(0) >= nbytes - 300_000
            assert store.ids() == [1]
            cost = transfer_cost(pushes=pushes, pulls=pulls)
            assert cost.push_s > 0
            assert 0 <= cost.exposed_pull_s <= cost.accumulated_pull_s <= cost.naive_s


async def test_relays_fetch_pushed_deltas_from_the_store() -> None:
    with versions(2) as (old, new):
        async with running_store() as (_, address), hosts(2) as (one, other):
            assert (await push_version(address, old)).nbytes == old.manifest.nbytes
            assert isinstance(await one.fetch(old.manifest, address), VersionFetched)
            parts = split_payload(new.manifest, 2, bucket_bytes=BUCKET)
            pushes = await asyncio.gather(
                *(push_version(address, new, ranges=ranges, since=old) for ranges in parts)
            )
            assert sum(push.nbytes for push in pushes) < new.manifest.nbytes / 10
            answer = await one.fetch(new.manifest, address, base_id=1, keep=(1,))
            assert isinstance(answer, VersionFetched)
            assert answer.nbytes < new.manifest.nbytes / 10
            answer = await other.fetch(new.manifest, address)
            assert isinstance(answer, VersionFetched)
            assert answer.nbytes == new.manifest.nbytes
            assert one.payload(2) == other.payload(2) == new.payload


@settings(max_examples=examples(25))
@given(
    data=st.data(),
    sizes=st.lists(st.integers(0, 200_000), min_size=1, max_size=4),
    senders=st.integers(1, 4),
)
def test_assembles_any_division_into_parts(
    data: st.DataObject, sizes: list[int], senders: int
) -> None:
    """Whatever the senders' ranges, raw or as deltas, the store has the bytes of a plain
    copy.
    """
    shapes = tensors_of(*sizes)
    with versions(2, tensors=shapes) as (old, new):
        nbytes = new.manifest.nbytes
        edges = sorted({0, nbytes, *data.draw(st.lists(st.integers(0, nbytes), max_size=6))})
        parts: list[list[Range]] = [[] for _ in range(senders)]
        for part in itertools.pairwise(edges):
            parts[data.draw(st.integers(0, senders - 1))].append(part)
        kinds = [data.draw(st.booleans()) for _ in parts]

        async def push_and_read() -> None:
            async with running_store() as (_, address):
                await push_version(address, old)
                await asyncio.gather(
                    *(
                        push_version(address, new, ranges=ranges, since=old if kind else None)
                        for ranges, kind in zip(parts, kinds, strict=True)
                    )
                )
                assert bytes((await read(address, new.manifest))[0]) == new.payload

        asyncio.run(push_and_read())


@settings(max_examples=examples(25))
@given(
    edges=st.lists(st.integers(0, 130_007 * 4), max_size=30).map(sorted),
    bytewise=st.tuples(st.integers(0, 500_000), st.integers(0, 300)),
    early=st.booleans(),
)
def test_reads_exactly_the_requested_ranges(
    edges: list[int], bytewise: tuple[int, int], early: bool
) -> None:
    """Long and short ranges are read, before or after the bytes arrive, and no others."""
    start, count = bytewise
    ranges = [*itertools.pairwise(edges)][::2] or [
        (start + 2 * number, start + 2 * number + 1) for number in range(count)
    ]

    async def push_then_read() -> tuple[bytearray, bytes]:
        with versions(1, tensors=tensors_of(40_000, 7, 90_000)) as (memory,):
            async with running_store() as (_, address):
                if early:
                    reading = asyncio.create_task(read(address, memory.manifest, ranges))
                    await push_version(address, memory)
                    data, moved = await reading
                else:
                    await push_version(address, memory)
                    data, moved = await read(address, memory.manifest, ranges)
                assert sum(one.nbytes for one in moved) == sum(
                    stop - start for start, stop in ranges
                )
                return data, memory.payload

    data, payload = asyncio.run(push_then_read())
    expected = bytearray(len(payload))
    for low, high in ranges:
        expected[low:high] = payload[low:high]
    assert data == expected


async def test_sends_short_ranges_together() -> None:
    """A column of a matrix has thousands of ranges, but takes few messages."""
    with versions(1) as (memory,):
        async with running_store() as (_, address):
            await push_version(address, memory)
            ranges = [(start, start + 100) for start in range(0, 500_000, 200)]
            data, moved = await read(address, memory.manifest, ranges)
            assert len(moved) <= 3
            assert all(data[start:stop] == memory.payload[start:stop] for start, stop in ranges)


@pytest.mark.parametrize(
    "ranges", [((0, 4), (2, 6)), ((4, 8), (0, 4)), ((0, 4), (4, 4), (4, 8)), ((8, 12), (12, 16))]
)
async def test_rejects_pieces_that_were_not_requested(ranges: tuple[Range, ...]) -> None:
    async def lie(channel: Channel) -> None:
        await channel.receive()
        await channel.send(RawRanges(ranges=ranges), Body.of(bytes(8)))

    listener = await Tcp(idle_timeout_s=5.0).listen("127.0.0.1", lie)
    with versions(1) as (memory,):
        with pytest.raises(FetchError, match="not wanted, or were sent twice") as error:
            await read(listener.address, memory.manifest, [(0, 10)])
        assert reason_of(error) == "broken"
    await listener.close()


async def test_resumes_an_interrupted_push() -> None:
    with versions(1) as (memory,):
        async with running_store() as (store, address):
            channel = await Tcp(idle_timeout_s=5.0).connect(address)
            await channel.send(
                Push(manifest=memory.manifest, ranges=((0, memory.manifest.nbytes),))
            )
            await channel.receive()
            await channel.send(Raw(start=0, stop=BUCKET), Body.of(memory.payload[:BUCKET]))
            await channel.receive()
            channel.close()
            assert store.ids() == []
            again = await push_version(address, memory)
            assert again.nbytes == memory.manifest.nbytes - BUCKET
            assert bytes((await read(address, memory.manifest))[0]) == memory.payload


def reason_of(error: pytest.ExceptionInfo[FetchError]) -> str:
    return error.value.reason


async def test_rejected_pushes_change_nothing() -> None:
    with versions(2) as (old, new):
        async with running_store() as (store, address):
            await push_version(address, old)
            # The digest is not the payload's: sender and reader are informed.
            lies = msgspec.structs.replace(new.manifest, digest="0" * 32)
            reading = asyncio.create_task(read(address, lies))
            with pytest.raises(FetchError, match="digest") as error:
                await push(
                    Tcp(), address, lies, memoryview(new.payload).__getitem__, bucket_bytes=BUCKET
                )
            assert reason_of(error) == "broken"
            with pytest.raises(FetchError, match="digest"):
                await reading
            # The base is missing, or has another content.
            with pytest.raises(FetchError, match="not stored") as error:
                await push_version(address, old, since=new)
            assert reason_of(error) == "base"
            rival = Memory(changed(old.payload, seed=7), weights_id=1, tensors=SHAPES)
            with pytest.raises(FetchError, match="another content") as error:
                await push_version(address, new, since=rival)
            assert reason_of(error) == "base"
            # Two trainers, and another model.
            with pytest.raises(FetchError, match="two trainers") as error:
                await push_version(address, rival)
            assert reason_of(error) == "broken"
            with versions(1, tensors=tensors_of(5), first=3) as (other,):
                with pytest.raises(FetchError, match="another model") as error:
                    await push_version(address, other)
                assert reason_of(error) == "broken"
            rival.close()
            assert store.ids() == [1]
            assert store._uploads == {}
            assert bytes((await read(address, old.manifest))[0]) == old.payload
            await push_version(address, new)
            assert store.ids() == [1, 2]


async def test_rejects_two_trainers_with_one_id() -> None:
    with versions(1) as (own,):
        other = Memory(changed(own.payload, seed=7), weights_id=1, tensors=SHAPES)
        async with running_store() as (store, address):
            results = await asyncio.gather(
                push_version(address, own), push_version(address, other), return_exceptions=True
            )
            refused = [result for result in results if isinstance(result, FetchError)]
            assert len(refused) == 1
            assert "two trainers" in str(refused[0])
            assert store.ids() == [1]
        other.close()


async def test_rejects_overlapping_senders() -> None:
    with versions(1) as (memory,):
        async with running_store() as (store, address):
            half = asyncio.create_task(push_version(address, memory, ranges=[(0, BUCKET)]))
            channel = await Tcp(idle_timeout_s=5.0).connect(address)
            await channel.send(
                Push(manifest=memory.manifest, ranges=((0, memory.manifest.nbytes),))
            )
            while True:  # until the other sender's bucket has arrived
                other = await Tcp(idle_timeout_s=5.0).connect(address)
                await other.send(Push(manifest=memory.manifest, ranges=((0, BUCKET),)))
                ranges_, _ = await other.receive()
                other.close()
                if ranges_ == Missing(ranges=()):
                    break
            await channel.receive()
            await channel.send(Raw(start=100, stop=200), Body.of(memory.payload[100:200]))
            refusal, _ = await channel.receive()
            assert "must not overlap" in str(refusal)
            channel.close()
            assert not half.done()
            await push_version(address, memory)
            await half
            assert store.ids() == [1]


async def test_detects_a_flipped_bit_and_a_truncated_bucket() -> None:
    with versions(1) as (memory,):
        async with running_store() as (store, address):
            await push_version(address, memory)
            async with wired(address, "flip", 500_000) as bad:
                with pytest.raises(FetchError, match="damaged"):
                    await read(bad, memory.manifest)
            async with wired(address, "cut", 500_000) as bad:
                with pytest.raises(FetchError, match="closed the connection"):
                    await read(bad, memory.manifest)
            assert store.ids() == [1]


async def test_keeps_the_newest_versions_and_drops_incomplete_ones() -> None:
    with versions(3) as memories:
        async with running_store(keep=2, linger_s=0.3) as (store, address):
            for memory in memories:
                await push_version(address, memory)
            assert store.ids() == [2, 3]
            with versions(1, first=9) as (torn,):
                with pytest.raises(
                    FetchError, match=r"is incomplete, and nothing of it was sent for 0.3 s"
                ):
                    await push_version(address, torn, ranges=[(0, BUCKET)])
                assert store.ids() == [2, 3]
                assert store._uploads == {}


def test_hidden_transfers_are_not_exposed() -> None:
    pushes = [Transfer(0.0, 4.0, 1), Transfer(1.0, 5.0, 1)]
    pulls = [Transfer(3.0, 6.0, 1), Transfer(4.0, 7.0, 1), Transfer(9.0, 10.0, 1)]
    cost = transfer_cost(pushes=pushes, pulls=pulls, rollout=[(5.5, 6.5)])
    assert (cost.push_s, cost.accumulated_pull_s, cost.naive_s) == (5.0, 5.0, 10.0)
    assert cost.exposed_pull_s == pytest.approx(0.5 + 0.5 + 1.0)
    assert transfer_cost(pushes=[], pulls=[]).naive_s == 0.0
