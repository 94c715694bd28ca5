"""Shapes of checkpoints: what config.json must say, and the one line that names what is
wrong with it.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rollweave.schema.errors import ConfigError
from rollweave.weights.checkpoint import (
    has_native_shape,
    read_rows_of,
    read_shape,
    read_sizes,
    read_tensors_of,
    weight_files,
)

SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
}


def write(directory: Path, **changes: Any) -> None:
    """Write a config.json; a value of None leaves the setting out."""
    config = {key: value for key, value in (SIZES | changes).items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config))


def test_a_shape_has_the_defaults_of_its_architecture(tmp_path: Path) -> None:
    write(tmp_path)
    shape = read_shape(tmp_path)
    assert (shape.hidden, shape.head_dim, shape.kv_heads) == (64, 16, 4)
    assert len(shape.inv_freq) == shape.head_dim / 2
    assert has_native_shape(tmp_path)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architectures must name one of Llama.*, got"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
        ({"use_sliding_window": True}, "sliding-window attention is not supported"),
        ({"hidden_size": None}, "must name 'hidden_size'"),
        ({"vocab_size": "many"}, "must describe a model's sizes: .*'many'"),
        ({"num_attention_heads": 0}, "must describe a model's sizes"),
        ({"rope_scaling": {"rope_type": "linear"}}, "must name 'factor'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type must be .*, got 'yarn'"),
        ({"rope_parameters": {"full_attention": {}}}, "those of all layers, got .*'full_att"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1, got 0.5"),
    ],
)
def test_what_is_wrong_is_one_line_that_names_the_file(
    tmp_path: Path, changes: dict[str, Any], error: str
) -> None:
    write(tmp_path, **changes)
    with pytest.raises(ConfigError, match=error) as caught:
        read_shape(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def save(directory: Path, file: str, *names: str) -> None:
    save_file({name: torch.zeros(2, 2) for name in names}, directory / file)


def write_index(directory: Path, places: dict[str, str]) -> None:
    index = {"metadata": {}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_tensors_that_a_model_computes_itself_are_not_read(tmp_path: Path) -> None:
    layer = "model.layers.0.self_attn."
    save(tmp_path, "1.safetensors", f"{layer}q_proj.weight", f"{layer}rotary_emb.inv_freq")
    save(tmp_path, "2.safetensors", "model.norm.weight", "rotary_emb.cos_cached")
    write_index(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    kept = {f"{layer}q_proj.weight", "model.norm.weight"}
    assert read_sizes(tmp_path).keys() == kept
    assert {name for name, _ in read_tensors_of(tmp_path)} == kept
    every = dict.fromkeys((*kept, "rotary_emb.cos_cached"), slice(0, 1))
    assert {name for name, _ in read_rows_of(tmp_path, every)} == kept


@pytest.mark.parametrize(
    ("files", "places", "problem"),
    [
        (["model.safetensors", "1.safetensors"], ["1.safetensors"], "weights of one checkpoint"),
        (["1.safetensors"], ["1.safetensors", "2.safetensors"], "got '2.safetensors', which is"),
        (["1.safetensors"], ["../1.safetensors"], "must name files beside it, got '../1"),
        (["1.safetensors", "2.safetensors"], ["1.safetensors", "2.safetensors"], "w0 must be in"),
        (["1.safetensors"], [], "must have a weight_map"),
        ([], None, "must hold model.safetensors or .*, got neither"),
        (["pytorch_model.bin"], None, "got pytorch_model.bin; transformers converts it"),
    ],
)
def test_files_that_are_not_one_checkpoint_are_refused(
    tmp_path: Path, files: Sequence[str], places: Sequence[str] | None, problem: str
) -> None:
    for file in files:
        save(tmp_path, file, "w0")
    if places is not None:
        write_index(tmp_path, {f"w{place}": file for place, file in enumerate(places)})
    with pytest.raises(ConfigError, match=problem) as caught:
        read_sizes(tmp_path)
    assert "\n" not in str(caught.value)


def test_an_index_may_name_the_one_file(tmp_path: Path) -> None:
    save(tmp_path, "model.safetensors", "w0")
    write_index(tmp_path, {"w0": "model.safetensors"})
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]


@pytest.mark.parametrize("given", [".", "model-q4.gguf"])
def test_a_gguf_file_is_refused_with_the_way_to_convert_it(tmp_path: Path, given: str) -> None:
    (tmp_path / "model-q4.gguf").touch()
    with pytest.raises(ConfigError, match=r"must be a folder with config\.json, got .*;") as caught:
        read_shape(tmp_path / given)
    assert f"from_pretrained({str(tmp_path)!r}, gguf_file='model-q4.gguf'" in str(caught.value)


def test_a_gguf_file_beside_a_model_is_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "model-q4.gguf").touch()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config\.json: architectures must name one of"):
        read_shape(tmp_path)
