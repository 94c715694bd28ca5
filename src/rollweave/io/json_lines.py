"""Read files of JSON Lines that a user gives: one object a line.

Invariant: text that is not UTF-8, half a surrogate pair, a key that stands twice, NaN,
and a number that no float holds are errors that name the file and the line.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from rollweave.io.reading import opened
from rollweave.schema.base import DEPTH, is_deep
from rollweave.schema.errors import ConfigError
from rollweave.schema.text import valid

FORMATS = {
    b"PAR1": 'a Parquet file, which env = "dataset" reads',
    b"\x1f\x8b": "a gzip file, which must be unpacked",
    b"\x28\xb5\x2f\xfd": "a zstd file, which must be unpacked",
    b"PK\x03\x04": "a zip file, which must be unpacked",
    b"ARROW1": "an Arrow file, which docs/DATASETS.md converts in one line",
    b"\xff\xfe": "text in UTF-16",
    b"\xfe\xff": "text in UTF-16",
}
"""First bytes of files that are often given in place of text in UTF-8."""

_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def json_lines(path: str, setting: str, *, form: str = "") -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the object of each line that is not empty. `form` says what
    an object must have; an error appends it to "must be a JSON object".

    Raises ConfigError, which names the setting for a file that cannot be read.
    """
    data = _bytes(path, setting)
    for start, kind in FORMATS.items():
        if data.startswith(start):
            raise ConfigError(f"{setting} must be a file of JSON lines, {path} is {kind}")
    for number, line in enumerate(_decoded(data, path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = _DECODER.decode(line)
            if not isinstance(record, dict):
                raise TypeError(f"got {line[:40]}")
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{path}:{number}: must be a JSON object{form}: {type(error).__name__}: {error}"
            ) from error
        if is_deep(record):
            raise ConfigError(f"{path}:{number}: must be at most {DEPTH} levels deep")
        if _HALF.search(line) and (half := _half_in(record, ())) is not None:
            raise ConfigError(
                f"{path}:{number}: {'.'.join(half[0]) or 'a key'} must be valid text, without one "
                f"half of a surrogate pair (\\ud800 to \\udfff), got {half[1]!a:.80}"
            )
        yield number, record


def utf8_text(path: str, setting: str) -> str:
    """Return the text of a file without a byte order mark. Raises ConfigError, which
    names the line that is not UTF-8.
    """
    return _decoded(_bytes(path, setting), path)


def _bytes(path: str, setting: str) -> bytes:
    try:
        with opened(Path(path)) as file:
            return file.read()
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{setting} must be a readable file, got {path!r}: {error}") from error


def _decoded(data: bytes, path: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{number}: must be UTF-8: {error}") from error


def _half_in(value: Any, path: tuple[str, ...]) -> tuple[tuple[str, ...], str] | None:
    """Return the path of the first invalid text in `value`, and the text; else None."""
    match value:
        case str():
            return None if valid(value) == value else (path, value)
        case dict():
            keys = (_half_in(key, path) for key in value)
            values = (_half_in(inner, (*path, key)) for key, inner in value.items())
            return next((found for found in (*keys, *values) if found is not None), None)
        case list():
            inner = (_half_in(each, (*path, str(place))) for place, each in enumerate(value))
            return next((found for found in inner if found is not None), None)
        case _:
            return None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r:.80} stands twice")
    return found


def _float(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"numbers must be at most 1.8e308, got {text:.80}")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=_float, parse_constant=_no_constant
)
