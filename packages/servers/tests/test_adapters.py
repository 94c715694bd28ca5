"""The process of an engine with a server puts adapters and the model's weights
together.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollweave.schema.config.training import LoraConfig
from rollweave.schema.errors import WeightsError
from rollweave.schema.serving import LoadCheckpoint
from rollweave.schema.training import Publish, Published, Save, Saved, Trained, TrainOn
from rollweave.train import checkpoint
from rollweave.train.trainer import Trainer
from rollweave.weights.adapters import A, B, adapter_sizes, linear_layers
from rollweave.weights.checkpoint import read_any_shape, read_shape, read_tensors_of
from rollweave.weights.publication import publish, read_tensors
from rollweave_servers.published import AdapterMerger, published
from tests.support.architectures import build
from tests.support.trainers import make_batch, make_config, make_model

SCALE = 0.5


def random_adapters(model: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = read_shape(model).tensors()
    tensors = {}
    for layer in linear_layers(read_shape(model)):
        out, columns = sizes[f"{layer}.weight"]
        tensors[layer + A] = torch.randn(2, columns, generator=generator).to(dtype)
        tensors[layer + B] = torch.randn(out, 2, generator=generator).to(dtype)
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_version_has_all_weights_and_what_changes_has_the_format_of_its_adapters(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    model = make_model(tmp_path / "m")
    base, shape = dict(read_tensors_of(model)), read_shape(model)
    adapters = random_adapters(model, dtype)
    merging = AdapterMerger(model, shape, scale=SCALE)
    for number in (1, 2):  # the second does not build on the first
        with (
            publish(adapters, version=number, publication_id=number) as given,
            merging.merged(given.manifest) as made,
        ):
            manifest = made.manifest
            assert (manifest.version, manifest.publication_id) == (number, number)
            tensors = read_tensors(manifest)
            shape.check({name: tensor.shape for name, tensor in tensors.items()})
            for name, tensor in tensors.items():
                expected = base[name]
                assert tensor.dtype == (dtype if "_proj" in name else torch.float32)
                if (layer := name.removesuffix(".weight")) + A in adapters:
                    a, b = adapters[layer + A].float(), adapters[layer + B].float()
                    expected = expected + SCALE * (b @ a)
                torch.testing.assert_close(tensor, expected.to(tensor.dtype), atol=1e-5, rtol=1e-2)


def test_a_checkpoint_gives_the_same_weights(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m")
    adapters, merging = (
        random_adapters(model, torch.float32),
        AdapterMerger(model, read_shape(model), scale=SCALE),
    )
    saved = checkpoint.Checkpoint(
        step=3, model=adapters, optimizer={}, rng={"cpu": torch.get_rng_state()}
    )
    checkpoint.save(tmp_path / "c", saved, export_dtype=torch.float32)
    command = LoadCheckpoint(
        version=3, publication_id=8, directory=str(tmp_path / "c"), dtype="float32"
    )
    with (
        publish(adapters, version=3, publication_id=8) as given,
        merging.merged(given.manifest) as one,
        published(command) as saved_adapters,
        merging.merged(saved_adapters.manifest) as other,
    ):
        assert one.manifest.digest == other.manifest.digest


def test_whole_weights_are_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m")
    weights = dict(read_tensors_of(model))
    with (
        publish(weights, version=1, publication_id=1) as given,
        pytest.raises(WeightsError, match="tensors must be those of adapters"),
    ):
        AdapterMerger(model, read_shape(model), scale=SCALE).merged(given.manifest)


def test_a_model_that_is_gone_is_an_error_of_the_version(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m")
    shape, adapters = read_shape(model), random_adapters(model, torch.float32)
    (model / "model.safetensors").unlink()
    with (
        publish(adapters, version=1, publication_id=1) as given,
        pytest.raises(WeightsError, match=r"must hold model\.safetensors"),
    ):
        AdapterMerger(model, shape, scale=SCALE).merged(given.manifest)


@pytest.mark.variants
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_a_model_that_only_transformers_computes_is_that_of_the_export(
    tmp_path: Path, name: str
) -> None:
    """Its experts are one parameter in memory and several tensors in the files."""
    model = build(name, tmp_path / name)
    trainer = Trainer(make_config(lora={"rank": 2}), model)
    assert isinstance(trainer.handle(TrainOn(batch=make_batch())), Trained)
    reply = trainer.handle(Publish(version=1, publication_id=1))
    assert isinstance(reply, Published), reply
    sizes = adapter_sizes(read_any_shape(model), LoraConfig(rank=2))
    assert {meta.name: meta.shape for meta in reply.manifest.tensors} == sizes
    assert isinstance(trainer.handle(Save(path=str(tmp_path / "c"), export=True)), Saved)
    exported = load_file(tmp_path / "c" / "hf" / "model.safetensors")
    merging = AdapterMerger(model, read_any_shape(model), scale=16.0)
    with merging.merged(reply.manifest) as made:
        tensors = read_tensors(made.manifest)
        assert tensors.keys() == exported.keys()
        for key, tensor in tensors.items():
            torch.testing.assert_close(tensor, exported[key], atol=1e-6, rtol=1e-5, msg=key)
