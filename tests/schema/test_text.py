"""Text is valid and readable, and texts of the same failure are recognized."""

import json
import random
import string
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.envs.threads import describe_error
from rollweave.schema.base import TrajectoryId, as_json, packed
from rollweave.schema.events import Event, RewardFailed
from rollweave.schema.text import (
    ERROR_CHARS,
    decimal,
    failure_kind,
    raised,
    shortened,
    valid,
    valid_tree,
    whole,
)
from rollweave.schema.work import StopReason

CHARACTERS = st.one_of(st.characters(), st.characters(categories=["Cs"]))
TEXT = st.text(CHARACTERS)
"""Text that may hold surrogates."""

TREES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.floats(allow_nan=False),
        TEXT,
        st.integers(),
        st.integers(-(2**80), 2**80),
    ),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(TEXT, inner)),
)


@given(TEXT)
def test_valid_text_has_an_encoding_and_no_other_change(text: str) -> None:
    result = valid(text)
    result.encode()
    assert len(result) == len(text)
    pairs = zip(text, result, strict=True)
    assert all(
        after == before or (after == "\ufffd" and "\ud800" <= before <= "\udfff")
        for before, after in pairs
    )
    assert valid(result) == result


@given(TREES)
def test_a_tree_is_made_valid_as_a_whole(tree: Any) -> None:
    json.dumps(valid_tree(tree), ensure_ascii=False).encode()


def test_keys_and_tuples_of_a_tree_are_made_valid() -> None:
    assert valid_tree({"a\ud800": ("\ud800", [1])}) == {"a\ufffd": ("\ufffd", [1])}


