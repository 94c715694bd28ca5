"""Only regular files are read, within bounds, and whatever else has their name is named
at once.
"""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from rollweave.io import reading
from rollweave.io.reading import json_lines, kind_at, lines, named, opened, whole
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
