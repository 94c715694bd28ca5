"""Reads a Hugging Face checkpoint directory, for engines and trainer: the shape from
config.json, the tensors from safetensors.

Supports Llama, Qwen2 and Qwen3 decoders with full attention and default, linear or
llama3 rotary embeddings. Unsupported settings that would change the result are rejected
by name. Torch is imported only where tensors are, so that reading the shape of a model
from scratch does not wait for it.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
from safetensors import SafetensorError, safe_open

from rollweave.io.reading import read_json
from rollweave.schema.errors import ConfigError, WeightsError

if TYPE_CHECKING:
    import torch

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


COMPUTED = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
"""Names of tensors that older checkpoints have, and models compute from config.json."""

OTHER_FORMS = ("pytorch_model*.bin", "consolidated*", "*.gguf", "*.h5", "*.msgpack")
"""Files of weights that must be converted to safetensors first."""

TO_CONVERT = (
    "transformers converts it: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(DIR)"
)

GGUF_TO_CONVERT = (
    "transformers, with the package gguf, converts it: "
    "AutoModelForCausalLM.from_pretrained({folder!r}, gguf_file={name!r}, "
    "quantization_config=GgufConfig(dequantize=True)).save_pretrained(DIR), and "
    "AutoTokenizer.from_pretrained({folder!r}, gguf_file={name!r}).save_pretrained(DIR)"
)

SAMPLES, SAMPLE_BYTES = 64, 1 << 16
"""Number and size of the pieces of a file of weights that a fingerprint reads."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes and switches of a decoder.

    `inv_freq` are the rotary frequencies (head_dim / 2), with scaling applied.
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    context: int
    eps: float = 1e-6
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    inv_freq: tuple[float, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    sizes: Mapping[str, tuple[int, ...]] | None = None
    """The checkpoint's tensors, for an architecture that this package does not
    compute.
    """

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return every parameter's shape by its transformers name.

        A tied `lm_head.weight` is not included.
        """
        if self.sizes is not None:
            return dict(self.sizes)
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, self.hidden)
        }
        for layer in range(self.layers):
            name = f"model.layers.{layer}."
            for part, rows in (("q", q), ("k", kv), ("v", kv)):
                shapes[f"{name}self_attn.{part}_proj.weight"] = (rows, self.hidden)
                if self.qkv_bias:
                    shapes[f"{name}self_attn.{part}_proj.bias"] = (rows,)
            shapes[f"{name}self_attn.o_proj.weight"] = (self.hidden, q)
            if self.out_bias:
                shapes[f"{name}self_attn.o_proj.bias"] = (self.hidden,)
            if self.qk_norm:
                shapes[f"{name}self_attn.q_norm.weight"] = (self.head_dim,)
                shapes[f"{name}self_attn.k_norm.weight"] = (self.head_dim,)
            for part, rows, columns in (
                ("gate", self.ffn, self.hidden),
                ("up", self.ffn, self.hidden),
                ("down", self.hidden, self.ffn),
            ):
                shapes[f"{name}mlp.{part}_proj.weight"] = (rows, columns)
                if self.mlp_bias:
                    shapes[f"{name}mlp.{part}_proj.bias"] = (rows,)
            shapes[f"{name}input_layernorm.weight"] = (self.hidden,)
            shapes[f"{name}post_attention_layernorm.weight"] = (self.hidden,)
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return shapes

    def parameters(self) -> int:
        """Return the number of the model's weights."""
        return sum(map(math.prod, self.tensors().values()))

    def kv_bytes(self, width: int) -> int:
        """Return the bytes of one token's keys and values in numbers of `width`
        bytes.
        """
        return 2 * self.layers * self.kv_heads * self.head_dim * width

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Raise WeightsError unless `shapes` are the shapes of this model's parameters
        by name; a tied `lm_head.weight` is optional.
        """
        expected = self.tensors()
        if self.sizes is not None:
            # a checkpoint may have tensors that are never published, such as tied
            # weights
            expected = {name: size for name, size in expected.items() if name in shapes}
        missing = sorted(set(expected) - set(shapes))
        unknown = sorted(set(shapes) - set(expected) - ({"lm_head.weight"} if self.tied else set()))
        if missing or unknown:
            raise WeightsError(
                f"tensors must be the model's parameters: missing {missing[:3]}, "
                f"unknown {unknown[:3]}"
            )
        for name, shape in expected.items():
            if tuple(shapes[name]) != shape:
                raise WeightsError(f"{name} must have shape {shape}, got {tuple(shapes[name])}")


def read_shape(directory: Path) -> ModelShape:
    """Read the shape that `directory/config.json` describes.

    Raises ConfigError for missing or unsupported settings.
    """
    config = _read_config(directory)
    names = config.get("architectures") or []
    kind = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)
    if kind is None:
        raise ConfigError(
            f"{directory}/config.json: architectures must name one of "
            f"{', '.join(ARCHITECTURES)}, got {names}"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(
            f"{directory}/config.json: hidden_act must be silu, got {config['hidden_act']!r}"
        )
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or []):
        raise ConfigError(
            f"{directory}/config.json: sliding-window attention is not supported, "
            "got use_sliding_window"
        )
    try:
        return _dense_shape(directory, config, kind)
    except KeyError as error:
        raise ConfigError(f"{directory}/config.json must name {error}") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"{directory}/config.json must describe a model's sizes: {error}"
        ) from error


def _dense_shape(directory: Path, config: dict[str, Any], kind: str) -> ModelShape:
    """Return the shape of a Llama, Qwen2 or Qwen3 model. Raises ConfigError for
    unsupported settings, KeyError for missing ones, and TypeError, ValueError and
    ZeroDivisionError for values that are not valid sizes.
    """
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or hidden // heads)
    context = int(config.get("max_position_embeddings", 2048))
    attention_bias = bool(config.get("attention_bias", False))
    return ModelShape(
        vocab=int(config["vocab_size"]),
        hidden=hidden,
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        ffn=int(config["intermediate_size"]),
        context=context,
        eps=float(config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or kind == "qwen2",
        out_bias=attention_bias and kind != "qwen2",
        mlp_bias=bool(config.get("mlp_bias", False)) and kind == "llama",
        qk_norm=kind == "qwen3",
        inv_freq=_frequencies(directory, config, head_dim),
        eos_token_ids=_eos(directory, config),
    )


def has_native_shape(directory: Path) -> bool:
    """Return False if `read_shape` refuses the model's architecture or settings. A
    directory without a readable config.json counts as native.
    """
    try:
        named = _read_config(directory).get("architectures")
    except ConfigError:
        return True
    try:
        read_shape(directory)
    except ConfigError:
        return not named
    return True


def read_any_shape(directory: Path) -> ModelShape:
    """Read the shape of a checkpoint of any architecture: like `read_shape` where it
    supports the architecture, else the sizes in config.json and the tensors in the
    files.

    Such a shape serves to plan a run and to verify published weights. Raises
    ConfigError for missing or truncated files.
    """
    if has_native_shape(directory):
        return read_shape(directory)
    whole = _read_config(directory)
    text = whole.get("text_config")
    config = whole | text if isinstance(text, dict) else whole
    experts = int(config.get("moe_intermediate_size") or 0)
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        layers, vocab = int(config["num_hidden_layers"]), int(config["vocab_size"])
    except KeyError as error:
        raise ConfigError(f"{directory}/config.json must name {error}") from error
    return ModelShape(
        vocab=vocab,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        ffn=max(
            int(config.get("intermediate_size") or 4 * hidden),
            experts * int(config.get("num_experts_per_tok") or 1),
        ),
        context=int(config.get("max_position_embeddings", 2048)),
        eos_token_ids=_eos(directory, config),
        sizes=read_sizes(directory),
    )


def read_tensors_of(directory: Path) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Yield every tensor of the checkpoint, sharded or not, with its transformers name.

    Raises ConfigError like `read_sizes`.
    """
    for name, shard in _tensors(directory):
        yield name, shard.get_tensor(name)


def read_rows_of(
    directory: Path, rows: Mapping[str, slice]
) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Yield these rows of the tensors in `rows`, with their transformers names. Nothing
    else is read.

    Raises ConfigError like `read_sizes`.
    """
    for name, shard in _tensors(directory):
        if name in rows:
            part = shard.get_slice(name)
            yield name, part[rows[name]] if part.get_shape() else shard.get_tensor(name)


def read_sizes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Read the shapes of all tensors by name, from the files' headers.

    Raises ConfigError for a missing or truncated file, and if it is not clear which
    files are the checkpoint's.
    """
    return {name: tuple(shard.get_slice(name).get_shape()) for name, shard in _tensors(directory)}


def weight_files(directory: Path) -> list[Path]:
    """Return the files of a checkpoint's weights. Raises ConfigError like
    `read_sizes`.
    """
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if not index.exists():
        if single.exists():
            return [single]
        others = [path.name for form in OTHER_FORMS for path in sorted(directory.glob(form))]
        raise ConfigError(
            f"{directory} must hold model.safetensors or {index.name}, got "
            + (f"{others[0]}; {TO_CONVERT}" if others else "neither")
        )
    places = read_json(index).get("weight_map")
    values = list(places.values()) if isinstance(places, dict) else []
    if not values or not all(isinstance(name, str) for name in values):
        raise ConfigError(f"{index} must have a weight_map of names of files, got {places!r:.80}")
    names = sorted(set(values))
    if single.exists() and single.name not in names:
        raise ConfigError(
            f"{directory} must hold the weights of one checkpoint, got {single.name} beside the "
            f"{len(names)} files that {index.name} names; delete the older ones"
        )
    for name in names:
        if Path(name).name != name or not (directory / name).exists():
            raise ConfigError(f"{index} must name files beside it, got {name!r:.80}, which is not")
    return [directory / name for name in names]


def _tensors(directory: Path) -> Iterator[tuple[str, Any]]:
    """Yield each tensor's name and the open file that has the tensor. Buffers that
    models compute themselves are left out.
    """
    seen = dict[str, Path]()
    for path in weight_files(directory):
        try:
            opened = safe_open(str(path), framework="pt")
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} must be a complete safetensors file: {error}") from error
        with opened as shard:
            for name in shard.keys():  # noqa: SIM118 (a safetensors handle is not a mapping)
                if name in seen:
                    raise ConfigError(
                        f"{directory}: {name} must be in one file, got {seen[name].name} and "
                        f"{path.name}"
                    )
                seen[name] = path
                if not COMPUTED.search(name):
                    yield name, shard


