"""The models of bench `gpu`: their shapes, their lengths, and checkpoints of random
weights.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.engine.models import TINY_CONFIG, sizes
from rollweave.weights.checkpoint import read_shape

SHARD_BYTES = 4 << 30
"""Maximum size of one file of a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class GpuCase:
    """One model, and the lengths that are measured with it."""

    name: str
    config: dict[str, int]
    dtype: str = "bfloat16"
    prompt: int = 64
    output: int = 128
    prefill: int = 2048
    train: int = 1024
    """Tokens of one of the eight sequences of a training batch."""


def _qwen3(hidden: int, layers: int, heads: int, ffn: int) -> dict[str, int]:
    return sizes(
        vocab=151_936,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=8,
        head=128,
        ffn=ffn,
        context=40_960,
    )


TINY = GpuCase(
    name="tiny",
    config=TINY_CONFIG,
    prompt=16,
    output=16,
    prefill=64,
    train=64,
)
CASES = (
    GpuCase(name="0.6b", config=_qwen3(1024, 28, 16, 3072)),
    GpuCase(name="1.7b", config=_qwen3(2048, 28, 16, 6144)),
    GpuCase(name="8b", config=_qwen3(4096, 36, 32, 12_288)),
)
"""The shapes of Qwen3 models."""


def write_checkpoint(path: Path, case: GpuCase, device: str) -> None:
    """Write a Qwen3 checkpoint of random weights, in files of bounded size."""
    path.mkdir()
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "rope_theta": 1_000_000,
        "tie_word_embeddings": False,
        **case.config,
    }
    (path / "config.json").write_text(json.dumps(config))
    dtype: torch.dtype = getattr(torch, case.dtype)
    generator = torch.Generator(device).manual_seed(0)
    places: dict[str, str] = {}
    pending: dict[str, torch.Tensor] = {}

    def flush() -> None:
        name = f"model-{len(set(places.values())):05}.safetensors"
        save_file(pending, path / name)
        places.update(dict.fromkeys(pending, name))
        pending.clear()

    for name, size in read_shape(path).tensors().items():
        tensor = torch.empty(size, dtype=dtype, device=device)
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, 0.02, generator=generator)
        pending[name] = tensor.cpu()
        if sum(one.nbytes for one in pending.values()) >= SHARD_BYTES:
            flush()
    if pending:
        flush()
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
