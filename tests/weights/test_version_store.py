"""One host's versions: whole and verified, or not at all, whatever fails."""

import fcntl
import itertools
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from rollweave.schema.weights import TensorMeta
from rollweave.weights.memory import Ranges
from rollweave.weights.protocol import FetchError
from rollweave.weights.publication import read_tensors
from rollweave.weights.version_store import (
    StoredVersion,
    VersionStore,
    VersionWriter,
    chunks_of,
    close_all,
    encode_spans,
)
from tests.support.properties import examples
from tests.weights.host import KIB, SHAPES, Memory, changed, tensors_of, versions

BYTES = st.integers(0, 30)


def read(held: StoredVersion) -> bytes:
    return Path(held.manifest.location).read_bytes()


def assert_sealed(held: StoredVersion) -> None:
    fd = os.open(held.manifest.location, os.O_RDWR)
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


def filled(draft: VersionWriter, payload: bytes) -> VersionWriter:
    draft.room(0, len(payload))[:] = payload
    draft.fill(0, len(payload))
    return draft


def reason_of(error: pytest.ExceptionInfo[FetchError]) -> str:
    return error.value.reason


@pytest.mark.parametrize("sealed", [True, False])
def test_a_version_of_this_host(sealed: bool) -> None:
    memory = Memory(os.urandom(1 << 20), weights_id=1, tensors=(), sealed=sealed)
    depot = VersionStore()
    held = depot.hold(memory.manifest)
    if not sealed:
        os.pwrite(memory.fd, b"x", 0)
    memory.close()
    assert read(held) == memory.payload == bytes(held.view())
    assert_sealed(held)
    depot.close()


def test_engines_read_it_like_the_trainers() -> None:
    with versions(1) as (memory,):
        depot = VersionStore()
        draft = filled(depot.begin(memory.manifest), memory.payload)
        assert depot.get(1) is None
        held = draft.finish()
        depot.admit(held)
        assert_sealed(held)
        theirs, ours = read_tensors(memory.manifest), read_tensors(held.manifest)
        assert all(bool((theirs[name] == ours[name]).all()) for name in theirs)
        view = held.view()
        gone = depot.keep([])
        assert [held.manifest.weights_id for held in gone] == [1]
        close_all(gone)
        assert depot.ids() == []
        assert bytes(view) == memory.payload  # whoever has it keeps it


@settings(max_examples=examples(40))
@given(
    sizes=st.lists(st.integers(0, 300_000), min_size=1, max_size=4),
    chunk=st.integers(1, 1 << 21),
    order=st.randoms(use_true_random=False),
    kinds=st.lists(st.booleans(), min_size=1, max_size=8),
)
def test_pieces_in_any_order_of_any_kind(
    sizes: list[int], chunk: int, order: object, kinds: list[bool]
) -> None:
    with versions(2, tensors=tensors_of(*sizes)) as (old, new), ThreadPoolExecutor(2) as pool:
        depot = VersionStore()
        base = depot.hold(old.manifest)
        draft = depot.begin(new.manifest)
        pieces = list(chunks_of(new.manifest, chunk))
        order.shuffle(pieces)  # type: ignore[attr-defined]
        for number, cut in enumerate(pieces):
            if kinds[number % len(kinds)]:
                blocks = encode_spans(
                    cut.spans, base.view().__getitem__, memoryview(new.payload).__getitem__, pool
                )
                draft.apply(
                    cut.start,
                    cut.stop,
                    memoryview(b"".join(blocks)),
                    [len(block) for block in blocks],
                    base,
                )
            else:
                draft.room(cut.start, cut.stop)[:] = new.payload[cut.start : cut.stop]
                draft.fill(cut.start, cut.stop)
        held = draft.finish()
        assert bytes(held.view()) == new.payload
        held.close()
        depot.close()


def test_torn_and_damaged_versions_are_refused_and_leave_nothing() -> None:
    with versions(2) as (old, new):
        depot = VersionStore()
        base = depot.hold(old.manifest)
        before = len(os.listdir("/proc/self/fd"))
        draft = depot.begin(new.manifest)
        draft.room(0, KIB)[:] = new.payload[:KIB]
        draft.fill(0, KIB)
        with pytest.raises(FetchError, match=f"torn: {KIB} of") as error:
            draft.finish()
        assert reason_of(error) == "broken"
        with pytest.raises(FetchError, match="digest"):
            filled(depot.begin(new.manifest), changed(new.payload, seed=4, fraction=1e-6)).finish()
        draft = filled(depot.begin(new.manifest), new.payload)
        with pytest.raises(FetchError, match="came twice"):
            draft.fill(5, 6)
        with pytest.raises(FetchError, match="not within"):
            draft.room(0, new.manifest.nbytes + 1)
        draft.close()
        draft.close()
        assert len(os.listdir("/proc/self/fd")) == before
        assert depot.ids() == [1]
        assert bytes(base.view()) == old.payload
        depot.close()


