"""The scratch checkpoint loads in transformers and is reproducible, and its tokenizer
keeps words whole.
"""

import string
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollweave.train.scratch import (
    CHARACTERS,
    INIT_STD,
    SPECIALS,
    build_checkpoint,
    build_tokenizer,
)
from tests.support.properties import examples
from tests.support.trainers import CONTEXT, SCRATCH, WORDS

TOKENIZER = build_tokenizer([*WORDS, " up=wall", " up=ice", "ice", "<answer>", "</answer>"])


def pieces(text: str) -> list[str]:
    return [
        TOKENIZER.decode([token], skip_special_tokens=False) for token in TOKENIZER.encode(text).ids
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" at=a1 up=wall", [" at=a1", " up=wall"]),
        ("<up><|im_end|>\n", ["<up>", "<|im_end|>", "\n"]),
        ("<|im_start|>user\n at=b2", ["<|im_start|>", "user", "\n", " at=b2"]),
        (" at=a12", [" ", "a", "t", "=", "a", "1", "2"]),  # not the word ` at=a1` and a 2
        ("nice ice", ["n", "i", "c", "e", " ", "ice"]),
        ("<answer>7</answer>", ["<answer>", "7", "</answer>"]),
        ("users", ["u", "s", "e", "r", "s"]),
        ("é", ["<|unk|>"]),
        ("", []),
    ],
)
def test_tokenizes_text_into_the_expected_pieces(text: str, expected: list[str]) -> None:
    assert pieces(text) == expected


@settings(max_examples=examples(150))
@given(
    text=st.lists(
        st.one_of(
            st.sampled_from([*WORDS, " up=wall", "user"]), st.sampled_from(sorted(CHARACTERS))
        )
    ).map("".join)
)
def test_printable_text_survives(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_knows_exactly_the_printable_characters() -> None:
    assert set(CHARACTERS) == set(string.printable) - set("\r\x0b\x0c")
    assert TOKENIZER.get_vocab_size() == len(SPECIALS) + len(CHARACTERS) + 4 + len(WORDS) + 5


@pytest.mark.parametrize("word", ["", "a<|im_end|>"])
def test_refuses_words_that_cannot_be_tokens(word: str) -> None:
    with pytest.raises(ValueError, match="a word must not"):
        build_tokenizer([word])


def test_builds_a_hugging_face_checkpoint(tmp_path: Path) -> None:
    build_checkpoint(tmp_path / "m", scratch=SCRATCH, context=CONTEXT, words=WORDS, seed=3)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "m"),
        AutoTokenizer.from_pretrained(tmp_path / "m"),
    )
    assert model.config.model_type == "qwen3"
    assert model.config.tie_word_embeddings
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.max_position_embeddings == CONTEXT
    assert (
        model.config.eos_token_id
        == tokenizer.eos_token_id
        == tokenizer.convert_tokens_to_ids("<|im_end|>")
    )
    assert float(model.model.layers[0].mlp.up_proj.weight.detach().std()) == pytest.approx(
        INIT_STD, rel=0.1
    )
    messages = [{"role": "user", "content": " at=a1"}, {"role": "assistant", "content": "<up>"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == "<|im_start|>user\n at=a1<|im_end|>\n<|im_start|>assistant\n<up><|im_end|>\n"
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\n at=a1<|im_end|>\n<|im_start|>assistant\n"
    plain = Tokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    assert plain.encode(text).ids == tokenizer(text).input_ids


def test_the_seed_determines_the_weights(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        build_checkpoint(tmp_path / name, scratch=SCRATCH, context=CONTEXT, words=WORDS, seed=seed)
    assert torch.equal(state, torch.get_rng_state())  # the global random state is untouched
    payloads = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert payloads[0] == payloads[1] != payloads[2]
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (
        tmp_path / "c" / "tokenizer.json"
    ).read_bytes()
