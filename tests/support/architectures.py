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
VISION: dict[str, Any] = {"depth": 2, "hidden_size": 32, "num_heads": 2}
ROPES: dict[str, Any] = {  # of text, height and width
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
}
IMAGES: dict[str, Any] = {  # tokens that text does not have
    "image_token_id": VOCABULARY - 1,
    "video_token_id": VOCABULARY - 2,
    "vision_start_token_id": VOCABULARY - 3,
    "vision_end_token_id": VOCABULARY - 4,
}

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
    "gemma3_vision": lambda: transformers.Gemma3Config(
        text_config={**SIZES, **HEADS, **MIXED},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=1,
        image_token_index=VOCABULARY - 1,
    ),
    "qwen2_vl": lambda: transformers.Qwen2VLConfig(
        text_config={**SIZES, **ROPES},
        vision_config={**VISION, "embed_dim": 32, "mlp_ratio": 2},
        **IMAGES,
    ),
    "qwen2_5_vl": lambda: transformers.Qwen2_5_VLConfig(
        text_config={**SIZES, **ROPES},
        vision_config={
            **VISION,
            "intermediate_size": 48,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [1],
        },
        **IMAGES,
    ),
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
    config = CONFIGURATIONS[name]()
    model = _auto(config).from_config(config)
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


def read(path: Path, **options: Any) -> Any:
    """Return the model of a checkpoint in float32, as transformers reads it."""
    auto = _auto(transformers.AutoConfig.from_pretrained(path))
    return auto.from_pretrained(path, dtype=torch.float32, **options)


def _auto(config: Any) -> Any:
    """Return the class of transformers that builds and reads models of this
    configuration.
    """
    if hasattr(config, "vision_config"):
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM
