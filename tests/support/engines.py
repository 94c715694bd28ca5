"""A tiny checkpoint, the real engine loop, and the environment of engine processes."""

import json
import sys
from pathlib import Path

from rollweave.engine.clients.inproc import MakeLoop

ROOT = Path(__file__).parents[2]


def tiny_checkpoint(directory: Path, **changes: object) -> Path:
    """Write a random Qwen3-shaped checkpoint of a few thousand parameters without
    transformers; `changes` apply to its config.
    """
    import torch
    from safetensors.torch import save_file

    from rollweave.weights.checkpoint import read_shape

    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 128,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 24,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        **changes,
    }
    (directory / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    tensors = {
        name: torch.randn(shape) * 0.1 for name, shape in read_shape(directory).tensors().items()
    }
    save_file(tensors, directory / "model.safetensors")
    return directory


def real_loop() -> MakeLoop:
    from rollweave.engine.loop import EngineLoop

    return EngineLoop


def environment() -> dict[str, str]:
    return {
        "PYTHONPATH": f"{ROOT}:{':'.join(path for path in sys.path if path)}",
        "OMP_NUM_THREADS": "1",
    }
