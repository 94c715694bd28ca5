"""Tiny tokenizers in the forms that checkpoints have, each written to a directory with
the files that belong to it.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

BOS, EOS, PAD, UNK = "<s>", "</s>", "<pad>", "<unk>"

WORDS = [
    "the user said to the assistant: think, then answer. The system is of use.\n\n",
    'User: USER: Assistant: {"name": "look", "arguments": {"place": "here"}} result\n',
    "### Instruction:\n### Response:\nfunction call tool 12 345, and (perhaps) more...\n",
] * 4

SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Words with the space before them; line ends join the punctuation before them."""

Spec = dict[str, Any]
FORMS: dict[str, Callable[[Path, Sequence[str]], None]] = {}
"""Functions that write a tokenizer whose markers are given, by the form's name."""


def form(make: Callable[[Path, Sequence[str]], None]) -> Callable[[Path, Sequence[str]], None]:
    FORMS[make.__name__] = make
    return make


def _write(
    directory: Path, tokenizer: Tokenizer, *, kind: str = "PreTrainedTokenizerFast", **config: Any
) -> None:
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"tokenizer_class": kind, "bos_token": BOS, "eos_token": EOS, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    model = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "eos_token_id": 1}
    (directory / "config.json").write_text(json.dumps(model))


def _added(texts: Sequence[str], **flags: bool) -> list[AddedToken]:
    flags = {"special": True, "normalized": False, **flags}
    return [AddedToken(text, **flags) for text in dict.fromkeys((BOS, EOS, *texts))]


def _bytes(*, prefix: bool = False, splits: Sequence[Any] = ()) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=not splits)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, last])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[BOS, EOS, PAD, UNK],
        show_progress=False,
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    return tokenizer


def _sentencepiece(*, unigram: bool = False) -> Tokenizer:
    """Return a tokenizer of words with ▁ for spaces, and of bytes."""
    space = pre_tokenizers.Metaspace(prepend_scheme="first", split=unigram)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    special = [UNK, BOS, EOS, PAD]
    if unigram:
        tokenizer = Tokenizer(models.Unigram())
        trainer: Any = trainers.UnigramTrainer(
            vocab_size=120, unk_token=UNK, special_tokens=special, show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.BPE(unk_token=UNK, fuse_unk=True, byte_fallback=True))
        trainer = trainers.BpeTrainer(
            vocab_size=520, special_tokens=[*special, *bytes_], show_progress=False
        )
    words = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    tokenizer.pre_tokenizer = words
    texts = [text.replace("\n", " ") for text in WORDS]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = space
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return tokenizer


def _changed(tokenizer: Tokenizer, **sections: Any) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(json.loads(tokenizer.to_str()) | sections))


def _forget(tokenizer: Tokenizer, texts: Sequence[str] = ()) -> Tokenizer:
    """Return the tokenizer without added tokens, or without these."""
    added = json.loads(tokenizer.to_str())["added_tokens"]
    kept = [token for token in added if texts and token["content"] not in texts]
    return _changed(tokenizer, added_tokens=kept)


@form
def byte_level(directory: Path, markers: Sequence[str]) -> None:
    tokenizer = _bytes()
    tokenizer.add_tokens(_added(markers))
    _write(directory, tokenizer)


@form
def byte_level_with_prefix_space(directory: Path, markers: Sequence[str]) -> None:
    tokenizer = _bytes(prefix=True)
    tokenizer.add_tokens(_added(markers))
    _write(directory, tokenizer)


@form
def markers_that_are_not_special(directory: Path, markers: Sequence[str]) -> None:
    tokenizer = _bytes()
    tokenizer.add_tokens(_added(markers, special=False))
    _write(directory, tokenizer, extra_special_tokens=[PAD])


@form
def normalized_markers(directory: Path, markers: Sequence[str]) -> None:
    tokenizer = _bytes()
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens(_added(markers, special=False, normalized=True))
    _write(directory, tokenizer)


@form
def tokens_in_the_config_alone(directory: Path, markers: Sequence[str]) -> None:
    tokenizer = _bytes()
    size = tokenizer.get_vocab_size()
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    table = {
        str(tokenizer.token_to_id(text) or size + place): {
            "content": text,
            "special": place % 2 == 0,
            **flags,
        }
        for place, text in enumerate(markers)
    }
    _write(directory, tokenizer, added_tokens_decoder=table)


@form
def special_in_the_config_alone(directory: Path, markers: Sequence[str]) -> None:
    tokenizer = _bytes()
    tokenizer.add_tokens(_added(markers, special=False))
    table = {
        str(tokenizer.token_to_id(text)): {"content": text, "special": True, "normalized": False}
        for text in (BOS, EOS, *markers)
    }
    _write(directory, tokenizer, added_tokens_decoder=table)


@form
def tokens_in_old_files(directory: Path, markers: Sequence[str]) -> None:
    tokenizer = _forget(_bytes())
    size = tokenizer.get_vocab_size()
    new = [text for text in markers if tokenizer.token_to_id(text) is None]
    table = {text: size + place for place, text in enumerate(new)}
    (directory / "added_tokens.json").write_text(json.dumps(table))
    named = {"eos_token": {"content": EOS, "lstrip": False}, "bos_token": BOS, "unk_token": UNK}
    more = {"additional_special_tokens": new[1:]}
    (directory / "special_tokens_map.json").write_text(json.dumps(named | more))
    _write(directory, tokenizer, pad_token=PAD)


