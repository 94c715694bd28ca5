"""Only regular files are read, within bounds, and whatever else has their name is named
at once. JSON Lines: what a user may give, and where a file is wrong.
"""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from rollweave.io import reading
from rollweave.io.json_lines import json_lines
from rollweave.io.reading import kind_at, lines, named, opened, whole
from rollweave.io.tokenizer import read_tokenizer
from rollweave.schema.errors import ConfigError


def bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize(
    ("make", "kind", "error"),
    [
        (Path.mkdir, "directory", "must be a file, got a directory"),
        (os.mkfifo, "named pipe", "must be a file, got a named pipe"),
        (bound, "socket", "No such device or address"),
        (
            lambda path: path.symlink_to("nowhere"),
            "symbolic link to nothing",
            "must be a file, got a symbolic link to nothing",
        ),
        (
            lambda path: path.symlink_to(path.name),
            "symbolic link to nothing",
            "Too many levels of symbolic links",
        ),
        (
            sparse,
            "file",
            "must be a file that was written, got 1099511627776 bytes, almost all a hole",
        ),
    ],
)
def test_what_is_no_file_is_named(
    tmp_path: Path, make: Callable[[Path], object], kind: str, error: str
) -> None:
    path = tmp_path / "file"
    make(path)
    assert kind_at(path) == kind
    with pytest.raises(OSError, match=error) as caught:
        opened(path)
    assert named(caught.value) == f"{path}: {error}"


def test_a_file_is_read_within_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert kind_at(path) == ""
    path.write_bytes(b"12345")
    link = tmp_path / "link"
    link.symlink_to(path)
    assert (kind_at(link), whole(link, 5)) == ("file", b"12345")
    with pytest.raises(OSError, match="must have at most 4 bytes, got more"):
        whole(path, 4)


def test_lines_that_are_too_long_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "LINE_BYTES", 8)
    path = tmp_path / "file"
    path.write_bytes(b"one\n" + b"x" * 50 + b"\n1234567\n12345678\nlast")
    assert list(lines(path)) == [b"one\n", b"1234567\n", b"last"]


def test_files_that_a_user_gives_are_read_in_the_same_way(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"must be a tokenizer: .*got a named pipe"):
        read_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"options\.corpus must be a readable file, .*named pipe"):
        list(json_lines(str(tmp_path / "tokenizer.json"), "options.corpus"))


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
        (b"PAR1\x15\x04", 'is a Parquet file, which env = "dataset" reads'),
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
