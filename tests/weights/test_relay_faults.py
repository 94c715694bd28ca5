"""Wherever connections break, and whichever source is next, all relays end with the
bytes of a plain copy, and no piece is received twice.
"""

import asyncio

import hypothesis.strategies as st
from hypothesis import given, settings

from rollweave.schema.weights import VersionFailed, VersionFetched
from rollweave.weights.tcp import Tcp
from tests.support.properties import examples
from tests.support.weight_host import KIB, hosts, tensors_of, until, versions
from tests.weights.wires import wired


@settings(max_examples=examples(30))
@given(
    sizes=st.lists(st.integers(0, 400_000), min_size=1, max_size=5),
    cuts=st.lists(st.integers(8, 1_500_000), max_size=4),
    delta=st.booleans(),
)
def test_resumes_after_any_interruptions(sizes: list[int], cuts: list[int], delta: bool) -> None:
    asyncio.run(_interrupt(sizes, cuts, delta=delta))


async def _interrupt(sizes: list[int], cuts: list[int], *, delta: bool) -> None:
    """Break the wires to the master after so many bytes; the last one does not
    break.
    """
    base_id = 1 if delta else None
    with versions(2, tensors=tensors_of(*sizes)) as (old, new):
        async with hosts(3) as (master, host, after):
            for one, source in ((master, None), (host, master), (after, host)):
                assert isinstance(await one.fetch(old.manifest, source), VersionFetched)
            after.start_fetch(new.manifest, host, base_id=base_id, keep=(1,))
            assert isinstance(
                await master.fetch(new.manifest, base_id=base_id, keep=(1,), chunk_bytes=64 * KIB),
                VersionFetched,
            )
            answer: VersionFetched | VersionFailed | None = None
            for at in cuts:
                if isinstance(answer, VersionFetched):
                    break
                async with wired(master.address, "cut", at) as address:
                    answer = await host.fetch(new.manifest, address, base_id=base_id, keep=(1,))
                    assert isinstance(answer, VersionFetched) or answer.reason == "source", answer
            if not isinstance(answer, VersionFetched):
                answer = await host.fetch(new.manifest, master, base_id=base_id, keep=(1,))
            passed_on = await after.answer()
            assert isinstance(answer, VersionFetched), answer
            assert isinstance(passed_on, VersionFetched), passed_on
            assert host.payload(2) == after.payload(2) == new.payload
            assert answer.nbytes == passed_on.nbytes
            assert delta or answer.nbytes == new.manifest.nbytes


@settings(max_examples=examples(60))
@given(at=st.integers(0, 100_000), delta=st.booleans())
def test_detects_a_flipped_bit_anywhere(at: int, delta: bool) -> None:
    asyncio.run(_flip(at, delta=delta))


async def _flip(at: int, *, delta: bool) -> None:
    base_id = 1 if delta else None
    with versions(2, tensors=tensors_of(12_000, 13_000)) as (old, new):
        async with hosts(2, Tcp(idle_timeout_s=1.0)) as (master, host):
            for one, source in ((master, None), (host, master)):
                assert isinstance(await one.fetch(old.manifest, source), VersionFetched)
            await master.fetch(new.manifest, base_id=base_id, keep=(1,))
            async with wired(master.address, "flip", at) as address:
                answer = await host.fetch(new.manifest, address, base_id=base_id, keep=(1,))
            if isinstance(answer, VersionFailed):
                assert answer.reason in ("broken", "source")
                assert host.payload(2) is None
            assert host.payload(1) == old.payload
            if not isinstance(answer, VersionFetched):
                answer = await host.fetch(new.manifest, master, base_id=base_id, keep=(1,))
            assert isinstance(answer, VersionFetched), answer
            assert host.payload(2) == new.payload


async def test_reports_a_flipped_bit_in_a_body() -> None:
    with versions(1) as (memory,):
        async with hosts(2) as (master, host):
            await master.fetch(memory.manifest)
            async with wired(master.address, "flip", 100_000) as address:
                answer = await host.fetch(memory.manifest, address)
            assert isinstance(answer, VersionFailed)
            assert (answer.reason, "damaged" in answer.error) == ("broken", True)
            assert host.payload(1) is None


async def test_leaves_a_source_that_hangs() -> None:
    with versions(1) as (memory,):
        async with hosts(2, Tcp(idle_timeout_s=0.5)) as (master, host):
            await master.fetch(memory.manifest)
            for at in (0, 100_000):
                async with wired(master.address, "stall", at) as address:
                    host.start_fetch(memory.manifest, address)
                    await until(lambda at=at: at * 0.99 <= host.relay.progress()[0] <= at)
                    answer = await host.answer()
                assert isinstance(answer, VersionFailed)
                assert answer.reason == "source"
                assert "0.5 s" in answer.error
            assert isinstance(await host.fetch(memory.manifest, master), VersionFetched)
