"""Fields that no server honors pass only with a value without effect, and errors name
field, rule and value.
"""

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
    "fields",
    [
        {},
        {"unknown": None},
        {name: object() for name in WITHOUT_EFFECT},
        {"n": 1, "best_of": 1.0, "echo": False, "suffix": "", "logit_bias": {}},
        {"function_call": "auto", "prompt_logprobs": None},
    ],
)
def test_values_without_effect_pass(fields: dict[str, object]) -> None:
    assert refused_field(fields) is None


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"n": 1, "colour": 0, "best_of": 2}, ("colour", UNKNOWN_FIELD)),
        ({"best_of": 2}, ("best_of", "must be 1 or null: it is not supported")),
        ({"n": True}, ("n", "must be 1 or null: it is not supported")),
        ({"echo": 0}, ("echo", "must be false or null: it is not supported")),
        ({"prompt_logprobs": 0}, ("prompt_logprobs", "must be null: it is not supported")),
        (
            {"function_call": "own"},
            ("function_call", 'must be "none" or "auto" or null: it is not supported'),
        ),
    ],
)
def test_the_first_value_with_an_effect_is_refused(
    fields: dict[str, object], refused: tuple[str, str]
) -> None:
    assert refused_field(fields) == refused


def test_the_tables_may_be_those_of_another_server() -> None:
    assert refused_field({"a": 1, "b": 2}, neutral={"a": (1,)}, without_effect="b") is None
    assert refused_field({"n": 1}, neutral={}, without_effect=()) == ("n", UNKNOWN_FIELD)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.b", "a.b"),
        ("x" * 100, "x" * 100),
        ("x" * 101, "'" + "x" * 99),
        ("", "''"),
        ("a\nb", r"'a\nb'"),
    ],
)
def test_a_name_is_shown_in_one_line(name: str, text: str) -> None:
    assert shown(name) == text


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (429, "rate_limit_error"),
        (499, "invalid_request_error"),
        (500, "server_error"),
    ],
)
def test_an_error_has_the_form_of_openai(status: int, kind: str) -> None:
    error = {"message": "no", "type": kind, "param": None, "code": None}
    assert openai_error(status, "no") == {"error": error}
    full = error | {"param": "n", "code": "c"}
    assert openai_error(status, "no", param="n", code="c") == {"error": full}


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    count: int = 0
    ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError("count must be at least 0, got less")


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    name: str
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
        ('{"name": 1}', "name", "name must be str, got 1"),
        ('{"name": "a", "x": [1]}', "x", f"x {UNKNOWN_FIELD}, got [1]"),
        (
            '{"name": "a", "inner": [{}, {"count": "b"}]}',
            "inner.1.count",
            "inner.1.count must be int, got 'b'",
        ),
        (
            '{"name": "a", "inner": [{}, {"y": {}}]}',
            "inner.1.y",
            f"inner.1.y {UNKNOWN_FIELD}, got {{}}",
        ),
        (
            '{"name": "a", "named": {"k": {"count": 1.5}}}',
            "named[...].count",
            "named[...].count must be int, got float",
        ),
        (
            '{"name": "a", "inner": [{"count": -1}]}',
            "inner.0",
            "count must be at least 0, got less",
        ),
        (f'{{"name": "{"b" * 99}", "ratio": "{"c" * 99}"}}', "ratio", None),
        (f'{{"name": "a", "ratio": {HUGE}}}', "ratio", "ratio must be at most 1.8e308"),
        (
            f'{{"name": "a", "named": {{"k": {{"ratio": {HUGE}}}}}}}',
            None,
            "numbers must be at most 1.8e308",
        ),
    ],
)
def test_a_wrong_body_is_named_in_one_line(
    text: str, field: str | None, message: str | None
) -> None:
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        value = None
    with pytest.raises(msgspec.DecodeError) as caught:
        msgspec.json.decode(text, type=Outer)
    message = message or f"ratio must be float, got '{'c' * 79}"
    assert struct_error(caught.value, value) == (field, message)
