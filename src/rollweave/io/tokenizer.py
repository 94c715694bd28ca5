"""A checkpoint's tokenizer: the tokenizer that transformers makes of the checkpoint's
files.

Invariants: `tokenizer.json` does not describe the whole tokenizer, since other files
may add tokens and change whether they are special. Sections of `tokenizer.json` that
let equal texts have different tokens (dropout), or that cut or fill a text (truncation,
padding), do not apply. Some classes of tokenizers have a fixed pipeline, and take only
vocabulary and merges from the file; this module treats them like transformers since
version 5.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from rollweave.io.reading import read_json, whole
from rollweave.schema.errors import ConfigError

FILE_BYTES: Final = 1 << 30
"""Maximum size of a tokenizer's file, far above the size of any known file."""

TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
TEMPLATE: Final = "chat_template.jinja"
OLD_TEMPLATE: Final = "chat_template.json"
NAMED_TEMPLATES: Final = "additional_chat_templates"

OTHER_FORMS: Final = ("tokenizer.model", "tekken.json", "vocab.json", "tiktoken.model")
"""Files of tokenizers that must be converted to `tokenizer.json` first."""

_FILES: Final = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    TEMPLATE,
    OLD_TEMPLATE,
    f"{NAMED_TEMPLATES}/*.jinja",
    "generation_config.json",
    "merges.txt",
    "vocab.txt",
    *OTHER_FORMS,
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)

NAMES: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""Names of special tokens that every tokenizer may have, in transformers' order."""

_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The division of a text by Qwen's tokenizers, before they look for its tokens."""

_OF_TYPE: Final = {
    "Qwen2Tokenizer": "qwen2 qwen2_moe qwen2_vl qwen2_5_vl qwen3 qwen3_moe qwen3_vl qwen3_vl_moe",
    "GemmaTokenizer": "gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text",
    "CohereTokenizer": "cohere cohere2 aya_vision",
    "GPTNeoXTokenizer": "gpt_neox mpt olmo olmoe",
    "GPT2Tokenizer": "gpt2 gpt_neo gptj opt phi starcoder2 dbrx",
}
"""Class of tokenizers with a fixed pipeline → the types of models that have such a
tokenizer.
"""

_FROM_FILE: Final = (
    "arctic ernie4_5 ernie4_5_moe flex_olmo glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe "
    "gpt_bigcode granite granitemoe granitemoehybrid granitemoeshared hyperclovax internlm2 "
    "internlm3 jamba kimi_k25 kimi_linear llava llava_next mimo_v2_flash minicpm3 minimax_m2 "
    "ministral ministral3 mistral mistral3 mixtral nemotron olmo2 olmo3 persimmon phi3 phi3_v "
    "phimoe pixtral smolvlm stablelm vipllava voxtral"
)
"""Types of models whose tokenizer is as the file describes it, whatever class is named.
"""

_TYPE_DECIDES: Final = ("qwen2",)
"""Types of models for which transformers ignores the class that is named."""


@dataclass(frozen=True)
class CheckpointTokenizer:
    """A tokenizer, and the text of the special tokens that the checkpoint names
    (`eos_token` and others), which a chat template may use as variables.
    """

    tokenizer: Tokenizer
    special: Mapping[str, str]


def read_tokenizer(directory: Path) -> CheckpointTokenizer | None:
    """Return the tokenizer of a checkpoint; None if the checkpoint has no
    tokenizer.json.

    Raises ConfigError if the tokenizer cannot be read.
    """
    path = directory / TOKENIZER
    if not path.exists():
        return None
    try:
        file = Tokenizer.from_buffer(whole(path, FILE_BYTES))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path} must be a tokenizer: {error}") from error
    config = read_json(directory / TOKENIZER_CONFIG)
    kind = _class_of(config, directory)
    tokenizer = file if kind is None else _rebuilt(path, kind, config)
    try:
        named, extra, added = _tokens_of(directory, config, kind, file)
        _add(tokenizer, named, extra, added)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{directory / TOKENIZER_CONFIG} must describe a tokenizer's tokens: {error}"
        ) from error
    if kind in ("Qwen2Tokenizer", "CohereTokenizer"):  # these have no other special tokens
        tokens = {_text(token): token for token in (*named.values(), *extra)}
        if kind == "CohereTokenizer":  # it keeps how tokens strip the text beside them
            tokens = {text: one for text, one in tokens.items() if isinstance(one, str)}
        tokenizer.add_tokens([AddedToken(text, special=True) for text in tokens])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None) is not None:
        tokenizer.model.dropout = None
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens"))
    return CheckpointTokenizer(tokenizer, {name: _text(token) for name, token in named.items()})


