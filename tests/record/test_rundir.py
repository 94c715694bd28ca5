"""A run directory belongs to one controller, whatever happens to the files in it."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rollweave.record.rundir import RunDir
from rollweave.schema.config.loading import loads
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError

CONFIG = """
[run]
name = "run"
[model]
path = "m"
[[tasks]]
env = "frozenlake"
"""
HOLDER = """
import sys
from rollweave.schema.config.loading import loads
from rollweave.record.rundir import RunDir
with RunDir.claim(loads(sys.argv[1]), resume=False):
    print("held", flush=True)
    sys.stdin.read()
"""


def config(tmp_path: Path) -> RunConfig:
    return loads(CONFIG, [f'run.dir="{tmp_path}"'])


def remove(lock: Path) -> None:
    lock.unlink()


def replace(lock: Path) -> None:
    lock.with_name("other").touch()
    lock.with_name("other").replace(lock)


@pytest.mark.parametrize("tamper", [remove, replace])
@pytest.mark.parametrize("resume", [False, True])
def test_deleted_lock_file_admits_no_other_controller(
    tmp_path: Path, tamper: object, resume: bool
) -> None:
    assert callable(tamper)
    run_config = config(tmp_path)
    with RunDir.claim(run_config, resume=False) as run:
        run.write_config(run_config)
        tamper(run.lock)
        with pytest.raises(ConfigError, match="in use by another controller"):
            RunDir.claim(run_config, resume=resume)
    RunDir.claim(run_config, resume=True).release()


@pytest.mark.parametrize("clear", [False, True])
def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path, clear: bool) -> None:
    run_config = config(tmp_path)
    with RunDir.claim(run_config, resume=False) as run:
        run.write_config(run_config)
    other = tmp_path / "other"
    other.write_text("of the user")
    run.lock.unlink()
    run.lock.symlink_to(other)
    with pytest.raises(ConfigError, match=r"lock must be a file, got a symbolic link; move it"):
        RunDir.claim(run_config, resume=True, to_clear=clear)
    assert other.read_text() == "of the user"


def test_folders_without_an_end_in_the_logs_are_not_walked(tmp_path: Path) -> None:
    run_config = config(tmp_path)
    with RunDir.claim(run_config, resume=False) as run:
        run.write_config(run_config)
        folder, name = os.open(run.logs, os.O_RDONLY), "deeper" * 40
        for _ in range(20):  # until no system call takes the path
            os.mkdir(name, dir_fd=folder)
            inner = os.open(name, os.O_RDONLY, dir_fd=folder)
            os.close(folder)
            folder = inner
        os.close(folder)
        (run.logs / "back").symlink_to(run.logs)
    RunDir.claim(run_config, resume=True).release()
    subprocess.run(["rm", "-rf", run.logs], check=True)


def test_lock_ends_with_its_process(tmp_path: Path) -> None:
    run_config = config(tmp_path)
    command = [sys.executable, "-c", HOLDER, CONFIG.replace("[run]", f'[run]\ndir = "{tmp_path}"')]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        (tmp_path / "run" / "lock").unlink()
        with pytest.raises(ConfigError, match="in use by another controller, process unknown"):
            RunDir.claim(run_config, resume=False)
        holder.kill()
        holder.wait()
    RunDir.claim(run_config, resume=False).release()


def test_file_lock_suffices_if_directories_cannot_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS behaves like this: it locks only files that are open for writing."""
    real = fcntl.flock

    def flock(fd: int, operation: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(9, "Bad file descriptor")
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    run_config = config(tmp_path)
    with (
        RunDir.claim(run_config, resume=False),
        pytest.raises(ConfigError, match="in use by another controller"),
    ):
        RunDir.claim(run_config, resume=False)
    RunDir.claim(run_config, resume=False).release()


def test_lock_is_retaken_if_the_file_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_config = config(tmp_path)
    real, replaced = fcntl.flock, []

    def flock(fd: int, operation: int) -> None:
        real(fd, operation)
        if not replaced and not os.path.isdir(f"/proc/self/fd/{fd}"):
            replaced.append(fd)
            replace(tmp_path / "run" / "lock")

    monkeypatch.setattr(fcntl, "flock", flock)
    with RunDir.claim(run_config, resume=False) as run:
        assert replaced
        assert run.lock.read_text() == f"{os.getpid()}\n"


FILES = (
    "journal.bin",
    "metrics.jsonl",
    "trace.json",
    "run.json",
    "lock",
    "logs/e0.log",
    "trajectories/000000.bin",
)


def tree(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("put", "kind"), [(Path.mkdir, "directory"), (os.mkfifo, "named pipe")], ids=["dir", "fifo"]
)
def test_what_is_no_file_is_reported_and_nothing_changes(
    tmp_path: Path, name: str, put: Callable[[Path], None], kind: str
) -> None:
    run_config = config(tmp_path)
    with RunDir.claim(run_config, resume=False) as run:
        run.write_config(run_config)
    run.lock.unlink()
    (run.path / name).parent.mkdir(exist_ok=True)
    put(run.path / name)
    before = tree(run.path)
    with pytest.raises(
        ConfigError, match=rf"^{run.path / name} must be a file, got a {kind}; move it away$"
    ):
        RunDir.claim(run_config, resume=True)
    assert tree(run.path) == before
    if name != "lock":
        RunDir.claim(run_config, resume=True, to_clear=True).release()


@pytest.mark.parametrize("name", ["trajectories", "checkpoints", "logs"])
def test_file_in_place_of_a_directory_is_reported(tmp_path: Path, name: str) -> None:
    run_config = config(tmp_path)
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.write_config(run_config)
    (run.path / name).touch()
    with pytest.raises(
        ConfigError, match=rf"^{run.path / name} must be a directory, got a file; move it away$"
    ):
        RunDir.claim(run_config, resume=True)


@pytest.mark.parametrize("name", ["", "journal.bin", "logs/e0.log"])
def test_unwritable_paths_are_reported_and_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Permissions do not stop the superuser, so the system call is replaced."""
    run_config = config(tmp_path)
    with RunDir.claim(run_config, resume=False) as run:
        run.write_config(run_config)
    run.lock.unlink()
    refused = run.path / name
    if name:
        refused.touch()
    before, access = tree(run.path), os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path) != refused and access(path, mode)
    )
    what = "a file" if name else "a directory"
    with pytest.raises(
        ConfigError,
        match=rf"^{refused} must be {what} to write to, got one that is read-only or whose",
    ):
        RunDir.claim(run_config, resume=True)
    assert tree(run.path) == before


def test_a_run_below_a_directory_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)
    with pytest.raises(ConfigError, match=rf"^{tmp_path} must be a directory to write to"):
        RunDir.claim(config(tmp_path), resume=False)
    assert tree(tmp_path) == []
