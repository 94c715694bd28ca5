"""Text that has no encoding in UTF-8: it is made valid where it enters, and what slips
through fails no encoder.
"""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.schema.base import TrajectoryId, as_json, packed
from rollweave.schema.events import Event, RewardFailed
from rollweave.schema.text import decimal, shortened, valid, valid_tree, whole
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


@pytest.mark.parametrize("text", ["", "-1", "+1", " 1", "1_0", "²", "1" * 19])
def test_what_is_no_whole_number(text: str) -> None:
    assert whole(text) is None


@pytest.mark.parametrize(
    ("text", "value"), [("1", 1.0), ("-.5", -0.5), ("+2.", 2.0), ("1e-3", 0.001), ("007", 7.0)]
)
def test_accepts_decimals(text: str, value: float) -> None:
    assert decimal(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "１",
        "1_000",
        "nan",
        "inf",
        "-Infinity",
        "1e400",
        "0x1",
        "1,5",
        " 1",
        "1\n",
        ".",
        "e3",
        "--1",
    ],
)
def test_refuses_other_numbers(text: str) -> None:
    assert decimal(text) is None
