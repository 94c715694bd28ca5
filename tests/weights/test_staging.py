"""Tensors pass through the buffers bitwise, whatever the buffers' size; on CUDA, too,
if there is a device.
"""

from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rollweave.weights.publication import bytes_of, lay_out, publish, read_tensors
from rollweave.weights.staging import Staging, on_device
from tests.support.properties import examples

CUDA = pytest.param(
    "cuda",
    marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
)
DEVICES = ["cpu", CUDA]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=examples(40))
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=5),
    nbytes=st.sampled_from([16, 40, 1000]),
    of=st.sampled_from(DTYPES),
    to=st.sampled_from(DTYPES),
    seed=st.integers(0, 100),
)
def test_download_equals_a_plain_conversion(
    device: str, shapes: list[list[int]], nbytes: int, of: torch.dtype, to: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        str(i): torch.randn(shape, generator=generator).to(of) for i, shape in enumerate(shapes)
    }
    metas = lay_out((name, to, tensor.shape) for name, tensor in tensors.items())
    size = max((meta.offset + meta.nbytes for meta in metas), default=0)
    payload, written = bytearray(size), 0
    staging = Staging(torch.device(device), nbytes=nbytes)
    slices = [(meta.offset, tensors[meta.name].to(device)) for meta in metas]
    for offset, data in staging.download(slices, to):
        assert len(data) <= max(nbytes, 0)
        payload[offset : offset + len(data)] = data
        written += len(data)
    assert written == sum(meta.nbytes for meta in metas)
    for meta in metas:
        assert payload[meta.offset : meta.offset + meta.nbytes] == bytes_of(
            tensors[meta.name].to(to)
        ), meta


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=examples(40))
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=5),
    nbytes=st.sampled_from([16, 40, 1000]),
    dtype=st.sampled_from([*DTYPES, torch.bool, torch.int64]),
)
def test_upload_equals_the_original(
    device: str, shapes: list[list[int]], nbytes: int, dtype: torch.dtype
) -> None:
    tensors = {
        str(i): (torch.arange(torch.Size(shape).numel()) + i).reshape(shape).to(dtype)
        for i, shape in enumerate(shapes)
    }
    names = []
    for name, tensor in Staging(torch.device(device), nbytes=nbytes).upload(tensors):
        expected = (device, dtype, tensors[name].shape)
        assert (tensor.device.type, tensor.dtype, tensor.shape) == expected
        assert bytes_of(tensor.cpu()) == bytes_of(tensors[name])
        names.append(name)
    assert names == list(tensors)


@pytest.mark.parametrize("device", DEVICES)
def test_a_published_version_reaches_a_device(tmp_path: Path, device: str) -> None:
    tensors = {"a": torch.randn(300, 7).bfloat16(), "b": torch.randn(5)}
    target = {name: torch.zeros_like(tensor, device=device) for name, tensor in tensors.items()}
    with publish(tensors, version=1, publication_id=1) as publication:
        for name, tensor in on_device(read_tensors(publication.manifest), torch.device(device)):
            target[name].copy_(tensor)
    assert all(torch.equal(target[name].cpu(), tensor) for name, tensor in tensors.items())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_snapshot_excludes_later_training() -> None:
    """The optimizer's next kernels run only after the copies: the last bytes are out
    before `download` ends.
    """
    weights = torch.ones(1 << 22, device="cuda")
    snapshots = [
        bytes(data)
        for _, data in Staging(weights.device, nbytes=1 << 20).download(
            [(0, weights)], torch.float32
        )
    ]
    weights.mul_(2)
    assert b"".join(snapshots) == bytes_of(torch.ones(1 << 22))


def test_refuses_buffers_smaller_than_an_element() -> None:
    with pytest.raises(ValueError, match="nbytes must be at least 16, a few elements, got 3"):
        Staging(torch.device("cpu"), nbytes=3)
