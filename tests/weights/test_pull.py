"""Parts of a version are read as requested, whatever their ranges and whenever they
arrive.
"""

import asyncio
import itertools
import tomllib
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from rollweave.schema.weights import RelayAddress, WeightManifest
from rollweave.weights import transport
from rollweave.weights.serve import BATCH_BYTES, SHORT_BYTES, DeltaPiece, ServedVersion, pull
from rollweave.weights.tcp import Channel, Tcp
from tests.support.properties import examples
from tests.support.weight_host import tapped, tensors_of, versions

SERVED = tomllib.loads(Path(__file__).with_name("serving.toml").read_text())


async def read(
    address: RelayAddress, manifest: WeightManifest, ranges: list[transport.Range]
) -> tuple[bytearray, list[transport.Range]]:
    """Return the payload, with zeros where it was not read, and the pieces."""
    data, pieces = bytearray(manifest.nbytes), list[transport.Range]()
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

    async def run() -> tuple[bytearray, list[transport.Range], bytes]:
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


@pytest.mark.parametrize(
    "ranges", [((0, 4), (2, 6)), ((4, 8), (0, 4)), ((0, 4), (4, 4), (4, 8)), ((8, 12), (12, 16))]
)
async def test_pieces_that_were_not_requested_are_refused(
    ranges: tuple[transport.Range, ...],
) -> None:
    async def lie(channel: Channel) -> None:
        await channel.receive()
        await channel.send(transport.RawRanges(ranges=ranges), transport.Body.of(bytes(8)))

    listener = await Tcp(idle_timeout_s=5.0).listen("127.0.0.1", lie)
    with versions(1) as (memory,):
        with pytest.raises(transport.FetchError, match="not wanted, or were sent twice") as error:
            await read(listener.address, memory.manifest, [(0, 10)])
        assert error.value.reason == "broken"
    await listener.close()


async def test_serves_changes_where_it_has_them_and_else_raw_bytes() -> None:
    base, other = (transport.Base(publication_id=1, digest=digest) for digest in "ab")
    with versions(1) as (memory,):
        version = ServedVersion(memory.manifest, memory.fd)
        for start, stop, checksum in (
            (0, 10, 7),
            (40, 50, 9),
            (5, 30, 8),
            (50, 60, 3),
            (40, 50, 8),
            (5, 9, 1),
        ):
            version.add_piece(start, stop, checksum)
        delta = version.expect_delta(base)
        assert delta is not None
        for start, stop in ((40, 45), (20, 30), (10, 20), (10, 20)):
            piece = DeltaPiece(stop, (1,), transport.Body.of(bytes(start)))
            version.add_delta_piece(delta, start, piece)

        def served(at: int, stop: int, base: transport.Base | None) -> str:
            if (found := version.next_piece(at, stop, base)) is None:
                return "nothing"
            message, body = found
            known = body is not None and body.checksum == {0: 7, 40: 9, 10: 5, 50: 3}.get(at)
            if isinstance(message, transport.Delta):
                assert (message.sizes, body) == ((1,), delta.pieces[at].body)
            text = f"{type(message).__name__} {message.start}-{message.stop}"
            return text + "!" * (known and isinstance(message, transport.Raw))

        def check(kind: str, base: transport.Base | None) -> None:
            for expected, requests in SERVED[kind].items():
                assert {served(at, stop, base) for at, stop in requests} == {expected}, kind

        check("open", base)
        check("raw", None)
        check("raw", other)
        version.expect_delta(None)
        check("closed", base)
        version.expect_delta(base)
        check("open", base)
        version.close_delta(delta)
        check("closed", base)
        version.record_checksum(transport.Raw(start=10, stop=29), 4)
        assert served(10, 30, None) == "Raw 10-30"
        version.record_checksum(transport.Raw(start=10, stop=30), 5)
        assert served(10, 30, None) == "Raw 10-30!"
        for drop in (version.drop_deltas, lambda: version.withdraw("over")):
            waiting = asyncio.create_task(version.updates.wait())
            await asyncio.sleep(0)
            version.expect_delta(base)
            drop()
            assert served(10, 30, base) == "Raw 10-30!"
            assert await waiting
        assert version.withdrawn == "over"


def test_short_ranges_that_are_present_share_a_message() -> None:
    most, count = SHORT_BYTES - 1, BATCH_BYTES // SHORT_BYTES
    with versions(1) as (memory,):
        version = ServedVersion(memory.manifest, memory.fd)
        version.add_piece(10, 2 * BATCH_BYTES)
        many = [(SHORT_BYTES * n, SHORT_BYTES * n + most) for n in range(1, count + 1)]
        end = 2 * BATCH_BYTES
        for ranges, number in (
            ([(10, 10 + most), (end - 1, end)], 2),
            ([(9, 11)], 0),
            ([(10, 11), (end - 1, end + 1), (12, 13)], 1),
            ([(10, 11), (20, 20 + SHORT_BYTES), (12, 13)], 1),
            ([*many, (end - count, end)], count + 1),
            ([*many, (end - count - 1, end)], count),
        ):
            assert version.batchable_ranges(ranges) == tuple(ranges[:number])
