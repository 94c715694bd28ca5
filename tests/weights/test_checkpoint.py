"""Shapes of checkpoints: what config.json must say, and the one line that names what is
wrong with it.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from rollweave.schema.errors import ConfigError
from rollweave.weights.checkpoint import has_native_shape, read_shape

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
