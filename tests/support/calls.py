"""Tables of calls, in files `calls.toml`: what functions return, which values are
refused, and what follows from values.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec


def table(path: Path) -> dict[str, Any]:
    """Read a table, in which <a*63> stands for 63 letters."""
    text = re.sub(r"<(.)\*(\d+)>", lambda found: found[1] * int(found[2]), path.read_text())
    return tomllib.loads(text)


def check_rows(called: Any, rows: dict[str, Any]) -> None:
    """Assert that calls have the results of their rows."""
    base = rows.get("base", {})
    for key, row in rows.items():
        if key == "base":
            continue
        attribute, results = (key, row) if isinstance(row, dict) else ("", {key: row})
        for expected, inputs in results.items():
            for given in inputs:
                whole = base | given if isinstance(given, dict) else given
                found = outcome(called, whole, attribute)
                assert agrees(found, expected, given), f"{given}: {expected}, got {found}"


def outcome(called: Any, given: Any, attribute: str) -> str:
    """Return as text what a call returns, or an attribute of it; or its error."""
    try:
        if not isinstance(given, dict):
            result = called(given)
        elif isinstance(called, type) and issubclass(called, msgspec.Struct):
            result = msgspec.convert(given, called)
        else:
            result = getattr(called, "model_validate", lambda fields: called(**fields))(given)
    except ValueError as error:
        return f"! {error}"
    value = getattr(result, attribute) if attribute else result
    return str(value() if callable(value) else value)


def agrees(found: str, expected: str, given: Any) -> bool:
    if expected == "ok":
        return not found.startswith("!")
    if expected.startswith("!"):
        fields = given if isinstance(given, dict) else {"": given}
        field, value = [*fields.items()][-1] if fields else ("", "")
        value = value[-1] if isinstance(value, list) and value else value
        expected = expected.replace("{field}", field).replace("{}", ascii(value))
    if expected.endswith("~"):
        return found.startswith(expected[:-1])
    return found == expected
