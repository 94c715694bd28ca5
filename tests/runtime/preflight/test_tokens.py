"""Tokens of prompts that a model has no embedding of are found before the run."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from rollweave.rollout.chat.codec import ChatCodec
from rollweave.runtime.preflight.prompts import check_tokens, describe_template
from rollweave.weights.checkpoint import read_shape
from tests.support.chat_families import checkpoint

SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
}


@pytest.mark.parametrize(
    ("rows", "token", "status", "text"),
    [
        (0, None, "", ""),
        (1, AddedToken("[PAD]", special=True), "warn", "such as '[PAD]'"),
        (1, AddedToken("<b>"), "fail", "got 1 beyond them, such as '<b>'"),
        (1, None, "fail", "such as '<|im_start|>'"),
        (9, None, "fail", "got 9 beyond them"),
    ],
)
def test_tokens_beyond_the_embedding(
    tmp_path: Path, rows: int, token: AddedToken | None, status: str, text: str
) -> None:
    """`rows` tokens have no row."""
    checkpoint(tmp_path, "chatml", "byte_level")
    path = str(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    if token is not None:
        tokenizer.add_tokens([token])
        tokenizer.save(path)
    size = tokenizer.get_vocab_size()
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "vocab_size": size}))
    shape = dataclasses.replace(read_shape(tmp_path), vocab=size - rows)
    checks = list(check_tokens(ChatCodec.from_directory(tmp_path), shape))
    assert [check.status for check in checks] == [status] * bool(status)
    assert all(text in check.detail for check in checks)


def test_ends_beyond_the_vocabulary_are_none(tmp_path: Path) -> None:
    checkpoint(tmp_path, "chatml", "with_begin_and_end")  # names 1, 2 and 999999
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "vocab_size": 1000}))
    codec = ChatCodec.from_directory(tmp_path)
    assert {1, 2} < set(codec.stop_token_ids)
    assert max(codec.stop_token_ids) < 1000


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("qwen3", "a turn ends at token .*; thoughts stay as they were"),
        ("user_assistant", r"at token 1 or text '\\n'$"),
    ],
)
def test_the_dry_run_says_what_the_template_does(tmp_path: Path, template: str, words: str) -> None:
    codec = ChatCodec.from_directory(checkpoint(tmp_path, template, "byte_level"))
    assert re.search(words, describe_template(codec).detail)
