"""Adapters belong to linear layers of a model, and are added to the weights of those;
an adapter of another model is refused. Memory is planned for what is published.
"""

import contextlib
import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rollweave.schema.config.loading import loads
from rollweave.schema.config.training import LoraConfig
from rollweave.schema.errors import FieldError, WeightsError
from rollweave.schema.hosts import interpreter
from rollweave.weights import adapters
from rollweave.weights.adapters import A, AdapterBase, B, linear_layers, targeted_layers
from rollweave.weights.checkpoint import ModelShape
from rollweave.weights.needs import published, relay_needs

TABLE = tomllib.loads(Path(__file__).with_name("adapters.toml").read_text())
SHAPE = ModelShape(
    vocab=10, hidden=4, layers=1, heads=3, kv_heads=1, head_dim=2, ffn=7, context=8, qkv_bias=True
)
ENDS = (
    "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj mlp.gate_proj mlp.up_proj"
)
LINEAR = [f"model.layers.0.{end}" for end in f"{ENDS} mlp.down_proj".split()]
Q, DOWN = LINEAR[0], LINEAR[-1]
SOME = LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "mlp.down_proj"))
SIZES = adapters.adapter_sizes(SHAPE, SOME)
GIVEN = {name: torch.randn(size).bfloat16() for name, size in SIZES.items()}
MODEL = {name: torch.randn(size) for name, size in SHAPE.tensors().items()}


def test_layers_with_adapters_are_linear_and_named() -> None:
    assert linear_layers(SHAPE) == LINEAR
    names = (
        "b.weight a.weight a.bias experts.d.weight mlp.gate.weight x.router.weight x_router.weight"
    )
    sizes = {f"model.layers.0.{name}": (2,) * (name[0] != "b") + (2,) for name in names.split()}
    sizes |= {"lm_head.weight": (2, 2), "model.layers.0.c.weight": (2, 2, 2)}
    other = linear_layers(dataclasses.replace(SHAPE, sizes=sizes))
    assert other == ["model.layers.0.a", "model.layers.0.x_router"]
    assert targeted_layers(LINEAR, ["all-linear"]) == LINEAR
    assert targeted_layers(LINEAR, ["mlp.down_proj", Q]) == [Q, DOWN]
    assert SIZES == {Q + A: (3, 4), Q + B: (6, 3), DOWN + A: (3, 7), DOWN + B: (4, 3)}
    known = ", ".join(layer.rpartition(".")[2] for layer in LINEAR)
    with pytest.raises(FieldError) as error:
        targeted_layers(LINEAR * 2, ["q_proj", "_proj"])
    assert f"name linear layers of the model ({known}), got '_proj'" in str(error.value)


def test_memory_is_needed_for_three_versions_of_what_is_trained() -> None:
    text = "[run]\nname = 'a'\n[model]\ndtype = '{}'\nscratch = {{}}\n[[tasks]]\nenv = 'a'\n{}"
    for dtype, more, nbytes in (
        ("float32", "", 4 * SHAPE.parameters()),
        ("bfloat16", "[lora]\nrank = 3", 2 * 195),
    ):
        config = loads(text.format(dtype, more))
        need = published(config, SHAPE, versions=3)
        assert (need.nbytes, need.on_device) == (3 * nbytes, False)
        assert relay_needs(config, SHAPE, stores=True) == [need, interpreter(setting="model")]
        assert relay_needs(config, SHAPE, stores=False) == [interpreter(setting="model")]


def test_tensors_are_those_of_the_model_with_its_adapters() -> None:
    base = AdapterBase(MODEL | {"x": torch.ones(1)}, SHAPE, scale=0.5)
    base.check(GIVEN)
    formats, result = base.formats(GIVEN), dict(base.with_adapters(GIVEN, torch.device("cpu")))
    assert list(result) == list(formats) == list(MODEL)
    for name, tensor in MODEL.items():
        layer, changes = name.removesuffix(".weight"), name in (f"{Q}.weight", f"{DOWN}.weight")
        assert formats[name] == (torch.bfloat16 if changes else torch.float32)
        change = GIVEN[layer + B].float() @ GIVEN[layer + A].float() if changes else 0.0
        assert torch.allclose(result[name], tensor + 0.5 * change, atol=1e-6)
    half = [tensor.bfloat16() for tensor in (MODEL[f"{Q}.weight"], GIVEN[Q + A], GIVEN[Q + B])]
    assert adapters.merged(*half, scale=2.0).dtype == torch.float32


@pytest.mark.parametrize("error", TABLE["tensors"])
def test_adapters_that_do_not_fit_are_named(error: str) -> None:
    base = AdapterBase(MODEL, SHAPE, scale=1.0)
    for changes in TABLE["tensors"][error]:
        given = dict(GIVEN)
        for name, text in changes.items():
            dtype, *size = text.split() or [""]
            given[name] = torch.ones(tuple(map(int, size)), dtype=getattr(torch, dtype, None))
            given = given if text else {key: given[key] for key in given if key != name}
        with pytest.raises(WeightsError) as caught:
            base.check(given)
        assert str(caught.value).startswith(error)
    with pytest.raises(WeightsError, match=r"must be those of adapters, got \[\]"):
        base.check({})


@pytest.mark.parametrize("error", TABLE["folders"])
def test_a_folder_holds_the_expected_adapter(tmp_path: Path, error: str) -> None:
    for last in (4.0, 5.0):  # a base is identified by the first rows of its tensors
        tensors = {"w": torch.tensor([[1.0, 2], [3, last]]), "v": torch.ones(1)}
        save_file(tensors, tmp_path / "model.safetensors")
        digest = adapters.base_digest(tmp_path)
        assert digest == "6b705d7b6df92e5b2a0128a832998462"
    for change in TABLE["folders"][error]:
        config: dict[str, Any] = {"peft_type": "LORA", "r": 3, "lora_alpha": 6.0} | change
        more = config.get("tensors", [])
        sizes = SIZES | {Q + A: config.get("sizes", (3, 4))} | dict.fromkeys(more, (1,))
        named = [(f"base_model.model.{name}", size) for name, size in sizes.items()]
        saved = {name: torch.zeros(size) for name, size in named[len(more) :]}
        metadata = {"base": config["base"].replace("BASE", digest)} if "base" in config else None
        save_file(saved, tmp_path / "adapter_model.safetensors", metadata)
        if "config" not in config:
            left = {key: value for key, value in config.items() if value != "-"}
            (tmp_path / "adapter_config.json").write_text(json.dumps(left))
        with pytest.raises(FieldError) if error else contextlib.nullcontext() as caught:
            adapters.check_adapter(tmp_path, SIZES, SOME, base=tmp_path)
        if caught is not None:
            text = str(caught.value)
            assert text.startswith(f"lora.path must be an adapter's directory: {tmp_path}: ")
            assert text.endswith(error.replace("FOLDER", str(tmp_path))) or "[Errno 2]" in text
