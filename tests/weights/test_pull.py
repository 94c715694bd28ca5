"""Parts of a version are read as requested, whatever their ranges and whenever they
arrive.
"""

import asyncio
import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from rollweave.schema.weights import RelayAddress, WeightManifest
from rollweave.weights.serve import pull
from rollweave.weights.tcp import Channel, Tcp
from rollweave.weights.transport import Body, FetchError, Range, RawRanges, Request
from tests.support.properties import examples
from tests.support.weight_host import tapped, tensors_of, versions


async def read(
    address: RelayAddress, manifest: WeightManifest, ranges: list[Range]
) -> tuple[bytearray, list[Range]]:
    """Return the payload, with zeros where it was not read, and the pieces."""
    data, pieces = bytearray(manifest.nbytes), list[Range]()
    view = memoryview(data)
    await pull(
        Tcp(idle_timeout_s=5.0),
        address,
        manifest,
        ranges,
        lambda start, stop: view[start:stop],
        on_piece=lambda start, stop: pieces.append((start, stop)),
    )
    return data, pieces


@settings(max_examples=examples(25))
@given(
    edges=st.lists(st.integers(0, 130_007 * 4), max_size=30).map(sorted),
    bytewise=st.tuples(st.integers(0, 500_000), st.integers(0, 300)),
    early=st.booleans(),
)
def test_reads_exactly_the_requested_ranges(
    edges: list[int], bytewise: tuple[int, int], early: bool
) -> None:
    """Long and short ranges are read, before or after the bytes arrive, and no
    others.
    """
    start, count = bytewise
    ranges = [*itertools.pairwise(edges)][::2] or [
        (start + 2 * number, start + 2 * number + 1) for number in range(count)
    ]

    async def run() -> tuple[bytearray, list[Range], bytes]:
        with versions(1, tensors=tensors_of(40_000, 7, 90_000)) as (memory,):
            async with tapped(memory) as (source, address):
                if not early:
                    source.allow_all()
                reading = asyncio.create_task(read(address, memory.manifest, ranges))
                await asyncio.sleep(0)
                source.allow_all()
                return *(await reading), memory.payload

    data, pieces, payload = asyncio.run(run())
    expected = bytearray(len(payload))
    for low, high in ranges:
        expected[low:high] = payload[low:high]
    assert data == expected
    assert sum(high - low for low, high in pieces) == sum(high - low for low, high in ranges)


async def test_short_ranges_come_in_one_message() -> None:
    """A host may lack the rows of many small tensors."""
    ranges = tuple((start, start + 100) for start in range(0, 500_000, 200))
    with versions(1) as (memory,):
        async with tapped(memory) as (source, address):
            source.allow_all()
            channel = await Tcp(idle_timeout_s=5.0).connect(address)
            await channel.send(
                Request(
                    publication_id=1,
                    digest=memory.manifest.digest,
                    nbytes=memory.manifest.nbytes,
                    ranges=ranges,
                )
            )
            message, _ = await channel.receive(lambda _, nbytes: memoryview(bytearray(nbytes)))
            assert message == RawRanges(ranges=ranges)
            channel.close()


@pytest.mark.parametrize(
    "ranges", [((0, 4), (2, 6)), ((4, 8), (0, 4)), ((0, 4), (4, 4), (4, 8)), ((8, 12), (12, 16))]
)
async def test_pieces_that_were_not_requested_are_refused(ranges: tuple[Range, ...]) -> None:
    async def lie(channel: Channel) -> None:
        await channel.receive()
        await channel.send(RawRanges(ranges=ranges), Body.of(bytes(8)))

    listener = await Tcp(idle_timeout_s=5.0).listen("127.0.0.1", lie)
    with versions(1) as (memory,):
        with pytest.raises(FetchError, match="not wanted, or were sent twice") as error:
            await read(listener.address, memory.manifest, [(0, 10)])
        assert error.value.reason == "broken"
    await listener.close()
