"""Shapes of checkpoints: what config.json must say, and the one line that names what is
wrong with it.
"""

import dataclasses
import json
import math
import random
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rollweave.schema.errors import ConfigError, WeightsError
from rollweave.weights import checkpoint

TABLE = tomllib.loads(Path(__file__).with_name("checkpoint.toml").read_text())


def write(directory: Path, **changes: Any) -> None:
    """Write a config.json; a value of "-" leaves the setting out."""
    config = {key: value for key, value in (TABLE["base"] | changes).items() if value != "-"}
    (directory / "config.json").write_text(json.dumps(config))


def parsed(rows: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors by name, from lines of a name and sizes."""
    return {row.split()[0]: tuple(map(int, row.split()[1:])) for row in rows}


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("row", TABLE["shapes"], ids=lambda row: ",".join(row["config"]))
def test_a_shape_follows_from_the_settings(tmp_path: Path, row: dict[str, Any]) -> None:
    write(tmp_path, **row["config"])
    (tmp_path / "generation_config.json").write_text(json.dumps(row.get("generation", {})))
    save(tmp_path, "model.safetensors", "w0")
    shape = checkpoint.read_any_shape(tmp_path)
    expected = row.get("shape", {})
    for field, value in expected.items():
        found = plain(getattr(shape, field))
        if field == "inv_freq":
            assert found == pytest.approx(value, rel=1e-6)
        else:
            assert found == ({"w0": (2, 2)} if field == "sizes" else value), field
    if shape.sizes is not None:
        assert not checkpoint.has_native_shape(tmp_path)
        assert shape.tensors() == parsed(["w0 2 2"])
        return
    assert checkpoint.has_native_shape(tmp_path)
    if shape.head_dim == TABLE["base"]["head_dim"]:
        layer = [*TABLE["tensors"]["layer"], *row.get("more", [])]
        rows = [f"model.layers.{number}.{name}" for number in (0, 1) for name in layer]
        tensors = parsed([*rows, *TABLE["tensors"]["other"]])
        for name in row.get("without", []):
            del tensors[name]
        assert shape.tensors() == tensors
        assert shape.parameters() == sum(map(math.prod, tensors.values()))
        assert shape.kv_bytes(2) == 2 * (2 * 2 * 8) * 2


@pytest.mark.parametrize(("factor", "low", "high", "trained"), [(8, 2, 4, 512), (2, 0.5, 8, 64)])
def test_llama3_frequencies_are_those_of_transformers(
    tmp_path: Path, factor: float, low: float, high: float, trained: int
) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": trained,
    }
    write(tmp_path, head_dim=64, rope_parameters=rope)
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, rope_parameters=rope)
    expected, scale = ROPE_INIT_FUNCTIONS["llama3"](config)
    assert scale == 1.0
    assert checkpoint.read_shape(tmp_path).inv_freq == pytest.approx(expected.tolist(), rel=1e-6)


@pytest.mark.parametrize("error", TABLE["errors"])
def test_what_is_wrong_is_one_line_that_names_the_file(tmp_path: Path, error: str) -> None:
    write(tmp_path, **TABLE["errors"][error])
    with pytest.raises(ConfigError, match=re.escape(error)) as caught:
        checkpoint.read_shape(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_configuration_counts_as_native(tmp_path: Path) -> None:
    """Its error is that of a model of this package, which names the file."""
    assert checkpoint.has_native_shape(tmp_path)
    write(tmp_path, architectures="-")
    assert checkpoint.has_native_shape(tmp_path)
    write(tmp_path, architectures=["Other"], hidden_size="-")
    with pytest.raises(ConfigError, match=r"config\.json must name 'hidden_size'"):
        checkpoint.read_any_shape(tmp_path)


def test_tensors_that_are_not_the_parameters_are_named(tmp_path: Path) -> None:
    write(tmp_path, tie_word_embeddings=True)
    shape = checkpoint.read_shape(tmp_path)
    own, head = shape.tensors(), parsed(["lm_head.weight 100 64"])
    shape.check(own)
    shape.check(own | head)
    text = "tensors must be the model's parameters: missing {}, unknown {}"
    for shapes, error in (
        (own | {"x": (1,)}, text.format("[]", "['x']")),
        (head, text.format(sorted(own)[:3], "[]")),
        (own | dict.fromkeys("dcba", (1,)), text.format("[]", "['a', 'b', 'c']")),
        (own | {"model.norm.weight": (65,)}, "model.norm.weight must have shape (64,), got (65,)"),
    ):
        with pytest.raises(WeightsError, match=re.escape(error)):
            shape.check(shapes)
    with pytest.raises(WeightsError, match=r"unknown .'lm_head.weight'"):
        dataclasses.replace(shape, tied=False, sizes=own).check(own | head)
    dataclasses.replace(shape, sizes=own).check({"model.norm.weight": (64,)})


def test_any_change_of_the_files_changes_the_fingerprint(tmp_path: Path) -> None:
    assert checkpoint.fingerprint(tmp_path) == str(tmp_path)
    content = bytearray(random.Random(1).randbytes(checkpoint.SAMPLES * checkpoint.SAMPLE_BYTES))
    prints = set()
    for at in (
        None,
        0,
        checkpoint.SAMPLE_BYTES - 1,
        checkpoint.SAMPLE_BYTES,
        len(content) // 2,
        len(content) - 1,
    ):
        if at is not None:
            content[at] ^= 1
        (tmp_path / "b.safetensors").write_bytes(content)
        prints.add(checkpoint.fingerprint(tmp_path))
    (tmp_path / "b.safetensors").rename(tmp_path / "c.safetensors")
    prints.add(checkpoint.fingerprint(tmp_path))
    (tmp_path / "a.safetensors").write_bytes(b"x")
    prints.add(checkpoint.fingerprint(tmp_path))
    assert len(prints) == 8
    assert checkpoint.fingerprint(tmp_path) == "bf6b543be2ab39d7aa6070760c82c7b5"


def test_reads_the_requested_rows(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).reshape(3, 2), "b": torch.tensor(5.0), "c": torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    rows = dict(checkpoint.read_rows_of(tmp_path, {"a": slice(1, 2), "b": slice(0, 1)}))
    assert {name: row.tolist() for name, row in rows.items()} == {"a": [[2.0, 3.0]], "b": 5.0}
    assert {name: tensor.tolist() for name, tensor in checkpoint.read_tensors_of(tmp_path)} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(
        ConfigError, match=r"model\.safetensors must be a complete safetensors file"
    ):
        checkpoint.read_sizes(tmp_path)


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
    assert checkpoint.read_sizes(tmp_path).keys() == kept
    assert {name for name, _ in checkpoint.read_tensors_of(tmp_path)} == kept
    every = dict.fromkeys((*kept, "rotary_emb.cos_cached"), slice(0, 1))
    assert {name for name, _ in checkpoint.read_rows_of(tmp_path, every)} == kept


@pytest.mark.parametrize("problem", TABLE["files"])
def test_files_that_are_not_one_checkpoint_are_refused(tmp_path: Path, problem: str) -> None:
    files, *places = TABLE["files"][problem]
    for file in files:
        save(tmp_path, file, "w0")
    for index in places:
        write_index(tmp_path, {f"w{place}": file for place, file in enumerate(index)})
    with pytest.raises(ConfigError, match=re.escape(problem)) as caught:
        checkpoint.read_sizes(tmp_path)
    assert "\n" not in str(caught.value)


def test_an_index_may_name_the_one_file(tmp_path: Path) -> None:
    save(tmp_path, "model.safetensors", "w0")
    write_index(tmp_path, {"w0": "model.safetensors"})
    assert checkpoint.weight_files(tmp_path) == [tmp_path / "model.safetensors"]


@pytest.mark.parametrize("given", [".", "model-q4.gguf"])
def test_a_gguf_file_is_refused_with_the_way_to_convert_it(tmp_path: Path, given: str) -> None:
    (tmp_path / "model-q4.gguf").touch()
    with pytest.raises(ConfigError, match=r"must be a folder with config\.json, got .*;") as caught:
        checkpoint.read_shape(tmp_path / given)
    assert f"from_pretrained({str(tmp_path)!r}, gguf_file='model-q4.gguf'" in str(caught.value)


def test_a_gguf_file_beside_a_model_is_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "model-q4.gguf").touch()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config\.json: architectures must name one of"):
        checkpoint.read_shape(tmp_path)
