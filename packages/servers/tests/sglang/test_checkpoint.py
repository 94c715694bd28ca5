"""A published version as a checkpoint that the safetensors library reads."""

import os
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from rollweave.schema.errors import WeightsError
from rollweave.weights.checkpoint import read_shape, read_tensors_of
from rollweave.weights.publication import Publication, publish
from rollweave_servers.sglang_control import checkpoint_of
from tests.support.engines import tiny_checkpoint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tiny_checkpoint(tmp_path / "model")


def published(model: Path, *, mixed: bool = False) -> tuple[dict[str, torch.Tensor], Publication]:
    tensors = dict(read_tensors_of(model))
    if mixed:  # an odd number of narrow values before wide ones
        name = next(iter(tensors))
        tensors[name] = tensors[name].to(torch.bfloat16)
    return tensors, publish(tensors, version=3, publication_id=3)


@pytest.mark.parametrize("mixed", [False, True])
def test_the_checkpoint_has_the_published_tensors_and_the_models_other_files(
    model: Path, tmp_path: Path, mixed: bool
) -> None:
    (model / "tokenizer.json").write_text("{}")
    tensors, publication = published(model, mixed=mixed)
    with publication:
        held = checkpoint_of(publication.manifest, read_shape(model), model=model, parent=tmp_path)
    stored = load_file(held.folder / "model.safetensors")
    assert set(stored) == set(tensors)
    assert all(torch.equal(stored[name], tensors[name]) for name in tensors)
    head = (held.folder / "model.safetensors").read_bytes()[:8]
    assert int.from_bytes(head, "little") % 8 == 0, "the tensors are aligned"
    expected = {"model.safetensors", "config.json", "tokenizer.json"}
    assert {path.name for path in held.folder.iterdir()} == expected
    with pytest.raises(OSError, match="not permitted"):  # sealed
        os.write(os.open(held.folder / "model.safetensors", os.O_WRONLY), b"x")
    held.close()
    assert not held.folder.exists()


def test_a_torn_version_makes_no_checkpoint(model: Path, tmp_path: Path) -> None:
    _, publication = published(model)
    with publication:
        torn = msgspec.structs.replace(publication.manifest, digest="0" * 32)
        with pytest.raises(WeightsError, match="the manifest says 0000"):
            checkpoint_of(torn, read_shape(model), model=model, parent=tmp_path)
    assert not list(tmp_path.glob("v3-*"))
