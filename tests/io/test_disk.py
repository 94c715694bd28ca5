"""A directory or file appears complete or not at all, and its name always leads to a
complete one; a file that grows consists of whole pieces.
"""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import xxhash

from rollweave.io import disk
from rollweave.io.disk import new_directory
from rollweave.schema.errors import DiskError
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


def test_a_file_grows_by_whole_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced = tmp_path / "log", list[Path]()
    monkeypatch.setattr(disk, "sync", synced.append)
    file = disk.AppendFile(path, keep=0, header=b"head")
    monkeypatch.setattr(
        os, "pwrite", lambda fd, data, at, pwrite=os.pwrite: pwrite(fd, data[:3], at)
    )
    assert [file.append(piece) for piece in (b"12345678", b"", b"9")] == [4, 12, 12]
    assert (file.path, file.size, path.read_bytes()) == (path, 13, b"head123456789")
    for _ in range(2):  # the name of a new file is synced once
        file.sync()
    assert synced == [tmp_path]
    file.close()
    file.close()
    with contextlib.closing(disk.AppendFile(path, keep=6, header=b"left out")) as again:
        assert (again.append(b"x"), path.read_bytes()) == (6, b"head12x")
        again.sync()
    assert synced == [tmp_path]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space"), KeyboardInterrupt()])
def test_a_piece_that_cannot_be_written_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def full(fd: int, data: bytes, at: int, pwrite: Callable[..., int] = os.pwrite) -> int:
        if at >= 5:
            raise error
        return pwrite(fd, data[:2], at)

    with contextlib.closing(disk.AppendFile(tmp_path / "log", keep=0, header=b"1234")) as file:
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises((DiskError, KeyboardInterrupt)) as caught:
            file.append(b"5678")
        assert (file.size, file.path.read_bytes()) == (4, b"1234")
    if isinstance(error, OSError):
        assert isinstance(caught.value, DiskError)
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.strerror == f"cannot write {file.path}: No space"


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"cannot write .*/none/log: No such file"):
        disk.AppendFile(tmp_path / "none" / "log", keep=0)
    assert disk.disk_error(tmp_path, OSError("odd")).args == (0, f"cannot write {tmp_path}: odd")


@pytest.mark.parametrize("synced", [True, False])
def test_a_file_is_replaced_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synced: bool
) -> None:
    path, calls = tmp_path / "a", list[object]()
    (tmp_path / "a.new").write_text("a leftover with another mode")
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(os.fstat(fd).st_size))
    monkeypatch.setattr(disk, "sync", calls.append)
    disk.replace_file(path, b"12345", mode=0o600, synced=synced)
    assert calls == ([5, tmp_path] if synced else [])
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"12345", 0o600)
    disk.replace_file(path, b"new", synced=synced)
    monkeypatch.setattr(Path, "replace", Mock(side_effect=OSError(errno.EIO, "broken")))
    with pytest.raises(DiskError, match=f"cannot write {path}: broken"):
        disk.replace_file(path, b"newer")
    assert path.read_bytes() == b"new"
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_a_digest_and_a_hole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, content = tmp_path / "a", os.urandom(3 << 13)
    path.write_bytes(content)
    monkeypatch.setattr(disk, "READ_CHUNK", 1000)
    assert disk.file_digest(path) == xxhash.xxh3_128_hexdigest(content)
    with path.open("r+b") as file:
        disk.free_space(file.fileno(), 1 << 13)
    assert path.read_bytes() == bytes(1 << 13) + content[1 << 13 :]
    with pytest.raises(OSError, match="No such file") as caught:
        disk._exchange(path, tmp_path / "none")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(tmp_path / "none"))
