"""What is published is read back to the bit; anything torn, truncated or gone is refused."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import pytest
import torch
from hypothesis import given, settings

from rollweave.schema.errors import WeightsError
from rollweave.schema.weights import WeightManifest
from rollweave.weights.store import Publisher, publish, read_tensors


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
    }


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("memfd", [True, False])
def test_round_trip_to_the_bit(tmp_path: Path, memfd: bool) -> None:
    with publish(some_tensors(), version=3, weights_id=8, directory=tmp_path, memfd=memfd) as publication:
        assert (publication.manifest.version, publication.manifest.weights_id) == (3, 8)
        found = read_tensors(publication.manifest)
        assert_same(found, some_tensors())
        assert bool(list(tmp_path.iterdir())) != memfd
    assert_same(found, some_tensors())  # readers keep the memory that they mapped
    assert not list(tmp_path.iterdir())
    with pytest.raises(WeightsError, match="gone"):
        read_tensors(publication.manifest)


def test_nothing_at_all_is_a_publication_too(tmp_path: Path) -> None:
    with publish({}, version=0, weights_id=0, directory=tmp_path) as publication:
        assert publication.manifest.nbytes == 0
        assert read_tensors(publication.manifest) == {}


@settings(max_examples=30, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float64]),
)
def test_any_shapes(tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], dtype: torch.dtype) -> None:
    tensors = {
        f"t{i}": (torch.arange(torch.Size(shape).numel()) % 100).reshape(shape).to(dtype) for i, shape in enumerate(shapes)
    }
    with publish(tensors, version=1, weights_id=1, directory=tmp_path_factory.getbasetemp()) as publication:
        assert_same(read_tensors(publication.manifest), tensors)


def test_writing_to_what_was_read_changes_no_other_reader(tmp_path: Path) -> None:
    with publish(some_tensors(), version=1, weights_id=1, directory=tmp_path) as publication:
        read_tensors(publication.manifest)["matrix"].zero_()
        assert_same(read_tensors(publication.manifest), some_tensors())


def test_the_payload_is_sealed(tmp_path: Path) -> None:
    with publish(some_tensors(), version=1, weights_id=1, directory=tmp_path) as publication:
        fd = os.open(publication.manifest.location, os.O_RDWR)
        with pytest.raises(PermissionError):
            os.write(fd, b"x")
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 1)
        os.close(fd)


def test_torn_truncated_and_longer_payloads_are_refused(tmp_path: Path) -> None:
    with publish(some_tensors(), version=1, weights_id=1, directory=tmp_path, memfd=False) as publication:
        path = Path(publication.manifest.location)
        whole = path.read_bytes()
        for position in (0, len(whole) // 2, len(whole) - 1):
            torn = bytearray(whole)
            torn[position] ^= 1
            path.write_bytes(torn)
            with pytest.raises(WeightsError, match="digest"):
                read_tensors(publication.manifest)
        for wrong in (whole[:-1], whole[: len(whole) // 2], b"", whole + b"\0"):
            path.write_bytes(wrong)
            with pytest.raises(WeightsError, match="bytes, the manifest says"):
                read_tensors(publication.manifest)
        path.write_bytes(whole)
        assert_same(read_tensors(publication.manifest), some_tensors())


def changed_first(manifest: WeightManifest, **change: object) -> WeightManifest:
    first = msgspec.structs.replace(manifest.tensors[0], **change)
    return msgspec.structs.replace(manifest, tensors=(first, *manifest.tensors[1:]))


def test_metadata_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with publish(some_tensors(), version=1, weights_id=1, directory=tmp_path) as publication:
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


def test_a_pipe_in_the_place_of_the_payload_does_not_block(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with publish(some_tensors(), version=1, weights_id=1, directory=tmp_path) as publication:
        manifest = msgspec.structs.replace(publication.manifest, location=f"/proc/{os.getpid()}/fd/{reading}")
        with pytest.raises(WeightsError, match="not a payload"):
            read_tensors(manifest)
    os.close(reading)
    os.close(writing)


CHILD = """
import sys, pathlib, msgspec, torch
from rollweave.weights.store import publish
tensors = {"w": torch.arange(1000.0)}
publication = publish(tensors, version=5, weights_id=6, directory=pathlib.Path(sys.argv[1]), memfd=sys.argv[2] == "memfd")
sys.stdout.buffer.write(msgspec.json.encode(publication.manifest) + b"\\n")
sys.stdout.flush()
sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["memfd", "file"])
def test_another_process_reads_it_until_the_publisher_is_killed(tmp_path: Path, kind: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path), kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    manifest = msgspec.json.decode(child.stdout.readline(), type=WeightManifest)
    assert torch.equal(read_tensors(manifest)["w"], torch.arange(1000.0))
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdin.close()
    child.stdout.close()
    if kind == "memfd":
        with pytest.raises(WeightsError, match="gone"):
            read_tensors(manifest)
    else:  # the fallback leaves a file behind; the next publisher clears it away
        assert list(tmp_path.iterdir())
        Publisher(tmp_path).close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("memfd", [True, False])
def test_a_publisher_keeps_the_last_versions_open(tmp_path: Path, memfd: bool) -> None:
    publisher = Publisher(tmp_path, keep=2, memfd=memfd)
    manifests = [publisher.publish({"w": torch.tensor([float(v)])}, version=v, weights_id=10 + v) for v in range(4)]
    for manifest in manifests[:2]:
        with pytest.raises(WeightsError):
            read_tensors(manifest)
    for manifest in manifests[2:]:
        assert read_tensors(manifest)["w"].item() == manifest.version
    publisher.close()
    with pytest.raises(WeightsError):
        read_tensors(manifests[3])


def test_a_directory_that_cannot_be_is_a_weights_error(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_bytes(b"")
    with pytest.raises(WeightsError, match="cannot publish"):
        publish(some_tensors(), version=1, weights_id=1, directory=blocker, memfd=False)