@form
def named_tokens_alone(directory: Path, markers: Sequence[str]) -> None:
    """Some markers are special because the configuration names them."""
    names = {f"marker{place}_token": text for place, text in enumerate(markers)}
    _write(directory, _forget(_bytes()), pad_token=PAD, unk_token=UNK, **names)


@form
def stripping_markers(directory: Path, markers: Sequence[str]) -> None:
    tokenizer = _forget(_bytes(), (EOS,))
    tokenizer.add_tokens(_added(markers, rstrip=True))
    tokenizer.add_tokens([AddedToken(EOS, special=True, normalized=False, lstrip=True)])
    _write(directory, tokenizer)


@form
def cut_and_padded(directory: Path, markers: Sequence[str]) -> None:
    tokenizer = _bytes()
    tokenizer.add_tokens(_added(markers))
    tokenizer.enable_truncation(12)
    tokenizer.enable_padding(pad_token=PAD, pad_id=tokenizer.token_to_id(PAD), length=500)
    _write(directory, tokenizer)


@form
def with_begin_and_end(directory: Path, markers: Sequence[str]) -> None:
    tokenizer = _bytes(splits=[pre_tokenizers.Split(Regex(SPLIT), "isolated")])
    tokenizer.add_tokens(_added(markers))
    ends = [(text, tokenizer.token_to_id(text)) for text in (BOS, EOS)]
    tokenizer.post_processor = processors.TemplateProcessing(f"{BOS} $A {EOS}", None, ends)
    _write(directory, tokenizer, add_bos_token=True)
    (directory / "generation_config.json").write_text('{"eos_token_id": [1, 2, 999999]}')


@form
def markers_in_the_vocabulary(directory: Path, markers: Sequence[str]) -> None:
    parsed = json.loads(_bytes(splits=[pre_tokenizers.Split(Regex(SPLIT), "isolated")]).to_str())
    vocab = parsed["model"]["vocab"]
    for text in markers:
        vocab.setdefault(text, len(vocab))
    parsed["model"]["ignore_merges"] = True
    tokenizer = Tokenizer.from_str(json.dumps(parsed))
    tokenizer.add_tokens(_added(markers, special=False))
    _write(directory, tokenizer)


@form
def sentencepiece(directory: Path, markers: Sequence[str]) -> None:
    tokenizer = _sentencepiece()
    tokenizer.add_tokens(_added(markers))
    _write(directory, tokenizer)


@form
def sentencepiece_with_a_prepending_normalizer(directory: Path, markers: Sequence[str]) -> None:
    tokenizer = _sentencepiece()
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer = _changed(tokenizer, pre_tokenizer=None)
    tokenizer.add_tokens(_added(markers, special=False))
    _write(directory, tokenizer)


@form
def sentencepiece_of_llama(directory: Path, markers: Sequence[str]) -> None:
    sentencepiece_with_a_prepending_normalizer(directory, markers)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    _write(directory, tokenizer, kind="LlamaTokenizer", legacy=False, unk_token=UNK)


@form
def sentencepiece_of_old_llama(directory: Path, markers: Sequence[str]) -> None:
    sentencepiece_with_a_prepending_normalizer(directory, markers)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    _write(directory, tokenizer, kind="LlamaTokenizerFast", legacy=True)


@form
def unigram(directory: Path, markers: Sequence[str]) -> None:
    tokenizer = _sentencepiece(unigram=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.add_tokens(_added(markers))
    _write(directory, tokenizer, unk_token=UNK)


@form
def wordpiece(directory: Path, markers: Sequence[str]) -> None:
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNK))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=150, special_tokens=[UNK, BOS, EOS, PAD], show_progress=False
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    tokenizer.add_tokens(_added(markers))
    _write(directory, tokenizer, unk_token=UNK)


@form
def without_unknown_token(directory: Path, markers: Sequence[str]) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(
        vocab_size=150, special_tokens=[BOS, EOS, PAD], show_progress=False
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    tokenizer.add_tokens(_added(markers))
    _write(directory, tokenizer)


def _of_class(kind: str, model: str) -> None:
    def write(directory: Path, markers: Sequence[str]) -> None:
        tokenizer = _sentencepiece() if kind == "GemmaTokenizer" else _bytes()
        tokenizer.add_tokens(_added(markers, special=False))
        _write(directory, tokenizer, kind=kind, unk_token=UNK, pad_token=PAD)
        config = json.loads((directory / "config.json").read_text()) | {"model_type": model}
        (directory / "config.json").write_text(json.dumps(config))

    write.__name__ = f"{kind}_of_{model}"
    form(write)


for _kind, _model in (
    ("Qwen2Tokenizer", "qwen3"),
    ("PreTrainedTokenizerFast", "qwen2"),
    ("GemmaTokenizer", "gemma2"),
    ("GPT2TokenizerFast", "llama"),
    ("GPT2Tokenizer", "granite"),
    ("CohereTokenizerFast", "cohere"),
    ("GPTNeoXTokenizerFast", "olmo"),
    ("LlamaTokenizerFast", "llama"),
):
    _of_class(_kind, _model)