@given(TEXT, st.integers(10, 40))
def test_shortened_text_keeps_its_head_and_tail(text: str, most: int) -> None:
    result = shortened(text * 20, most)
    result.encode()
    assert len(result) <= most + 50
    assert result.startswith(valid(text)[: most // 2])


@given(TREES)
def test_whatever_is_in_a_value_it_can_be_stored_and_read_again(tree: Any) -> None:
    msgspec.msgpack.decode(packed(tree))
    msgspec.json.decode(as_json(tree))


@given(TEXT)
def test_a_noun_comes_back_with_valid_text(text: str) -> None:
    event = RewardFailed(
        trajectory_id=TrajectoryId(text), attempt=1, stop_reason=StopReason.REWARD_ERROR, error=text
    )
    expected = RewardFailed(
        trajectory_id=TrajectoryId(valid(text)),
        attempt=1,
        stop_reason=StopReason.REWARD_ERROR,
        error=valid(text),
    )
    assert msgspec.msgpack.decode(packed(event), type=Event) == expected
    assert msgspec.json.decode(as_json(event), type=Event) == expected


def test_what_encoders_take_is_encoded_as_ever() -> None:
    assert packed({"a": (1, b"\xff", 2.5)}) == msgspec.msgpack.encode({"a": (1, b"\xff", 2.5)})
    assert msgspec.msgpack.decode(
        packed({"big": 1 << 70, "small": -(1 << 70), "no": True, "raw": b"\xff"})
    ) == {
        "big": (1 << 64) - 1,
        "small": -(1 << 63),
        "no": True,
        "raw": b"\xff",
    }


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_is_read_as_it_was_printed(number: float) -> None:
    assert decimal(str(number)) == number


@given(st.text(st.characters(categories=["Nd"], max_codepoint=0x1D7FF), min_size=1))
def test_digits_of_another_script_are_no_number(digits: str) -> None:
    assert (decimal(digits) is None) is not digits.isascii()
    assert (whole(digits[:18]) is None) is not digits[:18].isascii()


METHODS = st.sampled_from(["reset", "step", "env_error: making the environment"])
CLASSES = st.sampled_from(["KeyError", "OSError"])
PLACES = st.sampled_from(["/envs/a.py:3", "/envs/a.py:4", "/the envs (new)/b.py:3", "<string>:1"])


@given(METHODS, CLASSES, PLACES, METHODS, CLASSES, PLACES, st.text(), st.text())
def test_failures_are_alike_if_one_line_has_raised_one_class_in_one_method(
    method: str, kind: str, place: str, method2: str, kind2: str, place2: str, one: str, two: str
) -> None:
    alike = failure_kind(raised(method, kind, one, place)) == failure_kind(
        raised(method2, kind2, two, place2)
    )
    assert alike is ((method, kind, place) == (method2, kind2, place2))


def kind_of(name: str) -> str:
    """The kind of an error that user code raises with a text that names `name`."""
    try:
        {}[name] if name.islower() else {}[name.lower()]  # both in one line
    except KeyError as error:
        return failure_kind(describe_error("reset", error))
    raise AssertionError("it raises")


def test_errors_of_one_line_of_code_are_alike() -> None:
    kinds = {
        kind_of(name) for name in ("map_17", "The forest", "(x:3)", " raised OSError: y", "\n")
    }
    assert len(kinds) == 1
    assert kinds.pop().startswith("reset raised KeyError (")
    with pytest.raises(KeyError) as elsewhere:
        raise KeyError("map_17")
    assert failure_kind(describe_error("reset", elsewhere.value)) != kind_of("map_17")


def test_the_place_is_the_last_line_of_the_users_own_code() -> None:
    with pytest.raises(json.JSONDecodeError) as error:
        json.loads("{")
    assert f"({__file__}:" in describe_error("step", error.value)


WORDS = st.text(string.ascii_letters + ":;,.-()[]", min_size=1, max_size=8)
NAMES = st.text(string.ascii_letters + " /\\", max_size=8)
VARIABLE = st.one_of(
    NAMES.map(lambda name: f"'{name}'"),
    NAMES.map(lambda name: f'"{name}"'),
    NAMES.map(lambda name: f"`{name}`"),
    st.tuples(WORDS, st.integers(0, 99), WORDS).map(lambda parts: "".join(map(str, parts))),
    st.tuples(WORDS, st.sampled_from("/\\"), WORDS).map("".join),
)
LINES = st.lists(st.one_of(WORDS, VARIABLE), max_size=6)


def reference(words: list[str]) -> str:
    """A slow reference: the constant words of a line that is given as its parts."""
    return " ".join(
        word
        for word in words
        if word[0] not in "'\"`" and not any(one in string.digits + "/\\" for one in word)
    )


@given(st.lists(LINES, min_size=1, max_size=3), st.sampled_from(["", "\n", " \n\n"]))
def test_other_failures_are_alike_by_the_constant_words_of_their_last_line(
    lines: list[list[str]], end: str
) -> None:
    text = "\n".join(" ".join(line) for line in lines)
    last = next((line for line in reversed(lines) if line), [])
    assert failure_kind(text + end) == (reference(last) or text + end)


@pytest.mark.parametrize(
    ("one", "two", "alike"),
    [
        ("KeyError: 'map_17'", "KeyError: 'map_4'", True),
        ("the prompt has 900 tokens", "the prompt has 1234 tokens", True),
        ("it's a <Lake object at 0x7f3a>", "it's a <Lake object at 0x11>", True),
        ("doesn't exist: 'a'", "doesn't exist: 'b'", True),
        ("doesn't exist, isn't here", "doesn't read, isn't here", False),
        ("first line\nsame", "another line\nsame", True),
        ("no such map", "no such game", False),
        ("env_error: the answer\n  42", "env_error: the answer\n  43", False),
        ("", "", True),
    ],
)
def test_examples(one: str, two: str, alike: bool) -> None:
    assert (failure_kind(one) == failure_kind(two)) is alike


def test_no_text_takes_long() -> None:
    draws = random.Random(3)
    for part in (" (", " raised x: (", "'", "a:1", "(a:1) ", "\n raised "):
        failure_kind(part * (ERROR_CHARS // len(part)))
    failure_kind("".join(draws.choices("( ):1'\"/\n", k=ERROR_CHARS)))
