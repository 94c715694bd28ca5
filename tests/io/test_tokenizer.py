"""What a checkpoint's tokenizer consists of. tests/rollout/chat/test_reference.py
compares its tokens with those of transformers.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from rollweave.io.tokenizer import missing_tokenizer, read_tokenizer, tokenizer_files
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.schema.chat import Message
from rollweave.schema.errors import ConfigError
from tests.support.chats import CHATML
from tests.support.tokenizer_forms import FORMS


def test_a_text_has_the_same_tokens_each_time_however_long_it_is(tmp_path: Path) -> None:
    merges = [("a", "b"), ("ab", "ab")]
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "abab": 3}, merges, dropout=0.9))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    read = read_tokenizer(tmp_path)
    assert read is not None
    assert read.tokenizer.encode("abab" * 9).ids == [3] * 9
    assert read.tokenizer.encode("ab").ids == [2]


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("tokenizer.json", "{}", r"tokenizer\.json must be a tokenizer"),
        ("tokenizer_config.json", "[]", r"must hold a JSON object, got list"),
        ("tokenizer_config.json", "\ufeff{}", r"must be readable JSON: Unexpected UTF-8 BOM"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"5": 3}}', "describe a tokenizer's"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}', "describe a tokenizer's"),
        ("special_tokens_map.json", "x", "must be readable JSON"),
    ],
)
def test_what_cannot_be_read_is_named_in_one_line(
    tmp_path: Path, file: str, content: str, problem: str
) -> None:
    FORMS["byte_level"](tmp_path, ["<m>"])
    (tmp_path / file).write_text(content)
    with pytest.raises(ConfigError, match=problem) as caught:
        read_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_other_forms_of_tokenizers_are_named_with_the_way_to_convert_them(tmp_path: Path) -> None:
    assert missing_tokenizer(tmp_path) == f"{tmp_path} must have a tokenizer.json, got none"
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x05")
    assert "got tokenizer.model; transformers writes one: AutoTokenizer" in (
        missing_tokenizer(tmp_path)
    )
    with pytest.raises(ConfigError, match=r"got tokenizer\.model; transformers writes one"):
        ChatCodec.from_directory(tmp_path)


SECTIONS = ("model", "normalizer", "pre_tokenizer", "decoder", "added_tokens")


def sections(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what determines the tokens of a text, a sequence of one as its part."""
    whole = json.loads(tokenizer.to_str())
    parts = (whole["pre_tokenizer"] or {}).get("pretokenizers", ())
    return {name: whole[name] for name in SECTIONS} | (
        {"pre_tokenizer": parts[0]} if len(parts) == 1 else {}
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {f"{name}_token": None for name in ("bos", "eos", "pad")},
        {"add_prefix_space": True},
        {"add_prefix_space": False, "legacy": False, "split_special_tokens": True},
        {"legacy": True},
        {"tokenizer_class": None},
        {"image_token": "<i>", "x_token": {}, "y_token": 3, "unk_token": "<u>", "name": "<n>"},
        {"unk_token": {"__type": "AddedToken", "content": "<u>"}},
        {"extra_special_tokens": ["<e>", "<m>"], "additional_special_tokens": ["<f>"]},
        {"additional_special_tokens": ["<e>", "<s>"]},
        {"extra_special_tokens": {"e_token": "<e>"}},
        {
            "added_tokens_decoder": {
                "10": {"content": "<t>", "special": True},
                "9": {"content": "r"},
            }
        },
    ],
    ids=str,
)
def test_the_tokenizer_of_every_form_is_that_of_transformers(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    from transformers import AutoTokenizer

    for form, write in FORMS.items():
        directory = tmp_path / form
        directory.mkdir()
        write(directory, ["<m>", "<|im_end|>"])
        config = json.loads((directory / "tokenizer_config.json").read_text())
        (directory / "tokenizer_config.json").write_text(json.dumps(config | changes))
        read, reference = read_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
        assert read is not None
        assert sections(read.tokenizer) == sections(reference.backend_tokenizer), form
        assert read.special == {k: str(v) for k, v in reference.special_tokens_map.items()}, form
        assert read.tokenizer.encode_special_tokens is reference.split_special_tokens
    assert read_tokenizer(tmp_path) is None


@pytest.mark.parametrize("form", ["tokens_in_old_files", "with_begin_and_end", "sentencepiece"])
@pytest.mark.parametrize("place", ["jinja", "config", "old", "named", "listed"])
def test_the_files_of_a_tokenizer_are_all_that_a_conversation_needs(
    tmp_path: Path, form: str, place: str
) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    FORMS[form](source, ["<|im_start|>", "<|im_end|>"])
    _write_template(source, place)
    for name in tokenizer_files(source):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((source / name).read_bytes())
    (copy / "config.json").write_bytes((source / "config.json").read_bytes())
    messages = [Message(role="user", content="the user <|im_end|>")]
    one, other = ChatCodec.from_directory(source), ChatCodec.from_directory(copy)
    assert one.start(messages) == other.start(messages)
    assert one.start(messages, ('{"a": 1}',)) == other.start(messages, ('{"a": 1}',))
    assert one.stop_token_ids == other.stop_token_ids
    assert one.tokenizer.to_str() == other.tokenizer.to_str()


def _write_template(directory: Path, place: str) -> None:
    """Write a template in one of the places that a checkpoint may have it."""
    config = json.loads((directory / "tokenizer_config.json").read_text())
    with_tools = f"{{{{ tools | tojson }}}}{CHATML}"
    match place:
        case "jinja":
            (directory / "chat_template.jinja").write_text(CHATML)
        case "config":
            config["chat_template"] = CHATML
        case "old":
            (directory / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
        case "named":
            (directory / "additional_chat_templates").mkdir()
            for name, text in (("default", CHATML), ("tool_use", with_tools), ("rag", "{{ x")):
                (directory / "additional_chat_templates" / f"{name}.jinja").write_text(text)
        case "listed":
            config["chat_template"] = [
                {"name": name, "template": text}
                for name, text in (("tool_use", with_tools), ("default", CHATML))
            ]
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def test_a_hub_cache_is_read_through_its_links(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    for folder in (blobs, snapshot):
        folder.mkdir(parents=True)
    FORMS["byte_level"](blobs, ["<|im_start|>", "<|im_end|>"])
    (blobs / "template").write_text(CHATML)
    (snapshot / "chat_template.jinja").symlink_to("../../blobs/template")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert ChatCodec.from_directory(snapshot).stop_token_ids
    expected = {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json"}
    assert {str(name) for name in tokenizer_files(snapshot)} == expected