def gguf_of(path: Path) -> str:
    """Return how to convert a GGUF file at `path`, or in a folder there that has no
    config.json; "" if there is none.
    """
    if (path / "config.json").exists():
        return ""
    files = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf"))
    if not files:
        return ""
    return GGUF_TO_CONVERT.format(folder=str(files[0].parent), name=files[0].name)


def _read_config(directory: Path) -> dict[str, Any]:
    """Return config.json. Raises ConfigError."""
    if how := gguf_of(directory):
        raise ConfigError(f"a model must be a folder with config.json, got {directory}; {how}")
    return read_json(directory / "config.json", required=True)


def _eos(directory: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Return the end-of-sequence ids from generation_config.json, as transformers does,
    or from config.json if generation_config.json has none.
    """
    eos = read_json(directory / "generation_config.json").get("eos_token_id")
    if eos is None:
        eos = config.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(int(token) for token in eos) if isinstance(eos, list) else (int(eos),)


def _frequencies(directory: Path, config: dict[str, Any], head_dim: int) -> tuple[float, ...]:
    """Return the rotary frequencies, in fp32 as transformers computes them.

    Accepts the old (`rope_scaling`) and the new (`rope_parameters`) spelling. Raises
    ConfigError.
    """
    import torch

    rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    if apart := next((name for name, value in rope.items() if isinstance(value, dict)), None):
        raise ConfigError(
            f"{directory}/config.json: rope_parameters must be those of all layers, got those of "
            f"{apart!r:.80}"
        )
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if float(share) != 1.0:
        raise ConfigError(
            f"{directory}/config.json: partial_rotary_factor must be 1, got {share!r}"
        )
    inv_freq = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if kind == "default":
        pass
    elif kind == "linear":
        inv_freq = inv_freq / float(rope["factor"])
    elif kind == "llama3":
        inv_freq = _llama3(inv_freq, rope)
    else:
        raise ConfigError(
            f"{directory}/config.json: rope_type must be default, linear or llama3, got {kind!r}"
        )
    return tuple(inv_freq.tolist())


def _llama3(inv_freq: "torch.Tensor", rope: dict[str, Any]) -> "torch.Tensor":
    """Apply Llama 3.1's scaling: stretch long wavelengths by `factor`, keep short ones,
    and interpolate between.
    """
    import torch

    factor, low, high = (
        float(rope["factor"]),
        float(rope["low_freq_factor"]),
        float(rope["high_freq_factor"]),
    )
    trained = float(rope["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inv_freq
    smooth = (trained / wavelength - low) / (high - low)
    between = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    scaled = torch.where(wavelength > trained / low, inv_freq / factor, between)
    return torch.where(wavelength < trained / high, inv_freq, scaled)


def fingerprint(directory: Path) -> str:
    """Return a text that identifies a checkpoint's weights: a digest of the names and
    sizes of its safetensors files and of `SAMPLES` pieces spread over each file, which
    takes milliseconds. Without safetensors files, it is the directory's path.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        return str(directory)
    digest = xxhash.xxh3_128()
    for path in files:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name} {size} ".encode())
            for number in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
