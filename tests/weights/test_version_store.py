"""The versions of one host are complete and verified, or not visible at all."""

import fcntl
import itertools
import mmap
import os
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from rollweave.schema.weights import WeightManifest
from rollweave.weights import version_store
from rollweave.weights.memory import Ranges
from rollweave.weights.publication import read_tensors
from rollweave.weights.transport import FetchError
from tests.support.properties import examples
from tests.support.weight_host import KIB, SHAPES, Memory, changed, tensors_of, versions

LAYOUTS = tomllib.loads(Path(__file__).with_name("layouts.toml").read_text())["layout"]


def read(stored: version_store.StoredVersion) -> bytes:
    return Path(stored.manifest.location).read_bytes()


def assert_sealed(stored: version_store.StoredVersion) -> None:
    fd = os.open(stored.manifest.location, os.O_RDWR)
    try:
        with pytest.raises(OSError, match=r"permitted|denied"):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(OSError, match="permitted"):
            os.ftruncate(fd, 1)
        with pytest.raises(OSError, match="permitted"):
            mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    finally:
        os.close(fd)


def written(writer: version_store.VersionWriter, payload: bytes) -> version_store.VersionWriter:
    writer.destination(0, len(payload))[:] = payload
    writer.mark_received(0, len(payload))
    return writer


def import_version(
    store: version_store.VersionStore, manifest: WeightManifest
) -> version_store.StoredVersion:
    """Load a version from this host's memory into the store."""
    writer = store.open_local(manifest)
    if manifest.nbytes:
        writer.load(0, manifest.nbytes)
    stored = writer.finish()
    store.add(stored)
    return stored


def reason_of(error: pytest.ExceptionInfo[FetchError]) -> str:
    return error.value.reason


def test_opens_a_version_in_the_memory_of_this_host() -> None:
    memory = Memory(os.urandom(1 << 20), publication_id=1, tensors=())
    store = version_store.VersionStore()
    stored = import_version(store, memory.manifest)
    memory.close()
    assert read(stored) == memory.payload == bytes(stored.view())
    assert_sealed(stored)
    store.close()


def test_engines_read_a_stored_version_like_the_trainers() -> None:
    with versions(1) as (memory,):
        store = version_store.VersionStore()
        writer = written(store.create(memory.manifest), memory.payload)
        assert store.get(1) is None
        stored = writer.finish()
        store.add(stored)
        assert_sealed(stored)
        published, loaded = read_tensors(memory.manifest), read_tensors(stored.manifest)
        assert all(bool((published[name] == loaded[name]).all()) for name in published)
        view = stored.view()
        evicted = store.evict_except([])
        assert [stored.manifest.publication_id for stored in evicted] == [1]
        version_store.close_all(evicted)
        assert store.ids() == []
        assert bytes(view) == memory.payload  # the view keeps it readable


@settings(max_examples=examples(40))
@given(
    sizes=st.lists(st.integers(0, 300_000), min_size=1, max_size=4),
    chunk=st.integers(1, 1 << 21),
    order=st.randoms(use_true_random=False),
    kinds=st.lists(st.booleans(), min_size=1, max_size=8),
)
def test_assembles_pieces_of_any_kind_in_any_order(
    sizes: list[int], chunk: int, order: object, kinds: list[bool]
) -> None:
    with versions(2, tensors=tensors_of(*sizes)) as (old, new), ThreadPoolExecutor(2) as pool:
        store = version_store.VersionStore()
        base = import_version(store, old.manifest)
        writer = store.create(new.manifest)
        pieces = list(version_store.chunks_of(new.manifest, chunk))
        order.shuffle(pieces)  # type: ignore[attr-defined]
        for number, piece in enumerate(pieces):
            if kinds[number % len(kinds)]:
                blocks = version_store.encode_spans(
                    piece.spans, base.view().__getitem__, memoryview(new.payload).__getitem__, pool
                )
                writer.apply_delta(
                    piece.start,
                    piece.stop,
                    memoryview(b"".join(blocks)),
                    [len(block) for block in blocks],
                    base,
                )
            else:
                writer.destination(piece.start, piece.stop)[:] = new.payload[
                    piece.start : piece.stop
                ]
                writer.mark_received(piece.start, piece.stop)
        stored = writer.finish()
        assert bytes(stored.view()) == new.payload
        stored.close()
        store.close()


def test_rejects_incomplete_and_damaged_versions_without_a_trace() -> None:
    with versions(2) as (old, new):
        store = version_store.VersionStore()
        base = import_version(store, old.manifest)
        before = len(os.listdir("/proc/self/fd"))
        writer = store.create(new.manifest)
        writer.destination(0, KIB)[:] = new.payload[:KIB]
        writer.mark_received(0, KIB)
        with pytest.raises(FetchError, match=f"is incomplete: {KIB} of") as error:
            writer.finish()
        assert reason_of(error) == "broken"
        with pytest.raises(FetchError, match="digest"):
            written(
                store.create(new.manifest), changed(new.payload, seed=4, fraction=1e-6)
            ).finish()
        writer = written(store.create(new.manifest), new.payload)
        with pytest.raises(FetchError, match="received twice"):
            writer.mark_received(5, 6)
        with pytest.raises(FetchError, match="not within"):
            writer.destination(0, new.manifest.nbytes + 1)
        writer.close()
        writer.close()
        assert len(os.listdir("/proc/self/fd")) == before
        assert store.ids() == [1]
        assert bytes(base.view()) == old.payload
        store.close()


