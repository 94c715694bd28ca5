"""Files of JSON Lines: what a user may give, and where a file is wrong."""

from pathlib import Path

import pytest

from rollweave.io.reading import json_lines
from rollweave.schema.errors import ConfigError


def read(path: Path, data: bytes) -> list[tuple[int, object]]:
    path.write_bytes(data)
    return list(json_lines(str(path), "options.path"))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'{"a": 1}', [(1, {"a": 1})]),
        (b'\xef\xbb\xbf{"a": 1}\r\n\r\n \r\n{"a": null}\r\n\n', [(1, {"a": 1}), (4, {"a": None})]),
        (b'{"a": "\\ud83d\\ude00 \\u0000 \\uffff"}', [(1, {"a": "\U0001f600 \0 \uffff"})]),
        ('{"a": "one\u2028line\x85"}'.encode(), [(1, {"a": "one\u2028line\x85"})]),
        (b'{"a": 123456789012345678901234567890}', [(1, {"a": 123456789012345678901234567890})]),
        (b'{"a": [], "b": {}}', [(1, {"a": [], "b": {}})]),
        (b'{"a": ' + b"[" * 90 + b"]" * 90 + b"}", None),
        (b'{"a": "' + b"x" * (1 << 20) + b'"}', [(1, {"a": "x" * (1 << 20)})]),
        (b"", []),
    ],
)
def test_lines_are_read(tmp_path: Path, data: bytes, expected: object) -> None:
    lines = read(tmp_path / "a.jsonl", data)
    assert expected is None or lines == expected


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b'{"a": 1}\n{"a": "\xff"}', r"a\.jsonl:2: must be UTF-8: .*byte 0xff"),
        (
            b'\n{"a": {"b": ["x", "\\ud83d"]}}',
            r"a\.jsonl:2: a\.b\.1 must be valid text, .*'\\ud83d'",
        ),
        (b'{"\\udc00": 1}', r"a\.jsonl:1: a key must be valid text"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', r"a\.jsonl:1: .*the key 'c' stands twice"),
        (b'{"a": NaN}', r"a\.jsonl:1: .*JSON has no NaN"),
        (b'{"a": -Infinity}', r"a\.jsonl:1: .*JSON has no -Infinity"),
        (b'{"a": 1e999}', r"a\.jsonl:1: .*at most 1\.8e308, got 1e999"),
        (b'{"a": ' + b"9" * 5000 + b"}", r"a\.jsonl:1: .*4300 digits"),
        (b'{"a": ' + b"[" * 101 + b"]" * 101 + b"}", r"a\.jsonl:1: must be at most 100 levels"),
        (b'{"a": ' + b"[" * 200_000, r"a\.jsonl:1: must be a JSON object: RecursionError"),
        (b'{"a": 1} {"a": 2}', r"a\.jsonl:1: .*Extra data"),
        (b'[{"a": 1}]', r"a\.jsonl:1: must be a JSON object: TypeError: got \[\{"),
        (b'"a"', r"a\.jsonl:1: must be a JSON object"),
        (b"\x1f\x8b\x08\x00", "options.path must be a file of JSON lines, .* is a gzip file"),
        (b"PAR1\x15\x04", "is a Parquet file, which docs/DATASETS.md converts"),
        ('{"a": 1}'.encode("utf-16"), "is text in UTF-16"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(tmp_path: Path, data: bytes, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read(tmp_path / "a.jsonl", data)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (str(tmp_path), str(tmp_path / "none.jsonl"), "a\0b"):
        with pytest.raises(ConfigError, match=r"options\.path must be a readable file, got "):
            list(json_lines(path, "options.path"))