def missing_tokenizer(directory: Path) -> str:
    """Return what is wrong with a checkpoint that has no tokenizer.json."""
    others = [name for name in OTHER_FORMS if (directory / name).exists()]
    if not others:
        return f"{directory} must have a {TOKENIZER}, got none"
    return (
        f"{directory} must have a {TOKENIZER}, got {others[0]}; transformers writes one: "
        "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
    )


def tokenizer_files(directory: Path) -> list[Path]:
    """Return the files of a checkpoint, relative to it, from which its tokenizer, its
    chat template and its end tokens are read.
    """
    found = [path for pattern in _FILES for path in sorted(directory.glob(pattern))]
    return [path.relative_to(directory) for path in found if path.is_file()]


# Tokens in addition to the vocabulary.


def _tokens_of(
    directory: Path, config: Mapping[str, Any], kind: str | None, file: Tokenizer
) -> tuple[dict[str, str | AddedToken], list[str | AddedToken], list[AddedToken]]:
    """Return the named special tokens, the other special tokens, and the table of added
    tokens, in the order of their ids.
    """
    named: dict[str, Any] = dict(_DEFAULTS.get(kind or "", {}))
    named |= {name: config[name] for name in config if _is_name(name, config[name])}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    table = config.get("added_tokens_decoder")
    if table is None:
        table = {}
        others = read_json(directory / "special_tokens_map.json")
        named |= {
            name: _added({**value, "special": True}) if isinstance(value, dict) else value
            for name, value in others.items()
            if _is_name(name, value)
        }
        extra = _merged(extra, others.get("extra_special_tokens") or [])
        special = {_text(token) for token in (*named.values(), *extra) if token is not None}
        for text, index in read_json(directory / "added_tokens.json").items():
            is_special = text in special
            table[index] = AddedToken(text, normalized=not is_special, special=is_special)
        table |= file.get_added_tokens_decoder()
        extra = extra or others.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        named |= extra
        extra = []
    if file.padding is not None and kind in (None, "LlamaTokenizer"):
        named.setdefault("pad_token", file.padding["pad_token"])
    order = (*NAMES, *(name for name in named if name not in NAMES))
    added = [_added(table[index]) for index in sorted(table, key=int)]
    known = {token.content: token for token in added}
    of = {name: named[name] for name in order if named.get(name) is not None}
    return (
        {name: known.get(_text(token), _plain(token)) for name, token in of.items()},
        [_plain(token) for token in extra],
        added,
    )


def _add(
    tokenizer: Tokenizer,
    named: Mapping[str, str | AddedToken],
    extra: list[str | AddedToken],
    added: list[AddedToken],
) -> None:
    """Add the tokens in the order of transformers, which decides about the ids of new
    tokens.
    """
    special = {_text(token) for token in named.values()}
    tokens: list[str | AddedToken] = list(added)
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    known |= {token.content for token in added}
    for token in (*named.values(), *extra):
        if _text(token) not in known:
            known.add(_text(token))
            tokens.append(token)
    complete = [
        AddedToken(token, special=True) if isinstance(token, str) else token for token in tokens
    ]
    for token in complete:
        token.special = token.special or token.content in special
    tokenizer.add_tokens(complete)


def _is_name(name: str, value: Any) -> bool:
    """Return whether a setting names a special token, such as `image_token`."""
    is_token = value is None or isinstance(value, str) or (isinstance(value, dict) and value)
    return name in NAMES or (name.endswith("_token") and bool(is_token))


def _merged(tokens: Any, more: Any) -> Any:
    if not more:
        return tokens
    if isinstance(more, dict):
        return {**(tokens if isinstance(tokens, dict) else {}), **more}
    known = {_text(token) for token in tokens}
    return [*tokens, *(token for token in more if _text(token) not in known)]


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _plain(token: Any) -> str | AddedToken:
    return token if isinstance(token, AddedToken | str) else _added(token)


def _added(token: Any) -> AddedToken:
    """Return an added token as JSON describes it."""
    if isinstance(token, AddedToken):
        return token
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(token["content"], **{name: token[name] for name in flags if name in token})


# Classes with a fixed pipeline.


