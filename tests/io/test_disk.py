"""A directory appears complete or not at all, and its name always leads to a complete
one.
"""

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from rollweave.io import disk
from rollweave.io.disk import new_directory
from tests.support.forking import Forked


def test_a_directory_appears_once_it_is_complete(tmp_path: Path) -> None:
    with new_directory(tmp_path / "deep" / "a") as directory:
        (directory / "x").write_text("1")
        assert not (tmp_path / "deep" / "a").exists()
    assert (tmp_path / "deep" / "a" / "x").read_text() == "1"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a"]


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()])
def test_a_failure_keeps_the_former_directory(tmp_path: Path, error: BaseException) -> None:
    with new_directory(tmp_path / "a") as directory:
        (directory / "x").write_text("old")

    def fail() -> None:
        with new_directory(tmp_path / "a") as directory:
            (directory / "x").write_text("new")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert (tmp_path / "a" / "x").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_directory_is_replaced_where_names_cannot_be_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system cannot exchange two names, like NFS."""
    refusal = Mock(return_value=False)
    monkeypatch.setattr(disk, "_exchange", refusal)
    for text in ("old", "new"):
        with new_directory(tmp_path / "a") as directory:
            (directory / "x").write_text(text)
    refusal.assert_called_once()
    assert (tmp_path / "a" / "x").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_directory_stays_where_its_name_can_neither_be_exchanged_nor_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_exchange", Mock(return_value=False))
    with new_directory(tmp_path / "a") as directory:
        (directory / "x").write_text("old")
    rename = Path.rename

    def full(path: Path, target: Path) -> Path:
        if "replaced" not in f"{path}{target}":
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="No space"), new_directory(tmp_path / "a") as directory:
        (directory / "x").write_text("new")
    assert (tmp_path / "a" / "x").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_replacing_never_leaves_the_name_empty(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with new_directory(path) as directory:
        (directory / "x").write_text("0")
    missing, done = [], threading.Event()

    def watch() -> None:
        while not done.is_set():
            if not path.exists():
                missing.append(True)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for count in range(1, 40):
        with new_directory(path) as directory:
            (directory / "x").write_text(str(count))
    done.set()
    watcher.join()
    assert not missing
    assert (path / "x").read_text() == "39"
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


CHILD = """
import sys
from pathlib import Path
from rollweave.io.disk import new_directory
from tests.support.forking import Forked
with new_directory(Path(sys.argv[1])) as directory:
    (directory / "x").write_text("half")
    print("now", flush=True)
    sys.stdin.read()
"""


def test_the_next_writer_removes_leftovers_of_a_kill(tmp_path: Path) -> None:
    child = Forked(
        [sys.executable, "-c", CHILD, str(tmp_path / "a")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "now\n"
        os.kill(child.pid, signal.SIGKILL)
    assert not (tmp_path / "a").exists()
    assert len(list(tmp_path.iterdir())) == 1
    with new_directory(tmp_path / "a") as directory:
        (directory / "x").write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
