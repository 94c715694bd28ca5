"""Errors of JSON that does not fit a struct, in the form that all servers here use:
field, rule and value. Pure.
"""

import re

import msgspec

from rollweave.io.http.fields import UNKNOWN_FIELD, shown
from rollweave.schema.text import whole

_PLACE = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_INDEX = re.compile(r"\[(\d+)\]")
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_EXPECTED = re.compile(r"^Expected (?P<rule>.*?)(?:, got (?P<kind>.*))?$", re.DOTALL)


_TOO_LARGE = "Number out of range"
"""The error of a number beyond the range of a float."""


def struct_error(error: msgspec.DecodeError, value: object) -> tuple[str | None, str]:
    """Return the field that is wrong, or None, and the error in one line. `value` is
    the JSON that does not fit, or None if it is not JSON.
    """
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return None, f"the body must be JSON: {text}"
    found = _PLACE.search(text)
    path = _INDEX.sub(r".\1", found["path"]) if found else ""
    text = text[: found.start()] if found else text
    if (missing := _MISSING.match(text)) is not None:
        name = _joined(path, missing["name"])
        return name, f"{shown(name)} must be given, got none"
    if (unknown := _UNKNOWN.match(text)) is not None:
        name = _joined(path, unknown["name"])
        rule = UNKNOWN_FIELD
        return name, f"{shown(name)} {rule}{_got(value, name)}"
    if (expected := _EXPECTED.match(text)) is not None:
        rule = expected["rule"].replace("`", "")
        kind = (expected["kind"] or "").replace("`", "")
        got = _got(value, path) or (f", got {kind}" if kind else "")
        return path or None, f"{shown(path) if path else 'the body'} must be {rule}{got}"
    if text == _TOO_LARGE:
        rule = "must be at most 1.8e308"
        known = path and "[...]" not in path
        return (path, f"{shown(path)} {rule}") if known else (None, f"numbers {rule}")
    return path or None, text  # a struct's own error names field, rule and value


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _got(value: object, path: str) -> str:
    """Return the value at a path as an error shows it; "" if the path names none."""
    for name in path.split(".") if path else ():
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and (place := whole(name)) is not None and place < len(value):
            value = value[place]
        else:
            return ""
    return f", got {value!r:.80}"
