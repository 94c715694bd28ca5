"""The next start removes what a killed owner left, and nothing of a living one."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollweave.io import locked_folders
from rollweave.io.locked_folders import create, remove_stale, temporary_folder
from tests.support.sandboxes import SPEC, opened

PREFIX = "rollweave-tests-"

OWNER = """
import asyncio, json, sys
from rollweave.sandbox.base import SandboxSpec
from rollweave_sandbox.registry import Plain

async def main():
    used, unused = Plain(), Plain()
    await used.start(SandboxSpec())
    places = [folder for one in (used, unused) for folder in (one._launcher._base, one._launcher._snapshots)]
    print(json.dumps([used._launcher._process.pid, places]), flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


@contextlib.contextmanager
def owner() -> Iterator[tuple["subprocess.Popen[str]", int, list[str]]]:
    """Start another process with two back ends, and return the first one's supervisor
    and their folders.
    """
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            supervisor, places = json.loads(process.stdout.readline())
            assert all(map(os.path.isdir, places))
            yield process, supervisor, places
        finally:
            process.kill()


@contextlib.contextmanager
def ended(pid: int) -> Iterator[None]:
    """Wait until a process that is no child of ours has ended."""
    fd = os.pidfd_open(pid)
    try:
        yield
        select.select([fd], [], [])
    finally:
        os.close(fd)


async def start_until_removed(places: list[str]) -> None:
    """Start back ends until one has removed these folders: some process of their owner
    may still be ending, and another test's start may be removing them just now.
    """
    while any(map(os.path.exists, places)):
        async with opened("plain") as backend:
            await (await backend.start(SPEC)).stop()


async def test_the_next_start_removes_folders_of_a_killed_owner() -> None:
    async with opened("plain") as backend_:
        living = [backend_._launcher._base, backend_._launcher._snapshots]  # type: ignore[attr-defined]
        with owner() as (process, supervisor, places), owner() as (_, _, others):
            with ended(supervisor):
                process.kill()
            assert not any(map(os.path.exists, places[:2]))  # by the supervisor
            await start_until_removed(places)
            assert all(map(os.path.isdir, others))
            assert all(map(os.path.isdir, living))


async def test_the_next_start_removes_folders_of_an_owner_killed_with_its_supervisor() -> None:
    with owner() as (process, supervisor, places):
        process.send_signal(signal.SIGSTOP)  # it must not notice its supervisor's end
        with ended(supervisor):
            os.kill(supervisor, signal.SIGKILL)
        process.kill()
        process.wait()  # any start on this machine may remove them from now on
        await start_until_removed(places)


def test_a_temporary_folder_is_removed_with_those_of_killed_owners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    hold = (
        "import sys, tempfile, time\nfrom rollweave.io.locked_folders import temporary_folder\n"
        "tempfile.tempdir = sys.argv[1]\n"
        f"with temporary_folder({PREFIX!r}) as folder:\n"
        "    print(folder, flush=True)\n    time.sleep(100)"
    )
    command = [sys.executable, "-c", hold, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            theirs = Path(owner.stdout.readline().strip())
            with temporary_folder(PREFIX) as ours:
                assert (ours.is_dir(), theirs.is_dir()) == (True, True)
            assert (ours.exists(), theirs.is_dir()) == (False, True)
        finally:
            owner.kill()
    assert theirs.is_dir()
    with temporary_folder(PREFIX):
        assert not theirs.exists()


def test_keeps_locked_and_foreign_folders(tmp_path: Path) -> None:
    locked, lock = create(str(tmp_path), PREFIX)
    dead = tmp_path / f"{PREFIX}dead"
    (dead / "place").mkdir(parents=True)
    for name in ("another", "rollweave-sandbox-old"):
        (tmp_path / name).mkdir()
    target = tmp_path / "target"
    (target / "precious").mkdir(parents=True)
    (tmp_path / f"{PREFIX}link").symlink_to(target)
    (tmp_path / f"{PREFIX}file").write_text("")
    remove_stale(str(tmp_path), PREFIX)
    assert not dead.exists()
    assert os.path.isdir(locked)
    assert (target / "precious").is_dir()
    assert {entry.name for entry in tmp_path.iterdir()} >= {
        "another",
        "rollweave-sandbox-old",
        f"{PREFIX}link",
        f"{PREFIX}file",
    }
    os.close(lock)
    remove_stale(str(tmp_path), PREFIX)
    assert not os.path.exists(locked)


def test_keeps_folders_of_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, lock = create(str(tmp_path), PREFIX)
    os.close(lock)
    with monkeypatch.context() as patch:
        patch.setattr(locked_folders.os, "getuid", lambda: os.geteuid() + 1)
        remove_stale(str(tmp_path), PREFIX)
    assert os.path.isdir(folder)


def test_a_lock_lasts_while_any_process_has_it(tmp_path: Path) -> None:
    """The owner is gone and its supervisor cleans up; no other process may."""
    folder, lock = create(str(tmp_path), PREFIX)
    heir = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock,)
    )
    os.close(lock)
    remove_stale(str(tmp_path), PREFIX)
    assert os.path.isdir(folder)
    heir.communicate(b"\n")
    remove_stale(str(tmp_path), PREFIX)
    assert not os.path.exists(folder)


@pytest.mark.parametrize("moment", ["mkdtemp", "try_lock"])
def test_a_folder_removed_during_creation_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """A new folder looks stale between its creation and its lock."""
    swept: list[str] = []
    where = tempfile if moment == "mkdtemp" else locked_folders
    former = getattr(where, moment)

    def hurried(*arguments: object, **more: object) -> object:
        if moment == "mkdtemp":
            created = former(*arguments, **more)
        monkeypatch.setattr(where, moment, former)
        remove_stale(str(tmp_path), PREFIX)
        swept.extend(os.listdir(tmp_path))
        return created if moment == "mkdtemp" else former(*arguments, **more)

    monkeypatch.setattr(where, moment, hurried)
    folder, lock = create(str(tmp_path), PREFIX)
    remove_stale(str(tmp_path), PREFIX)
    assert swept == []
    assert os.listdir(tmp_path) == [os.path.basename(folder)]
    os.close(lock)


def test_concurrent_creation_and_removal(tmp_path: Path) -> None:
    created: list[tuple[str, int]] = []
    over = threading.Event()

    def sweeps() -> None:
        while not over.is_set():
            remove_stale(str(tmp_path), PREFIX)

    def makes() -> None:
        created.extend(create(str(tmp_path), PREFIX) for _ in range(200))

    sweepers = [threading.Thread(target=sweeps) for _ in range(2)]
    makers = [threading.Thread(target=makes) for _ in range(2)]
    for thread in sweepers + makers:
        thread.start()
    for thread in makers:
        thread.join()
    over.set()
    for thread in sweepers:
        thread.join()
    assert all(os.path.isdir(folder) for folder, _ in created)
    assert len({folder for folder, _ in created}) == 400
    for _, lock in created:
        os.close(lock)
