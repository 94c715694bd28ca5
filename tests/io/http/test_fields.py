"""Fields that no server honors pass only with a value without effect, and errors name
field, rule and value.
"""

import contextlib
from typing import Annotated

import msgspec
import pytest

from rollweave.io.http.fields import (
    UNKNOWN_FIELD,
    WITHOUT_EFFECT,
    openai_error,
    refused_field,
    shown,
    struct_error,
)


@pytest.mark.parametrize(
    ("fields", "name", "rule"),
    [
        ({"n": 1, "colour": 0, "best_of": 2}, "colour", UNKNOWN_FIELD),
        ({"user": 3, "unknown": None, "best_of": 2}, "best_of", "must be 1 or null"),
        ({"n": True}, "n", "must be 1 or null"),
        ({"echo": 0}, "echo", "must be false or null"),
        ({"prompt_logprobs": 0}, "prompt_logprobs", "must be null"),
        ({"function_call": "own"}, "function_call", 'must be "none" or "auto" or null'),
    ],
)
def test_the_first_value_with_an_effect_is_refused(
    fields: dict[str, object], name: str, rule: str
) -> None:
    rule = rule if rule == UNKNOWN_FIELD else f"{rule}: it is not supported"
    assert refused_field(fields) == (name, rule)


def test_values_without_effect_pass() -> None:
    for fields in (
        {"unknown": None, **{name: object() for name in WITHOUT_EFFECT}},
        {"n": 1, "best_of": 1.0, "echo": False, "logit_bias": {}, "function_call": "auto"},
    ):
        assert refused_field(fields) is None
    assert refused_field({"a": 1, "b": 2}, neutral={"a": (1,)}, without_effect="b") is None
    assert refused_field({"n": 1}, neutral={}, without_effect=()) == ("n", UNKNOWN_FIELD)


def test_a_name_is_shown_in_one_line() -> None:
    names = ["a.b", "x" * 100, "x" * 101, "", "a\nb"]
    assert [*map(shown, names)] == ["a.b", "x" * 100, "'" + "x" * 99, "''", r"'a\nb'"]


def test_an_error_has_the_form_of_openai() -> None:
    for status, kind in ((499, "invalid_request_error"), (429, "rate_limit_error")):
        error = {"message": "no", "type": kind, "param": None, "code": None}
        assert openai_error(status, "no") == {"error": error}
    error = {"message": "no", "type": "server_error", "param": "n", "code": "c"}
    assert openai_error(500, "no", param="n", code="c") == {"error": error}


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    count: int = 0
    ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError("count must be at least 0")


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    inner: list[Inner] = []
    named: dict[str, Inner] = {}
    ratio: float = 0.0


HUGE = "9" * 400


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        ("{", None, "the body must be JSON: Input data was truncated"),
        ("[1]", None, "the body must be object, got [1]"),
        ("{}", "name", "name must be given, got none"),
        ('{"name": ""}', "name", "~ must be str of length >= 1, got ''"),
        ('{"name": "a", "x": [1]}', "x", f"x {UNKNOWN_FIELD}, got [1]"),
        ('{"name": "a", "inner": [{}, {"count": "b"}]}', "inner.1.count", "~ must be int, got 'b'"),
        ('{"name": "a", "inner": [{}, {"y": 1}]}', "inner.1.y", f"~ {UNKNOWN_FIELD}, got 1"),
        (
            '{"name": "a", "named": {"k": {"count": 1.5}}}',
            "named[...].count",
            "~ must be int, got float",
        ),
        ('{"name": "a", "inner": [{"count": -1}]}', "inner.0", "count must be at least 0"),
        (f'{{"name": "a", "ratio": "{"c" * 99}"}}', "ratio", f"~ must be float, got '{'c' * 79}"),
        (f'{{"name": "a", "ratio": {HUGE}}}', "ratio", "~ must be at most 1.8e308"),
        (
            f'{{"name": "a", "named": {{"k": {{"ratio": {HUGE}}}}}}}',
            None,
            "numbers must be at most 1.8e308",
        ),
    ],
)
def test_a_wrong_body_is_named_in_one_line(text: str, field: str | None, message: str) -> None:
    value = None
    with contextlib.suppress(msgspec.DecodeError):
        value = msgspec.json.decode(text)
    with pytest.raises(msgspec.DecodeError) as caught:
        msgspec.json.decode(text, type=Outer)
    assert struct_error(caught.value, value) == (field, message.replace("~", field or ""))
