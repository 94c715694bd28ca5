"""A published version is read bitwise; a damaged, truncated or missing one is
refused.
"""

import asyncio
import contextlib
import fcntl
import itertools
import math
import mmap
import os
import random
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import pytest
import torch
import xxhash
from hypothesis import given, settings

from rollweave.schema.errors import WeightsError
from rollweave.schema.weights import TensorMeta, WeightManifest, WeightPart
from rollweave.weights import memory
from rollweave.weights.memory import seal
from rollweave.weights.publication import (
    ALIGNMENT,
    Draft,
    PayloadWriter,
    Publisher,
    bytes_of,
    check_layout,
    lay_out,
    publish,
    publish_each,
    read_tensors,
)
from tests.support.forking import Forked
from tests.support.properties import examples


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(7, 5, generator=generator),
        "half": torch.randn(33, generator=generator).bfloat16(),
        "scalar": torch.tensor(3.5),
        "none": torch.empty(0, 4),
        "counts": torch.arange(9, dtype=torch.int64).reshape(3, 3),
        "view": torch.randn(6, 8, generator=generator).t(),
        "flag": torch.tensor([True, False, True]),
        "eighth": torch.randn(5, 3, generator=generator).to(torch.float8_e4m3fn),
    }


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert actual[name].shape == tensor.shape
        assert bytes_of(actual[name]) == bytes_of(tensor), name


def test_reads_exactly_the_published_bits() -> None:
    with publish(some_tensors(), version=3, publication_id=8) as publication:
        assert (publication.manifest.version, publication.manifest.publication_id) == (3, 8)
        tensors_read = read_tensors(publication.manifest)
        assert_same(tensors_read, some_tensors())
    assert_same(tensors_read, some_tensors())  # readers keep the memory that they mapped
    with pytest.raises(WeightsError, match="gone"):
        read_tensors(publication.manifest)


@settings(max_examples=examples(30))
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=6),
    dtype=st.sampled_from(
        [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float64]
    ),
)
def test_publishes_tensors_of_any_shape(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], dtype: torch.dtype
) -> None:
    tensors = {
        f"t{i}": (torch.arange(torch.Size(shape).numel()) % 100).reshape(shape).to(dtype)
        for i, shape in enumerate(shapes)
    }
    with publish(tensors, version=1, publication_id=1) as publication:
        assert_same(read_tensors(publication.manifest), tensors)


def test_writes_of_a_reader_stay_private() -> None:
    with publish(some_tensors(), version=1, publication_id=1) as publication:
        read_tensors(publication.manifest)["matrix"].zero_()
        assert_same(read_tensors(publication.manifest), some_tensors())


@contextlib.contextmanager
def memory_of(content: bytes, *, sealed: bool = True) -> Iterator[str]:
    """Yield the location of a memory file with this content."""
    with open(os.memfd_create("other", os.MFD_ALLOW_SEALING), "wb", buffering=0) as file:
        file.write(content)
        if sealed:
            seal(file.fileno())
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"


