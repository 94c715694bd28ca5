"""Stop strings are detected as they complete, over tokens that hold parts of words and
of characters.
"""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rollweave.engine.request_state import StopStrings, load_tokenizer
from rollweave.schema.errors import EngineError
from rollweave.schema.serving import FinishReason
from tests.support.tiny_models import build, drive, request, save, spec


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token a byte: every character beyond ASCII is several tokens."""
    vocab = {
        symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    built = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    return built


def first_stop(tokenizer: Tokenizer, text: str, stop: tuple[str, ...]) -> str | None:
    """The text up to the token at which `stop` was found."""
    watch, ids = StopStrings(tokenizer, stop), tokenizer.encode(text).ids
    for index, token in enumerate(ids):
        if watch.feed(token):
            return str(tokenizer.decode(ids[: index + 1]))
    return None


@pytest.mark.parametrize(
    ("text", "stop", "stop_string"),
    [
        *(("go on </call> more", ("</call>",), "go on </call>"), ("a b c", ("x",), None)),
        *(("aab", ("ab", "b"), "aab"), ("naïve — done", ("— d",), "naïve — d")),
        *(("tick ✓ tock", ("✓",), "tick ✓"), ("</cal </call>", ("</call>",), "</cal </call>")),
        ("x", ("",), None),
    ],
)
def test_stops_at_the_token_that_completes_the_string(
    tokenizer: Tokenizer, text: str, stop: tuple[str, ...], stop_string: str | None
) -> None:
    assert first_stop(tokenizer, text, stop) == stop_string


def test_missing_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        EngineError,
        match=r"sampling\.stop needs a tokenizer: .* must have a tokenizer\.json, got none",
    ):
        load_tokenizer(tmp_path)


def test_the_engine_stops_at_a_string_and_keeps_its_tokens(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = save(build("qwen3"), tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    free = drive(spec(path), [request("x", [1, 2], seed=3, max_tokens=20)]).results["x"]
    text = tokenizer.decode(list(free.tokens[4:6]))
    result = drive(spec(path), [request("x", [1, 2], seed=3, max_tokens=20, stop=(text,))]).results[
        "x"
    ]
    assert result.finish is FinishReason.STOP
    assert result.tokens == free.tokens[: len(result.tokens)]
    assert len(result.tokens) <= 6
    assert tokenizer.decode(list(result.tokens)).endswith(text)
