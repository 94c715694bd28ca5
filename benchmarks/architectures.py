"""Tiny random checkpoints of many architectures, as transformers writes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 100

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
HEADS: dict[str, Any] = {"head_dim": 8}
PADDED: dict[str, Any] = {"pad_token_id": 0}
SLIDING: dict[str, Any] = {"sliding_window": 6}
MIXED: dict[str, Any] = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}

CONFIGURATIONS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2_sliding": lambda: transformers.Qwen2Config(
        **SIZES, **SLIDING, use_sliding_window=True, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, **HEADS),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **HEADS, **EXPERTS, num_experts=4),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, **HEADS, **MIXED),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, **HEADS, **MIXED),
    "mistral": lambda: transformers.MistralConfig(**SIZES, **SLIDING),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "glm4": lambda: transformers.Glm4Config(**SIZES, **HEADS, **PADDED),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **(SIZES | {"num_key_value_heads": 4}),
        **EXPERTS,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
    ),
    "phi": lambda: transformers.PhiConfig(**(SIZES | {"num_key_value_heads": 4}), **PADDED),
    "phi3": lambda: transformers.Phi3Config(**SIZES, **PADDED, **SLIDING),
    "gpt_oss": lambda: transformers.GptOssConfig(**SIZES, **HEADS, **MIXED, num_local_experts=4),
    "cohere2": lambda: transformers.Cohere2Config(**SIZES, **PADDED, **SLIDING),
    "granite": lambda: transformers.GraniteConfig(**SIZES, logits_scaling=3.0),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES, **PADDED),
}
"""Architecture → its configuration. Windows are shorter than the sequences."""


def build(name: str, path: Path, *, seed: int = 0) -> Path:
    """Write a checkpoint with random weights, in which no two layers are alike."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGURATIONS[name]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                # otherwise ones and zeros, which hide mistakes
                parameter.normal_(0.9, 0.2)
        for name_, buffer in model.named_buffers():
            if name_.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1)
    model.save_pretrained(path)
    return path