def test_refuses_damaged_truncated_longer_and_unsealed_payloads() -> None:
    def read(content: bytes, *, sealed: bool = True) -> dict[str, torch.Tensor]:
        with memory_of(content, sealed=sealed) as location:
            return read_tensors(msgspec.structs.replace(manifest, location=location))

    with publish(some_tensors(), version=1, publication_id=1) as publication:
        manifest = publication.manifest
        content = Path(manifest.location).read_bytes()
    for position in (0, len(content) // 2, len(content) - 1):
        torn = bytearray(content)
        torn[position] ^= 1
        with pytest.raises(WeightsError, match="digest"):
            read(torn)
    for wrong in (content[:-1], content[: len(content) // 2], b"", content + b"\0"):
        with pytest.raises(WeightsError, match="bytes, the manifest says"):
            read(wrong)
    with pytest.raises(WeightsError, match="not a payload"):
        read(content, sealed=False)
    assert_same(read(content), some_tensors())


def changed_first(manifest: WeightManifest, **change: object) -> WeightManifest:
    first = msgspec.structs.replace(manifest.tensors[0], **change)
    return msgspec.structs.replace(manifest, tensors=(first, *manifest.tensors[1:]))


def test_refuses_metadata_that_does_not_fit(tmp_path: Path) -> None:
    with publish(some_tensors(), version=1, publication_id=1) as publication:
        manifest = publication.manifest
        wrong = [
            changed_first(manifest, dtype="float31"),
            changed_first(manifest, dtype="nn"),
            changed_first(manifest, shape=(7, 6)),
            changed_first(manifest, shape=(-7, -5)),
            changed_first(manifest, offset=manifest.nbytes),
            changed_first(manifest, offset=-4),
            changed_first(manifest, offset=2),
            changed_first(manifest, offset=manifest.tensors[1].offset),
            changed_first(manifest, name="half"),
            msgspec.structs.replace(manifest, digest="0" * 32),
            msgspec.structs.replace(manifest, location=str(tmp_path)),
            msgspec.structs.replace(manifest, location=str(tmp_path / "nowhere")),
        ]
        for manifest in wrong:
            with pytest.raises(WeightsError):
                read_tensors(manifest)


def test_a_pipe_instead_of_the_payload_does_not_block() -> None:
    reading, writing = os.pipe()
    with publish(some_tensors(), version=1, publication_id=1) as publication:
        manifest = msgspec.structs.replace(
            publication.manifest, location=f"/proc/{os.getpid()}/fd/{reading}"
        )
        with pytest.raises(WeightsError, match="not a payload"):
            read_tensors(manifest)
    os.close(reading)
    os.close(writing)


CHILD = """
import sys, msgspec, torch
from rollweave.weights.publication import publish
tensors = {"w": torch.arange(1000.0)}
publication = publish(tensors, version=5, publication_id=6)
sys.stdout.buffer.write(msgspec.json.encode(publication.manifest) + b"\\n")
sys.stdout.flush()
sys.stdin.read()
"""


def test_another_process_reads_a_version_until_its_publisher_is_killed() -> None:
    child = Forked([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    manifest = msgspec.json.decode(child.stdout.readline(), type=WeightManifest)
    assert torch.equal(read_tensors(manifest)["w"], torch.arange(1000.0))
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdin.close()
    child.stdout.close()
    with pytest.raises(WeightsError, match="gone"):
        read_tensors(manifest)


def test_a_publisher_keeps_the_last_versions_open() -> None:
    publisher = Publisher(keep=2)
    manifests = [
        publisher.publish({"w": torch.tensor([float(v)])}, version=v, publication_id=10 + v)
        for v in range(4)
    ]
    for manifest in manifests[:2]:
        with pytest.raises(WeightsError):
            read_tensors(manifest)
    for manifest in manifests[2:]:
        assert read_tensors(manifest)["w"].item() == manifest.version
    publisher.close()
    with pytest.raises(WeightsError):
        read_tensors(manifests[3])


def test_a_publisher_keeps_needed_versions() -> None:
    publisher = Publisher(keep=2)
    for publication_id, needed in enumerate([(), (0,), (0, 1), (0, 2), ()]):
        publisher.publish(
            {"w": torch.zeros(1)}, version=0, publication_id=publication_id, needed=needed
        )
        expected = [*needed, publication_id]
        assert [publication.manifest.publication_id for publication in publisher._open] == expected
    publisher.close()


# Writing slice by slice.


@settings(max_examples=examples(60))
@given(
    sizes=st.lists(st.integers(0, 200), max_size=5),
    cuts=st.lists(st.integers(0, 1000), max_size=5),
    order=st.randoms(use_true_random=False),
    writers=st.integers(1, 3),
)
def test_slices_in_any_order_make_the_same_version(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    cuts: list[int],
    order: random.Random,
    writers: int,
) -> None:
    tensors = {f"t{i}": torch.arange(1, size + 1).to(torch.uint8) for i, size in enumerate(sizes)}
    metas = lay_out((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
    assert all(meta.offset % ALIGNMENT == 0 for meta in metas)
    slices = []
    for meta, tensor in zip(metas, tensors.values(), strict=True):
        edges = sorted({0, meta.nbytes, *(cut for cut in cuts if cut < meta.nbytes)})
        slices += [(meta.offset + a, bytes_of(tensor)[a:b]) for a, b in itertools.pairwise(edges)]
    if writers > 1:
        order.shuffle(slices)
    draft = Draft(metas, version=1, publication_id=1)
    writers_of_draft = [
        draft.writer,
        *(PayloadWriter.open(draft.handle) for _ in range(writers - 1)),
    ]
    for offset, data in slices:
        hand = order.choice(writers_of_draft)
        assert hand is not None
        hand.write(offset, data)
    for hand in writers_of_draft[1:]:
        assert hand is not None
        hand.close()
    with (
        draft.finish() as done,
        publish(tensors, version=1, publication_id=1) as content,
    ):
        assert done.manifest.digest == content.manifest.digest
        assert_same(read_tensors(done.manifest), tensors)


def test_opens_only_the_intended_draft(tmp_path: Path) -> None:
    metas = lay_out([("w", torch.float32, (10,))])
    draft = Draft(metas, version=1, publication_id=1)
    other = Draft(metas, version=1, publication_id=1)
    handle = draft.handle
    for wrong in (
        msgspec.structs.replace(
            handle, location=other.handle.location
        ),  # for example a process of another machine with the same id
        msgspec.structs.replace(handle, location=str(tmp_path / "nowhere")),
        msgspec.structs.replace(handle, nbytes=41),
    ):
        assert PayloadWriter.open(wrong) is None
    other.abandon()
    draft.abandon()
    assert PayloadWriter.open(handle) is None


def test_lack_of_memory_is_one_error_and_leaves_nothing() -> None:
    """The limit of file sizes stands for the memory: a large version does not fit, but
    small ones do.
    """
    limits, before = resource.getrlimit(resource.RLIMIT_FSIZE), len(os.listdir("/proc/self/fd"))
    small, large = {"w": torch.arange(1000.0)}, {"w": torch.zeros(1 << 20), "v": torch.zeros(10)}
    publisher = Publisher()
    first = publisher.publish(small, version=1, publication_id=1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        for draft in (publisher.publish, publish):
            with pytest.raises(WeightsError) as error:
                draft(large, version=2, publication_id=2)
        metas = lay_out((name, tensor.dtype, tensor.shape) for name, tensor in large.items())
        with pytest.raises(WeightsError, match=r"version 2: .Errno 27. File too large"):
            publisher.draft(metas, version=2, publication_id=2, ranges=[(0, 8), (1 << 20, 1 << 21)])
        third = publisher.publish(small, version=3, publication_id=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(error.value) == "cannot publish weights version 2: [Errno 27] File too large"
    for manifest in (first, third):
        assert torch.equal(read_tensors(manifest)["w"], small["w"])
    publisher.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_part_is_published_and_nothing_is_left_of_a_failure() -> None:
    before, metas = len(os.listdir("/proc/self/fd")), lay_out([("w", torch.uint8, (1 << 20,))])
    publisher, ranges = Publisher(), [(0, 3), (1 << 19, (1 << 19) + 5)]
    draft = publisher.draft(metas, version=1, publication_id=7, ranges=ranges, rank=4)
    for start, stop in ranges:
        draft.writer.write(start, memoryview(bytes(range(stop - start))))
    manifest = publisher.finish(draft)
    digest = xxhash.xxh3_128_hexdigest(bytes([0, 1, 2, 0, 1, 2, 3, 4]))
    part = WeightPart(rank=4, location=manifest.location, ranges=tuple(ranges), digest=digest)
    assert (manifest.parts, manifest.digest, manifest.nbytes) == ((part,), digest, 1 << 20)
    status = Path(manifest.location).stat()
    assert (status.st_size, status.st_blocks * 512 < 1 << 19) == (1 << 20, True)
    with pytest.raises(ZeroDivisionError):
        publish_each(metas, (torch.ones(1 // zero) for zero in [0]), version=1, publication_id=2)
    draft = publisher.draft(metas, version=1, publication_id=3)
    with mmap.mmap(draft.writer.fd, 0), pytest.raises(WeightsError, match=r"version 1: .* busy"):
        publisher.finish(draft)
    publisher.close()
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        Publisher(keep=0)


def test_sealed_memory_neither_shrinks_nor_changes() -> None:
    shrink, write, later = fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_WRITE, memory.F_SEAL_FUTURE_WRITE
    for seals in (shrink | write, shrink | later, shrink, write, 0):
        with open(os.memfd_create("m", os.MFD_ALLOW_SEALING), "wb", buffering=0) as file:
            file.write(b"abc")
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
            assert memory.is_sealed(file.fileno()) == (seals in (shrink | write, shrink | later))
            content = xxhash.xxh3_64()
            memory.hash_file(content, file.fileno(), 1, 3)
            assert content.digest() == xxhash.xxh3_64_digest(b"bc")
            with pytest.raises(OSError, match="shrank to 3 bytes"):
                memory.hash_file(content, file.fileno(), 1, 4)


@pytest.mark.parametrize(("fails", "undoes"), [(False, True), (True, True), (False, False)])
async def test_cancelled_work_in_a_thread_ends_first_and_is_undone(
    fails: bool, undoes: bool
) -> None:
    begun, go, undone = threading.Event(), threading.Event(), list[float]()

    def work(divisor: int) -> float:
        begun.set()
        go.wait(10)
        return 1 / divisor

    undo = undone.append if undoes else None
    task = asyncio.create_task(memory.in_thread(work, int(not fails), undo=undo))
    await asyncio.to_thread(begun.wait, 10)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert undone == [1.0] * (undoes and not fails)


SIZES = {"uint8": 1, "float16": 2, "float32": 4}


@settings(max_examples=examples(300))
@given(
    nbytes=st.integers(0, 16),
    rows=st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from([*SIZES, "load"]),
            st.lists(st.integers(-1, 3), max_size=2).map(tuple),
            st.integers(-2, 17),
            st.sampled_from([0, 0, 0, 1, -2]),
        ),
        max_size=3,
    ),
)
def test_a_layout_is_accepted_only_if_each_tensor_has_bytes_of_its_own(
    nbytes: int, rows: list[tuple[str, str, tuple[int, ...], int, int]]
) -> None:
    tensors, valid, taken = [], True, set[int]()
    for name, dtype, shape, offset, error in rows:
        itemsize, own = SIZES.get(dtype, 1), math.prod(shape) * SIZES.get(dtype, 1)
        places = set(range(offset, offset + own))
        valid &= dtype in SIZES and min(shape, default=0) >= 0 and not error
        valid &= offset >= 0 and offset % itemsize == 0 and offset + own <= nbytes
        valid &= not places & taken
        taken |= places
        tensors.append(
            TensorMeta(name=name, dtype=dtype, shape=shape, offset=offset, nbytes=own + error)
        )
    valid &= len({row[0] for row in rows}) == len(rows)
    manifest = WeightManifest(
        version=5, publication_id=1, location="", tensors=tuple(tensors), nbytes=nbytes, digest=""
    )
    with contextlib.nullcontext() if valid else pytest.raises(WeightsError, match="tensor"):
        check_layout(manifest)
