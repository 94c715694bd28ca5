"""What a run appended is read once, whatever happens to the file meanwhile."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave_ui.files import READ_BYTES, AppendedFile, ReplacedFile
from tests.support.properties import examples

PIECES = st.lists(st.sampled_from([b"a\n", b"bc", b"\n", b"d\ne\nf"]), max_size=12)


@given(PIECES)
@settings(max_examples=examples(60))
def test_each_complete_line_is_read_once(pieces: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path, read = Path(directory) / "lines", []
        followed = AppendedFile(path)
        assert followed.lines() == ([], False)
        for piece in pieces:
            with path.open("ab") as file:
                file.write(piece)
            lines, replaced = followed.lines()
            assert not replaced
            read += lines
        whole = b"".join(pieces)
        assert read == whole[: whole.rfind(b"\n") + 1].splitlines()


def test_a_file_that_was_replaced_cut_or_deleted_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    followed = AppendedFile(path)
    path.write_bytes(b"one\ntwo\n")
    assert followed.lines() == ([b"one", b"two"], False)
    os.truncate(path, 4)
    assert followed.lines() == ([b"one"], True)
    new = tmp_path / "new"
    new.write_bytes(b"three\nfour\n")
    new.replace(path)
    assert followed.lines() == ([b"three", b"four"], True)
    path.unlink()
    assert followed.lines() == ([], True)
    assert followed.lines() == ([], False)
    path.write_bytes(b"five\n")
    assert followed.lines() == ([b"five"], False)


def test_the_reason_for_an_unreadable_file_ends_with_it(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    followed = AppendedFile(path)
    path.mkdir()
    assert followed.lines() == ([], False)
    assert followed.problem == f"{path}: must be a file, got a directory"
    path.rmdir()
    path.write_bytes(b"one\n")
    assert followed.lines() == ([b"one"], False)
    assert followed.problem == ""
    path.unlink()
    path.mkdir()
    assert followed.lines() == ([], True)
    assert followed.problem
    path.rmdir()
    assert followed.lines() == ([], False)
    assert followed.problem == ""


def test_a_replaced_file_is_read_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "small"
    followed = ReplacedFile(path)
    assert followed.content() == (None, False)
    path.write_bytes(b"one")
    assert followed.content() == (b"one", True)
    assert followed.content() == (b"", False)
    new = tmp_path / "new"
    new.write_bytes(b"two")
    new.replace(path)
    assert followed.content() == (b"two", True)
    path.unlink()
    assert followed.content() == (None, True)


def test_a_line_that_is_too_long_hides_no_later_one(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\n" + bytes(READ_BYTES + 10) + b"\ntwo\n")
    file, lines = AppendedFile(path), list[bytes]()
    for _ in range(3):
        lines += file.lines()[0]
    assert (lines[0], lines[-1]) == (b"one", b"two")


def test_an_ending_gives_way_to_what_is_appended(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"[\none\n{}]\n")
    file = AppendedFile(path, ending=b"{}]\n")
    assert file.lines() == ([b"[", b"one"], False)
    path.write_bytes(b"[\none\ntwo, a longer line\n{}]\n")
    assert file.lines()[0] == [b"two, a longer line"]


def test_what_is_left_is_known_to_the_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollweave_ui.files.READ_BYTES", 8)
    path = tmp_path / "lines"
    file = AppendedFile(path)
    assert not file.unread
    path.write_bytes(b"one two\nsix six\nend\n")
    for lines, unread in (([b"one two"], True), ([b"six six"], False), ([b"end"], False)):
        assert file.lines() == (lines, False)
        assert file.unread == unread