def _class_of(config: Mapping[str, Any], directory: Path) -> str | None:
    """Return the tokenizer's class if the class has a fixed pipeline; None if the
    pipeline is as the file describes it.
    """
    model = read_json(directory / "config.json")
    kind = model.get("model_type")
    registered = next(
        (name for name, kinds in _OF_TYPE.items() if str(kind) in kinds.split()), None
    )
    named = config.get("tokenizer_class") or model.get("tokenizer_class")
    if not isinstance(named, str) or kind in _TYPE_DECIDES:
        return registered
    named = named.removesuffix("Fast")
    if named not in _DEFAULTS or kind in _FROM_FILE.split():
        return None
    if named == "LlamaTokenizer":  # named by the byte-level ones of Llama 3 and DeepSeek
        text = (directory / TOKENIZER).read_text(encoding="utf-8")
        return None if '"ByteLevel"' in text else named
    return named


def _rebuilt(path: Path, kind: str, config: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a class with a fixed pipeline, without added tokens."""
    file = read_json(path)
    model = file.get("model") or {}
    if "merges" not in model:
        raise ConfigError(f"{path}: model must be a BPE for a {kind}, got {model.get('type')!r}")
    parts = dict(_pipeline(kind, config))
    built = {"type": "BPE", "vocab": model["vocab"], "merges": model["merges"]}
    none = dict.fromkeys(("truncation", "padding", "post_processor", "normalizer"))
    empty: dict[str, Any] = {"version": "1.0", "added_tokens": [], **none}
    return Tokenizer.from_str(json.dumps({**empty, **parts, "model": {**built, **parts["model"]}}))


def _pipeline(kind: str, config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the sections of a tokenizer.json that a class fixes."""
    prefix = config.get("add_prefix_space")
    if kind in ("LlamaTokenizer", "GemmaTokenizer"):
        spaces = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
        decoders: list[dict[str, Any]] = [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]
        model = {"fuse_unk": True, "byte_fallback": True}
    if kind == "GemmaTokenizer":
        yield "model", {**model, "unk_token": _text(config.get("unk_token") or "<unk>")}
        yield "normalizer", {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        yield "pre_tokenizer", _split({"String": " "}, "MergedWithPrevious")
        yield "decoder", {"type": "Sequence", "decoders": decoders}
    elif kind == "LlamaTokenizer":
        scheme = "always" if config.get("legacy") else "first"
        if prefix is None or prefix:
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        else:
            scheme = "never"
        yield "model", model
        metaspace = {"type": "Metaspace", "replacement": "▁", "split": False}
        yield "pre_tokenizer", {**metaspace, "prepend_scheme": scheme}
        yield "decoder", {"type": "Sequence", "decoders": decoders}
    else:
        whole = {"continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False}
        yield "model", whole
        bytes_ = _byte_level(bool(prefix), regex=kind != "Qwen2Tokenizer")
        before = {
            "Qwen2Tokenizer": [_split({"Regex": _SPLIT}, "Isolated")],
            "CohereTokenizer": [{"type": "Digits", "individual_digits": True}],
        }.get(kind, [])
        yield "pre_tokenizer", {"type": "Sequence", "pretokenizers": [*before, bytes_]}
        yield "decoder", _byte_level(True)
        if kind != "GPT2Tokenizer":
            yield "normalizer", {"type": "NFC"}


def _split(pattern: dict[str, str], behavior: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": False}


def _byte_level(prefix: bool, *, regex: bool = True) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": prefix,
        "trim_offsets": True,
        "use_regex": regex,
    }


_END: Final = "<|endoftext|>"
_DEFAULTS: Final[Mapping[str, Mapping[str, str]]] = {
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "GemmaTokenizer": {
        "unk_token": "<unk>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
    "Qwen2Tokenizer": {"unk_token": _END, "eos_token": _END, "pad_token": _END},
    "CohereTokenizer": {
        "unk_token": "<UNK>",
        "bos_token": "<BOS_TOKEN>",
        "eos_token": "<|END_OF_TURN_TOKEN|>",
        "pad_token": "<PAD>",
        "cls_token": "<CLS>",
        "sep_token": "<SEP>",
        "mask_token": "<MASK_TOKEN>",
    },
    "GPTNeoXTokenizer": {
        "unk_token": _END,
        "bos_token": _END,
        "eos_token": _END,
        "pad_token": "<|padding|>",
    },
    "GPT2Tokenizer": {"unk_token": _END, "bos_token": _END, "eos_token": _END},
}
"""Special tokens of a class whose checkpoint names none, by the class's name."""
