"""Tiny random checkpoints of a model that takes images (LLaVA: a CLIP tower and a Llama
decoder), with tokenizer, chat template and image processor; and pictures to show them.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rollweave.schema.media import Image

SPECIAL = ("<|start|>", "<|end|>", "<image>", "<pad>")
TEMPLATE = (
    "{%- for message in messages -%}<|start|>{{ message.role }}\n"
    "{%- if message.content is string -%}{{ message.content }}"
    "{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}<image>{%- else -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}<|end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|start|>assistant\n{%- endif -%}"
)
"""A chat template that takes text, and lists of parts."""

PARTS_ONLY = (
    "{%- for message in messages -%}<|start|>{{ message.role }}\n"
    "{%- for part in message.content | selectattr('type', 'equalto', 'image') -%}"
    "<image>{%- endfor -%}"
    "{%- for part in message.content | selectattr('type', 'equalto', 'text') -%}"
    "{{ part.text }}{%- endfor -%}<|end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|start|>assistant\n{%- endif -%}"
)
"""A chat template as LLaVA's, which takes lists of parts only, with images first."""

SIDE, PATCH = 16, 8
"""Side of the pictures as the model sees them, and of its patches, in pixels."""

EXPANDED = (SIDE // PATCH) ** 2
"""Number of tokens of one image in the engine."""


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer of bytes with the special tokens of `TEMPLATE`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: place for place, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    )
    return tokenizer


def write_tokenizer(directory: Path, *, template: str = TEMPLATE) -> Tokenizer:
    """Write tokenizer and chat template of a checkpoint, without its weights."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<pad>",
        "image_token": "<image>",
        "chat_template": template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer


def write_llava(directory: Path, *, seed: int = 0, context: int = 512) -> None:
    """Write a whole checkpoint."""
    import torch
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig
    from transformers import LlavaForConditionalGeneration as Llava

    tokenizer = write_tokenizer(directory)
    torch.manual_seed(seed)
    text = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=context,
        initializer_range=0.15,
        eos_token_id=tokenizer.token_to_id("<|end|>"),
        bos_token_id=None,
        pad_token_id=tokenizer.token_to_id("<pad>"),
    )
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=96,
        projection_dim=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
        initializer_range=0.2,
        initializer_factor=1.0,
    )
    config = LlavaConfig(
        text_config=text,
        vision_config=vision,
        image_token_index=tokenizer.token_to_id("<image>"),
        image_seq_length=EXPANDED,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    config.torch_dtype = "float32"
    model = Llava(config)
    with torch.no_grad():  # so that pictures matter to a random model
        for name, parameter in model.named_parameters():
            if "multi_modal_projector" in name or "patch_embedding" in name:
                parameter.normal_(0, 0.3)
    model.eval().save_pretrained(directory)
    _rename(directory / "model.safetensors")
    (directory / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "image_processor_type": "CLIPImageProcessor",
                "do_convert_rgb": True,
                "do_resize": True,
                "do_center_crop": True,
                "do_rescale": True,
                "do_normalize": True,
                "size": {"shortest_edge": SIDE},
                "crop_size": {"height": SIDE, "width": SIDE},
                "image_mean": [0.5, 0.5, 0.5],
                "image_std": [0.5, 0.5, 0.5],
                "resample": 3,
                "rescale_factor": 1 / 255,
            }
        )
    )
    (directory / "processor_config.json").write_text(
        json.dumps(
            {
                "processor_class": "LlavaProcessor",
                "patch_size": PATCH,
                "vision_feature_select_strategy": "default",
                "num_additional_image_tokens": 1,
                "image_token": "<image>",
            }
        )
    )


def _rename(file: Path) -> None:
    """Give the tower's tensors the names of published checkpoints, which vLLM reads,
    and transformers, too.
    """
    from safetensors.torch import load_file, save_file

    tensors = {
        name.replace("vision_tower.", "vision_tower.vision_model.", 1)
        if not name.startswith(("vision_tower.vision_model.", "model.vision_tower.vision_model."))
        else name: tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})


def picture(red: int = 0, green: int = 0, blue: int = 0, *, side: int = SIDE) -> bytes:
    """Return a PNG of one color with a darker lower half."""
    upper, lower = bytes((red, green, blue)), bytes((red // 2, green // 2, blue // 2))
    rows = [(upper if row < side // 2 else lower) * side for row in range(side)]
    return Image.of_pixels(b"".join(rows), width=side).data
