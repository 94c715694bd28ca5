"""Every attack is tried on every isolating back end, and fails. Isolation holds for a
user other than root, too: roots are then mounted in user namespaces, and no uid is
dropped.
"""

import asyncio
import subprocess
import sys

import pytest

from packages.sandbox.tests.attacks import BAIT, Outcome, attacks_here, attempt
from rollweave.sandbox.base import Limits, SandboxSpec
from rollweave_sandbox.kernel import SHM_BYTES, SHM_FILES
from rollweave_sandbox.stage import inodes
from tests.support.sandboxes import ISOLATING, needs, opened, python

AT_ONCE = 4


@pytest.mark.variants
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ISOLATING)
async def test_no_attack_escapes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BAIT, "1")
    room = asyncio.Semaphore(AT_ONCE)
    async with opened(name) as backend:

        async def one(attack: str) -> Outcome:
            async with room:
                return await attempt(backend, attack)

        outcomes = await asyncio.gather(*(one(attack) for attack in attacks_here()))
    assert [outcome for outcome in outcomes if outcome.escaped] == []


FILE_SYSTEMS = """
import os
for line in open("/proc/self/mounts"):
    _, where, kind, options, *_ = line.split()
    if kind == "tmpfs" and "rw" in options.split(","):
        size = os.statvfs(where)
        print(where, size.f_files, size.f_blocks * size.f_frsize)
"""


@pytest.mark.parametrize("name", ISOLATING)
async def test_every_writable_memory_file_system_is_bounded(name: str) -> None:
    """Files are bounded as bytes are: the attack on files may end by another bound."""
    limits = Limits()
    async with opened(name) as backend:
        sandbox = await backend.start(SandboxSpec(limits=limits))
        lines = (await sandbox.exec(python(FILE_SYSTEMS))).stdout.decode().splitlines()
    usage = {where: (int(files), int(size)) for where, files, size in map(str.split, lines)}
    assert "/dev/shm" in usage
    most_bytes = max(limits.disk_bytes, SHM_BYTES)
    for where, (files, size) in usage.items():
        assert 0 < files <= max(inodes(limits.disk_bytes), SHM_FILES), where
        assert 0 < size <= most_bytes, where


@pytest.mark.parametrize(
    "attack",
    [
        *("files of the host", "network", "environment of the host", "settings of the kernel"),
        pytest.param("packages and answers of the host", marks=pytest.mark.extended),
    ],
)
async def test_attacks_succeed_without_isolation(
    attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attack that fails even without isolation would prove nothing."""
    monkeypatch.setenv(BAIT, "1")
    async with opened("plain") as backend:
        assert (await attempt(backend, attack)).escaped


UID = "12345"

USER_ATTACKS = (
    "memory of page tables",
    "memory that processes share",
    "many empty files",
    "all terminals",
    "the choice of the OOM killer",
    "memory of the server",
    "devices",
    "files of the host",
    "privileges",
)

WATCH = """
import ctypes
libc, made = ctypes.CDLL(None), 0
while made < 500 and libc.inotify_init1(0) >= 0:
    made += 1
print(made)
"""

TRY = f"""
import asyncio, os, sys
from packages.sandbox.tests.attacks import attempt
from rollweave.sandbox.base import SandboxSpec
from rollweave_sandbox.registry import backend

async def main():
    assert os.getuid() == {UID}
    for name in {ISOLATING}:
        made = backend(name)
        for attack in {USER_ATTACKS}:
            outcome = await attempt(made, attack)
            print("ESCAPED" if outcome.escaped else "held", name, outcome)
        sandbox = await made.start(SandboxSpec())
        watches = await sandbox.exec([sys.executable, "-I", "-c", {WATCH!r}])
        print("held" if watches.stdout.strip() == b"32" else "ESCAPED", name, "watches", watches)
        await made.close()

asyncio.run(main())
"""


@pytest.mark.extended
@pytest.mark.timeout(240)
def test_no_attack_escapes_from_an_unprivileged_sandbox() -> None:
    needs("bubblewrap")
    argv = [
        "unshare",
        "--user",
        f"--map-user={UID}",
        f"--map-group={UID}",
        sys.executable,
        "-c",
        TRY,
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if not line.startswith("held")] == []
    assert len(lines) == len(ISOLATING) * (1 + len(USER_ATTACKS))
