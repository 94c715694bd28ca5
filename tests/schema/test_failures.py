"""What two texts of the same failure have in common."""

import json
import random
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.envs.threads import describe_error
from rollweave.schema.text import ERROR_CHARS, failure_kind, raised

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
