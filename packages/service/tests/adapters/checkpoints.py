"""A small checkpoint for other trainers, which load it with transformers."""

import json
from pathlib import Path

from tests.support.chats import CHATML, SPECIAL_MAP, bpe
from tests.support.tiny_models import build, save


def checkpoint(directory: Path) -> Path:
    """Write random weights and a byte-level tokenizer that transformers and the engine
    can load.
    """
    directory.mkdir()
    vocab = -(-bpe().get_vocab_size() // 8) * 8
    save(build("qwen3", vocab_size=vocab, max_position_embeddings=1024), directory)
    bpe().save(str(directory / "tokenizer.json"))
    settings = {
        **SPECIAL_MAP,
        "chat_template": CHATML,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|end|>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