def test_deltas_of_another_base_and_damaged_deltas_write_nothing() -> None:
    with versions(2) as (old, new), ThreadPoolExecutor(1) as pool:
        other = Memory(changed(old.payload, seed=8), publication_id=7, tensors=SHAPES)
        store = version_store.VersionStore()
        base, wrong = import_version(store, old.manifest), import_version(store, other.manifest)
        (chunk, *_) = version_store.chunks_of(new.manifest, 1)
        blocks = version_store.encode_spans(
            chunk.spans, base.view().__getitem__, memoryview(new.payload).__getitem__, pool
        )
        body, sizes = b"".join(blocks), [len(block) for block in blocks]
        writer = store.create(new.manifest)
        flipped = bytearray(body)
        flipped[len(body) // 2] ^= 1
        for damaged, against, lengths in (
            (body, wrong, sizes),
            (flipped, base, sizes),
            (body[:-1], base, [len(body) - 1]),
            (body, base, [*sizes, 0]),
        ):
            with pytest.raises(FetchError):
                writer.apply_delta(chunk.start, chunk.stop, memoryview(damaged), lengths, against)
            assert writer.contiguous == 0
        start, stop, end = chunk.start, chunk.stop, new.manifest.nbytes
        for low, high in ((start, stop - 4), (start + 4, stop), (start + 4, end), (stop, start)):
            with pytest.raises(FetchError, match="whole blocks") as error:
                writer.apply_delta(low, high, memoryview(body), sizes, base)
            assert reason_of(error) == "broken"
        writer.apply_delta(chunk.start, chunk.stop, memoryview(body), sizes, base)
        assert writer.contiguous == chunk.stop
        writer.close()
        (everything,) = version_store.chunks_of(new.manifest, new.manifest.nbytes)
        assert len(everything.spans) > 2
        blocks = version_store.encode_spans(
            everything.spans, base.view().__getitem__, memoryview(new.payload).__getitem__, pool
        )
        writer = store.create(new.manifest)
        lengths = [len(block) for block in blocks]
        writer.apply_delta(0, new.manifest.nbytes, memoryview(b"".join(blocks)), lengths, base)
        stored = writer.finish()
        assert read(stored) == new.payload
        stored.close()
        store.close()
        other.close()


def test_reports_missing_memory_and_missing_base() -> None:
    with versions(1) as (memory,):
        store = version_store.VersionStore()
        import_version(store, memory.manifest)
        huge = msgspec.structs.replace(memory.manifest, publication_id=2, nbytes=1 << 60)
        for manifest in (huge, msgspec.structs.replace(huge, tensors=memory.manifest.tensors)):
            with pytest.raises(FetchError, match="no room") as error:
                store.create(manifest)
            assert reason_of(error) == "room"
        with pytest.raises(
            FetchError, match=r"publication 9 is not stored; there are \[1\]"
        ) as error:
            store.base_version(9)
        assert reason_of(error) == "base"
        store.close()


@pytest.mark.parametrize("row", LAYOUTS, ids=lambda row: row["error"])
def test_impossible_layouts_are_refused(row: dict[str, Any]) -> None:
    manifest = WeightManifest(
        version=5, publication_id=1, location="", tensors=(), nbytes=1000, digest=""
    )
    for tensors in row.get("tensors", [[]]):
        for parts in row.get("parts", [[]]):
            names = ("name", "shape", "offset", "nbytes")
            metas = [dict(zip(names, meta, strict=True), dtype="float32") for meta in tensors]
            holders = [{"rank": 0, "location": "", "digest": "", "ranges": part} for part in parts]
            changes = msgspec.to_builtins(manifest) | {"tensors": metas, "parts": holders}
            with pytest.raises(FetchError) if row["error"] else nullcontext() as caught:
                version_store.VersionStore().check(msgspec.convert(changes, WeightManifest))
            if caught is not None:
                assert reason_of(caught) == "broken"
                assert str(caught.value).startswith("weights version 5: ")
                assert row["error"] in str(caught.value), changes
    with pytest.raises(FetchError, match="nbytes at least 0"):
        version_store.VersionStore().check(msgspec.structs.replace(manifest, nbytes=-1))


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(0, 30)), max_size=20),
    st.integers(0, 30),
    st.integers(0, 30),
)
def test_ranges_behave_like_sets_of_positions(
    operations: list[tuple[bool, int, int]], start: int, stop: int
) -> None:
    ranges, present = Ranges(), set[int]()
    for add, low, high in operations:
        if add:
            ranges.add(low, high)
            present |= set(range(low, high))
        else:
            ranges.remove(low, high)
            present -= set(range(low, high))
        pairs = list(ranges)
        assert {byte for a, b in pairs for byte in range(a, b)} == present
        assert all(a < b for a, b in pairs)
        assert all(left[1] < right[0] for left, right in itertools.pairwise(pairs))
    missing = ranges.missing(start, stop)
    assert {byte for a, b in missing for byte in range(a, b)} == set(range(start, stop)) - present
    assert ranges.touches(start, stop) == bool(set(range(start, stop)) & present)