def test_changes_of_another_base_or_damaged_ones_write_nothing() -> None:
    with versions(2) as (old, new), ThreadPoolExecutor(1) as pool:
        other = Memory(changed(old.payload, seed=8), weights_id=7, tensors=SHAPES)
        depot = VersionStore()
        base, wrong = depot.hold(old.manifest), depot.hold(other.manifest)
        (cut, *_) = chunks_of(new.manifest, 1)
        blocks = encode_spans(
            cut.spans, base.view().__getitem__, memoryview(new.payload).__getitem__, pool
        )
        body, sizes = b"".join(blocks), [len(block) for block in blocks]
        draft = depot.begin(new.manifest)
        flipped = bytearray(body)
        flipped[len(body) // 2] ^= 1
        for damaged, against, lengths in (
            (body, wrong, sizes),
            (flipped, base, sizes),
            (body[:-1], base, [len(body) - 1]),
            (body, base, [*sizes, 0]),
        ):
            with pytest.raises(FetchError):
                draft.apply(cut.start, cut.stop, memoryview(damaged), lengths, against)
            assert draft.done == 0
        with pytest.raises(FetchError, match="whole blocks"):
            draft.apply(cut.start, cut.stop - 4, memoryview(body), sizes, base)
        draft.apply(cut.start, cut.stop, memoryview(body), sizes, base)
        assert draft.done == cut.stop
        draft.close()
        depot.close()
        other.close()


def test_no_room_and_no_base() -> None:
    with versions(1) as (memory,):
        depot = VersionStore()
        depot.hold(memory.manifest)
        huge = msgspec.structs.replace(memory.manifest, weights_id=2, nbytes=1 << 60)
        for manifest in (huge, msgspec.structs.replace(huge, tensors=memory.manifest.tensors)):
            with pytest.raises(FetchError, match="no room") as error:
                depot.begin(manifest)
            assert reason_of(error) == "room"
        with pytest.raises(FetchError, match=r"weights id 9 is not here; there are \[1\]") as error:
            depot.base(9)
        assert reason_of(error) == "base"
        depot.close()


@pytest.mark.parametrize(
    "change",
    [
        {"offset": -64},
        {"offset": 1 << 40},
        {"nbytes": 12},
        {"shape": (-1, -1)},
        {"shape": (0,)},
        {"offset": 64, "shape": (500,), "nbytes": 2000},
    ],
)
def test_a_layout_that_cannot_be(change: dict[str, object]) -> None:
    shapes = tensors_of(100, 200)
    bad = msgspec.structs.replace(shapes[0], **change)
    with versions(1, tensors=shapes) as (memory,):
        for tensors in ((bad, shapes[1]), (shapes[0], shapes[0])):
            with pytest.raises(FetchError) as error:
                VersionStore().check(msgspec.structs.replace(memory.manifest, tensors=tensors))
            assert reason_of(error) == "broken"


def test_a_scalar_and_nothing() -> None:
    shapes = (
        TensorMeta(name="none", dtype="bfloat16", shape=(3, 0), offset=0, nbytes=0),
        TensorMeta(name="one", dtype="float64", shape=(), offset=0, nbytes=8),
    )
    memory = Memory(os.urandom(8), weights_id=1, tensors=shapes)
    depot = VersionStore()
    assert bytes(depot.hold(memory.manifest).view()) == memory.payload
    depot.close()
    memory.close()


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(0, 30)), max_size=20),
    st.integers(0, 30),
    st.integers(0, 30),
)
def test_ranges_are_sets(changes: list[tuple[bool, int, int]], start: int, stop: int) -> None:
    ranges, there = Ranges(), set[int]()
    for add, low, high in changes:
        if add:
            ranges.add(low, high)
            there |= set(range(low, high))
        else:
            ranges.remove(low, high)
            there -= set(range(low, high))
        pairs = list(ranges)
        assert {byte for a, b in pairs for byte in range(a, b)} == there
        assert all(a < b for a, b in pairs)
        assert all(left[1] < right[0] for left, right in itertools.pairwise(pairs))
    gaps = ranges.missing(start, stop)
    assert {byte for a, b in gaps for byte in range(a, b)} == set(range(start, stop)) - there
    assert ranges.touches(start, stop) == bool(set(range(start, stop)) & there)
