"""A store near the engines: written in parts by several at once, read meanwhile, and
never half a version.
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
async def stored(
    *, keep: int = 2, linger_s: float = 60.0
) -> AsyncIterator[tuple[RemoteStore, RelayAddress]]:
    store = RemoteStore(Tcp(silent_s=5.0), keep=keep, linger_s=linger_s)
    try:
        yield store, await store.listen("127.0.0.1")
    finally:
        await store.close()


async def sent(
    address: RelayAddress,
    memory: Memory,
    *,
    ranges: list[Range] | None = None,
    since: Memory | None = None,
) -> Transfer:
    view = memoryview(memory.payload)
    change = None
    if since is not None:
        base = Base(weights_id=since.manifest.weights_id, digest=since.manifest.digest)
        change = DeltaBase(base, memoryview(since.payload).__getitem__)
    return await push(
        Tcp(silent_s=5.0),
        address,
        memory.manifest,
        view.__getitem__,
        ranges=ranges,
        since=change,
        bucket_bytes=BUCKET,
    )


async def read(
    address: RelayAddress, manifest: WeightManifest, ranges: list[Range] | None = None
) -> tuple[bytearray, list[Transfer]]:
    """The payload, with zeros where it was not read."""
    data = bytearray(manifest.nbytes)
    view = memoryview(data)
    wanted = [(0, manifest.nbytes)] if ranges is None else ranges
    transfers = await pull(
        Tcp(silent_s=5.0), address, manifest, wanted, lambda start, stop: view[start:stop]
    )
    return data, transfers


async def test_push_and_pull_at_once() -> None:
    """Those who read are there first; the senders share the work; a reader may have
    only its own bytes.
    """
    with versions(1) as (memory,):
        async with stored() as (store, address):
            nbytes = memory.manifest.nbytes
            mine = [(1000, 300_000), (900_001, 900_002)]
            everything = asyncio.create_task(read(address, memory.manifest))
            part = asyncio.create_task(read(address, memory.manifest, mine))
            parts = split_payload(memory.manifest, 3, bucket_bytes=BUCKET)
            pushes = await asyncio.gather(
                *(sent(address, memory, ranges=ranges) for ranges in parts)
            )
            assert sum(one.nbytes for one in pushes) == nbytes
            data, pulls = await everything
            assert bytes(data) == memory.payload
            assert sum(one.nbytes for one in pulls) == nbytes
            data, _ = await part
            for start, stop in mine:
                assert data[start:stop] == memory.payload[start:stop]
            assert data.count(0) >= nbytes - 300_000
            assert store.ids() == [1]
            cost = transfer_cost(pushes=pushes, pulls=pulls)
            assert cost.push_s > 0
            assert 0 <= cost.exposed_pull_s <= cost.accumulated_pull_s <= cost.naive_s


async def test_changes_are_pushed_and_relays_take_them_from_the_store() -> None:
    with versions(2) as (old, new):
        async with stored() as (_, address), hosts(2) as (one, other):
            assert (await sent(address, old)).nbytes == old.manifest.nbytes
            assert isinstance(await one.take(old.manifest, address), VersionFetched)
            parts = split_payload(new.manifest, 2, bucket_bytes=BUCKET)
            pushes = await asyncio.gather(
                *(sent(address, new, ranges=ranges, since=old) for ranges in parts)
            )
            assert sum(push.nbytes for push in pushes) < new.manifest.nbytes / 10
            answer = await one.take(new.manifest, address, base_id=1, keep=(1,))
            assert isinstance(answer, VersionFetched)
            assert answer.nbytes < new.manifest.nbytes / 10
            answer = await other.take(new.manifest, address)
            assert isinstance(answer, VersionFetched)
            assert answer.nbytes == new.manifest.nbytes
            assert one.payload(2) == other.payload(2) == new.payload


@settings(max_examples=examples(25))
@given(
    data=st.data(),
    sizes=st.lists(st.integers(0, 200_000), min_size=1, max_size=4),
    senders=st.integers(1, 4),
)
def test_any_parts(data: st.DataObject, sizes: list[int], senders: int) -> None:
    """Whoever sends what, whole or as changes, in whatever ranges: the store has the
    bytes of a plain copy.
    """
    shapes = tensors_of(*sizes)
    with versions(2, tensors=shapes) as (old, new):
        nbytes = new.manifest.nbytes
        edges = sorted({0, nbytes, *data.draw(st.lists(st.integers(0, nbytes), max_size=6))})
        parts: list[list[Range]] = [[] for _ in range(senders)]
        for part in itertools.pairwise(edges):
            parts[data.draw(st.integers(0, senders - 1))].append(part)
        kinds = [data.draw(st.booleans()) for _ in parts]

        async def all_of_them() -> None:
            async with stored() as (_, address):
                await sent(address, old)
                await asyncio.gather(
                    *(
                        sent(address, new, ranges=ranges, since=old if kind else None)
                        for ranges, kind in zip(parts, kinds, strict=True)
                    )
                )
                assert bytes((await read(address, new.manifest))[0]) == new.payload

        asyncio.run(all_of_them())


@settings(max_examples=examples(25))
@given(
    edges=st.lists(st.integers(0, 130_007 * 4), max_size=30).map(sorted),
    bytewise=st.tuples(st.integers(0, 500_000), st.integers(0, 300)),
    early=st.booleans(),
)
def test_any_ranges_are_read(edges: list[int], bytewise: tuple[int, int], early: bool) -> None:
    """Long and short ones, before the bytes are there or after: those bytes come, and
    no others.
    """
    start, count = bytewise
    ranges = [*itertools.pairwise(edges)][::2] or [
        (start + 2 * number, start + 2 * number + 1) for number in range(count)
    ]

    async def both() -> tuple[bytearray, bytes]:
        with versions(1, tensors=tensors_of(40_000, 7, 90_000)) as (memory,):
            async with stored() as (_, address):
                if early:
                    reading = asyncio.create_task(read(address, memory.manifest, ranges))
                    await sent(address, memory)
                    data, moved = await reading
                else:
                    await sent(address, memory)
                    data, moved = await read(address, memory.manifest, ranges)
                assert sum(one.nbytes for one in moved) == sum(
                    stop - start for start, stop in ranges
                )
                return data, memory.payload

    data, payload = asyncio.run(both())
    expected = bytearray(len(payload))
    for low, high in ranges:
        expected[low:high] = payload[low:high]
    assert data == expected


async def test_short_ranges_travel_together() -> None:
    """A column of a matrix is thousands of ranges, and not as many messages."""
    with versions(1) as (memory,):
        async with stored() as (_, address):
            await sent(address, memory)
            ranges = [(start, start + 100) for start in range(0, 500_000, 200)]
            data, moved = await read(address, memory.manifest, ranges)
            assert len(moved) <= 3
            assert all(data[start:stop] == memory.payload[start:stop] for start, stop in ranges)


@pytest.mark.parametrize(
    "ranges", [((0, 4), (2, 6)), ((4, 8), (0, 4)), ((0, 4), (4, 4), (4, 8)), ((8, 12), (12, 16))]
)
async def test_pieces_that_nobody_asked_for(ranges: tuple[Range, ...]) -> None:
    async def lie(channel: Channel) -> None:
        await channel.receive()
        await channel.send(RawRanges(ranges=ranges), Body.of(bytes(8)))

    listener = await Tcp(silent_s=5.0).listen("127.0.0.1", lie)
    with versions(1) as (memory,):
        with pytest.raises(FetchError, match="not wanted, or come twice") as error:
            await read(listener.address, memory.manifest, [(0, 10)])
        assert reason_of(error) == "broken"
    await listener.close()


async def test_a_push_that_broke_off_goes_on() -> None:
    with versions(1) as (memory,):
        async with stored() as (store, address):
            channel = await Tcp(silent_s=5.0).connect(address)
            await channel.send(
                Push(manifest=memory.manifest, ranges=((0, memory.manifest.nbytes),))
            )
            await channel.receive()
            await channel.send(Raw(start=0, stop=BUCKET), Body.of(memory.payload[:BUCKET]))
            await channel.receive()
            channel.close()
            assert store.ids() == []
            again = await sent(address, memory)
            assert again.nbytes == memory.manifest.nbytes - BUCKET
            assert bytes((await read(address, memory.manifest))[0]) == memory.payload


def reason_of(error: pytest.ExceptionInfo[FetchError]) -> str:
    return error.value.reason


async def test_bad_pushes_change_nothing() -> None:
    with versions(2) as (old, new):
        async with stored() as (store, address):
            await sent(address, old)
            # A digest that is not the payload's: who sends and who reads are told.
            lies = msgspec.structs.replace(new.manifest, digest="0" * 32)
            reading = asyncio.create_task(read(address, lies))
            with pytest.raises(FetchError, match="digest") as error:
                await push(
                    Tcp(), address, lies, memoryview(new.payload).__getitem__, bucket_bytes=BUCKET
                )
            assert reason_of(error) == "broken"
            with pytest.raises(FetchError, match="digest"):
                await reading
            # A base that it does not have, or has otherwise.
            with pytest.raises(FetchError, match="not here") as error:
                await sent(address, old, since=new)
            assert reason_of(error) == "base"
            rival = Memory(changed(old.payload, seed=7), weights_id=1, tensors=SHAPES)
            with pytest.raises(FetchError, match="another content") as error:
                await sent(address, new, since=rival)
            assert reason_of(error) == "base"
            # Two trainers, and another model.
            with pytest.raises(FetchError, match="two trainers") as error:
                await sent(address, rival)
            assert reason_of(error) == "broken"
            with versions(1, tensors=tensors_of(5), first=3) as (other,):
                with pytest.raises(FetchError, match="another model") as error:
                    await sent(address, other)
                assert reason_of(error) == "broken"
            rival.close()
            assert store.ids() == [1]
            assert store._growing == {}
            assert bytes((await read(address, old.manifest))[0]) == old.payload
            await sent(address, new)
            assert store.ids() == [1, 2]


async def test_two_trainers_at_once() -> None:
    with versions(1) as (mine,):
        theirs = Memory(changed(mine.payload, seed=7), weights_id=1, tensors=SHAPES)
        async with stored() as (store, address):
            results = await asyncio.gather(
                sent(address, mine), sent(address, theirs), return_exceptions=True
            )
            refused = [result for result in results if isinstance(result, FetchError)]
            assert len(refused) == 1
            assert "two trainers" in str(refused[0])
            assert store.ids() == [1]
        theirs.close()


async def test_senders_must_not_overlap() -> None:
    with versions(1) as (memory,):
        async with stored() as (store, address):
            half = asyncio.create_task(sent(address, memory, ranges=[(0, BUCKET)]))
            channel = await Tcp(silent_s=5.0).connect(address)
            await channel.send(
                Push(manifest=memory.manifest, ranges=((0, memory.manifest.nbytes),))
            )
            while True:  # until the other's bucket is there
                other = await Tcp(silent_s=5.0).connect(address)
                await other.send(Push(manifest=memory.manifest, ranges=((0, BUCKET),)))
                wanted, _ = await other.receive()
                other.close()
                if wanted == Missing(ranges=()):
                    break
            await channel.receive()
            await channel.send(Raw(start=100, stop=200), Body.of(memory.payload[100:200]))
            refusal, _ = await channel.receive()
            assert "must not overlap" in str(refusal)
            channel.close()
            assert not half.done()
            await sent(address, memory)
            await half
            assert store.ids() == [1]


async def test_a_flipped_bit_and_a_torn_bucket() -> None:
    with versions(1) as (memory,):
        async with stored() as (store, address):
            await sent(address, memory)
            async with wired(address, "flip", 500_000) as bad:
                with pytest.raises(FetchError, match="damaged"):
                    await read(bad, memory.manifest)
            async with wired(address, "cut", 500_000) as bad:
                with pytest.raises(FetchError, match="hung up"):
                    await read(bad, memory.manifest)
            assert store.ids() == [1]


async def test_only_the_newest_are_kept_and_what_nobody_finishes_is_dropped() -> None:
    with versions(3) as memories:
        async with stored(keep=2, linger_s=0.3) as (store, address):
            for memory in memories:
                await sent(address, memory)
            assert store.ids() == [2, 3]
            with versions(1, first=9) as (torn,):
                with pytest.raises(FetchError, match=r"for 0.3 s, and it is not whole"):
                    await sent(address, torn, ranges=[(0, BUCKET)])
                assert store.ids() == [2, 3]
                assert store._growing == {}


def test_what_is_hidden_is_not_exposed() -> None:
    pushes = [Transfer(0.0, 4.0, 1), Transfer(1.0, 5.0, 1)]
    pulls = [Transfer(3.0, 6.0, 1), Transfer(4.0, 7.0, 1), Transfer(9.0, 10.0, 1)]
    cost = transfer_cost(pushes=pushes, pulls=pulls, rollout=[(5.5, 6.5)])
    assert (cost.push_s, cost.accumulated_pull_s, cost.naive_s) == (5.0, 5.0, 10.0)
    assert cost.exposed_pull_s == pytest.approx(0.5 + 0.5 + 1.0)
    assert transfer_cost(pushes=[], pulls=[]).naive_s == 0.0
