"""Creates a Hugging Face checkpoint directory with random weights and a word-level
tokenizer of the tasks' own words.

Invariants: text of printable ASCII, tabs and newlines survives encoding and decoding
unchanged; a whole word is one token wherever it stands alone, the longest word wins,
and everything else becomes single characters; the same arguments give the same bytes.
Torch is imported only where weights are drawn, because a dry run needs only the
tokenizer.
"""

import json
import re
import string
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from rollweave.io.disk import new_directory
from rollweave.schema.config.training import HEAD_DIM, ScratchModel
from rollweave.weights.checkpoint import ModelShape, read_shape

if TYPE_CHECKING:
    import torch

TURN_START, TURN_END, PAD, UNKNOWN = "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|unk|>"
SPECIALS = (PAD, TURN_START, TURN_END, UNKNOWN)
ROLES = ("system", "user", "assistant", "tool")

CHARACTERS = "".join(sorted(set(string.printable) - set("\r\x0b\x0c")))

INIT_STD = 0.12
"""Standard deviation of random weights: transformers' value, 0.02, is for wider models.
"""

ROPE_THETA = 100.0
"""Base of the rotary embeddings: sequences of such a model are short."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build_checkpoint(
    path: Path,
    *,
    scratch: ScratchModel,
    context: int,
    words: Sequence[str],
    seed: int,
    head_dim: int = HEAD_DIM,
) -> None:
    """Write config, random weights (drawn from `seed`) and tokenizer to directory
    `path`; `context` is the maximum length of a sequence.

    Raises `ValueError` for a word that cannot be a token.
    """
    from safetensors.torch import save_file

    tokenizer = build_tokenizer(words)
    vocab = tokenizer.get_vocab_size()
    shape = scratch_shape(scratch, vocab, context=context, head_dim=head_dim)
    config = _model_config(shape, tokenizer)
    with new_directory(path) as directory:
        (directory / "config.json").write_text(json.dumps(config, indent=2))
        tensors = _random_weights(read_shape(directory), init_std=INIT_STD, seed=seed)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save(str(directory / "tokenizer.json"))
        (directory / "tokenizer_config.json").write_text(
            json.dumps(_tokenizer_config(context), indent=2)
        )


def scratch_shape(
    scratch: ScratchModel, vocab: int, *, context: int, head_dim: int = HEAD_DIM
) -> ModelShape:
    """Return the shape of the model that `[model.scratch]` builds with `vocab`
    tokens.
    """
    return ModelShape(
        vocab=vocab,
        hidden=scratch.hidden,
        layers=scratch.layers,
        heads=scratch.hidden // head_dim,
        kv_heads=scratch.hidden // head_dim // 2,
        head_dim=head_dim,
        ffn=scratch.ffn,
        context=context,
        tied=True,
        qk_norm=True,
    )


def _model_config(shape: ModelShape, tokenizer: Tokenizer) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "max_position_embeddings": shape.context,
        "initializer_range": INIT_STD,
        "tie_word_embeddings": shape.tied,
        "attention_bias": False,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(TURN_END),
        "pad_token_id": tokenizer.token_to_id(PAD),
        "dtype": "float32",
    }


def _random_weights(shape: ModelShape, *, init_std: float, seed: int) -> "dict[str, torch.Tensor]":
    """Initialize like transformers: norms are 1, everything else is normal; this
    architecture has no biases.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(size)
        if name.endswith("norm.weight")
        else init_std * torch.randn(size, generator=generator)
        for name, size in shape.tensors().items()
    }


def build_tokenizer(words: Iterable[str]) -> Tokenizer:
    """Build a tokenizer of printable characters, turn markers, role names and `words`.

    The ids are assigned to specials, characters, then words in the given order.
    """
    unique = list(dict.fromkeys([*ROLES, *words]))
    for word in unique:
        if not word or any(special in word for special in SPECIALS):
            raise ValueError(f"a word must not be empty or contain a special token, got {word!r}")
    whole_words = [word for word in unique if word not in CHARACTERS]
    vocabulary = {
        token: index for index, token in enumerate([*SPECIALS, *CHARACTERS, *whole_words])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIALS]
    )
    longest_first = sorted(whole_words, key=len, reverse=True)
    pattern = "|".join([*map(_whole_word, longest_first), r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _whole_word(word: str) -> str:
    """Return a pattern for `word` that does not match inside a longer run of letters or
    digits (` at=a1` is not in ` at=a12`).
    """
    before = r"(?<![A-Za-z0-9_])" if re.match(r"\w", word[0], re.ASCII) else ""
    after = r"(?![A-Za-z0-9_])" if re.match(r"\w", word[-1], re.ASCII) else ""
    return before + re.escape(word) + after


def _tokenizer_config(context: int) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "additional_special_tokens": [TURN_START],
        "chat_template": CHAT_TEMPLATE,
    }
