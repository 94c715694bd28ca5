"""Isolation holds for a user other than root, too: roots are then mounted in user
namespaces, and no uid is dropped.
"""

import subprocess
import sys

import pytest

from tests.support.sandboxes import ISOLATING, needs

UID = "12345"

ATTACKS = (
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
from tests.support.attacks import attempt
from rollweave.sandbox.base import SandboxSpec
from rollweave.sandbox.registry import backend

async def main():
    assert os.getuid() == {UID}
    for name in {ISOLATING}:
        made = backend(name)
        for attack in {ATTACKS}:
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
    assert len(lines) == len(ISOLATING) * (1 + len(ATTACKS))
