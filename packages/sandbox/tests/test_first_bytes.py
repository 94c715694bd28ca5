"""Limits, filter and OOM priority are set before any program of an image or an agent
runs. A branch whose interpreter the agent replaced by a program reports the settings
that this program has.
"""

import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rollweave.sandbox.base import MIB, Backend, Limits, Sandbox, SandboxSpec
from rollweave.sandbox.tools import IPython
from rollweave.schema.errors import SandboxError
from rollweave_sandbox.sources import DIRECTORIES
from tests.support.sandboxes import ISOLATING, image, opened

pytestmark = pytest.mark.variants

LIMITS = Limits(processes=40, memory_bytes=512 * MIB, disk_bytes=256 * MIB, cpu_s=77.0, files=321)

PROGRESS = """#!/bin/sh
exec >&2
echo begin
while read name soft; do case "$name $soft" in
    "Max processes"*|"Max open files"*|"Max data size"*|"Max file size"*|"Max cpu time"*|"Max pending"*) echo $name $soft;;
esac; done < /proc/self/limits
while read name value; do case $name in Seccomp:|NoNewPrivs:|CapEff:|CapBnd:) echo $name $value;; esac; done < /proc/self/status
read score < /proc/self/oom_score_adj; echo score $score
(echo 0 > /proc/self/oom_score_adj) 2> /dev/null && echo took it back
exit 3
"""

MET = {
    "Max processes 41 41 processes",
    "Max open files 321 321 files",
    f"Max data size {512 * MIB} {512 * MIB} bytes",
    f"Max file size {256 * MIB} {256 * MIB} bytes",
    "Max cpu time 77 77 seconds",
    "Max pending signals 4096 4096 signals",
    "Seccomp: 2",
    "NoNewPrivs: 1",
    "CapEff: 0000000000000000",
    "CapBnd: 0000000000000000",
    "score 1000",
}


@pytest_asyncio.fixture
async def bubblewrap() -> AsyncIterator[Backend]:
    async with opened("bubblewrap") as opened_backend:
        yield opened_backend


def _replace(python: Path) -> None:
    python.unlink()
    python.write_text(PROGRESS)
    python.chmod(0o755)


def _reported(error: pytest.ExceptionInfo[SandboxError]) -> set[str]:
    lines = str(error.value).splitlines()
    return {line.strip() for line in lines if line.strip() in MET or "took" in line}


async def test_all_limits_hold_for_the_first_program_of_an_image(
    tmp_path: Path, bubblewrap: Backend
) -> None:
    folder = image(tmp_path)
    _replace(Path(folder, "usr/bin/python3"))
    with pytest.raises(SandboxError) as error:
        await bubblewrap.start(SandboxSpec(image=folder, limits=LIMITS))
    assert _reported(error) == MET


async def test_all_limits_hold_in_a_branch_with_a_replaced_interpreter(
    tmp_path: Path, bubblewrap: Backend
) -> None:
    folder = image(tmp_path)
    sandbox = await bubblewrap.start(SandboxSpec(image=folder, limits=LIMITS))
    await sandbox.write("/home/agent/mine", PROGRESS.encode(), mode=0o755)
    moved = await sandbox.exec(
        ["sh", "-c", "rm -f /usr/bin/python3 && ln -s /home/agent/mine /usr/bin/python3"]
    )
    assert (moved.rc, moved.stderr) == (0, b"")
    snapshot = await sandbox.snapshot()
    with pytest.raises(SandboxError) as error:
        await bubblewrap.branch(snapshot)
    assert _reported(error) == MET


CUSTOM = b"open('/home/agent/ran', 'a').write('x')\n"


async def _ran(sandbox: Sandbox) -> bytes:
    return (await sandbox.exec(["sh", "-c", "test ! -e /home/agent/ran || echo ran"])).stdout


async def test_the_server_of_a_branch_imports_nothing_that_the_agent_wrote(
    tmp_path: Path, bubblewrap: Backend
) -> None:
    sandbox = await bubblewrap.start(SandboxSpec(image=image(tmp_path)))
    library = await sandbox.exec(
        ["python3", "-I", "-c", "import os; print(os.path.dirname(os.__file__), end='')"]
    )
    await sandbox.write(f"{library.stdout.decode()}/sitecustomize.py", CUSTOM)
    branch = await bubblewrap.branch(await sandbox.snapshot())
    assert await _ran(branch) == b""
    await branch.exec(["python3", "-I", "-c", ""])
    assert await _ran(branch) == b"ran\n"  # else the file would have proved nothing


@pytest.mark.parametrize("name", ISOLATING)
async def test_the_server_imports_nothing_from_an_editable_installs_folder(name: str) -> None:
    async with opened(name) as backend:
        sandbox = await backend.start(SandboxSpec())
        for source in (str(directory.parent) for directory in DIRECTORIES):
            result = await sandbox.exec(["sh", "-c", 'mkdir -p "$0" && test -w "$0"', source])
            if result.rc == 0:  # else it is read-only, which is as good
                await sandbox.write(f"{source}/sitecustomize.py", CUSTOM)
        branch = await backend.branch(await sandbox.snapshot())
        assert await _ran(branch) == b""


@pytest.mark.parametrize("name", ISOLATING)
async def test_the_server_and_its_programs_have_the_same_limits(name: str) -> None:
    """Return the limits of the server, the parent of a running program."""
    ask = "for who in $PPID self; do cat /proc/$who/limits /proc/$who/oom_score_adj; done"
    async with opened(name) as backend:
        sandbox = await backend.start(SandboxSpec(limits=LIMITS))
        lines = (await sandbox.exec(["sh", "-c", ask])).stdout.decode().splitlines()
        reported = [" ".join(line.split()) for line in lines]
        for expected in [line for line in MET if line.startswith("Max")]:
            assert reported.count(expected) == 2, expected
        assert reported.count("1000") == 2


SCAN = """
import ctypes
first, second, found = {first!r}, {second!r}, 0
for line in open("/proc/self/maps"):
    where, mode, *_ = line.split()
    if mode.startswith("rw"):
        start, end = (int(number, 16) for number in where.split("-"))
        data = ctypes.string_at(start, end - start)
        at = data.find(first)
        while at >= 0:
            found += data[at + len(first) : at + len(first) + len(second)] == second  # never one string here
            at = data.find(first, at + 1)
found
"""


@pytest.mark.parametrize("name", ISOLATING)
async def test_memory_has_no_data_of_other_sandboxes(name: str) -> None:
    first, second = secrets.token_hex(8), secrets.token_hex(8)
    async with opened(name) as backend:
        for size in (1, 3, 10, 40, 200, 1000):  # each takes another way through the allocators
            await backend.start(SandboxSpec(env={"TOKEN": (first + second) * size}))
        sandbox = await backend.start(SandboxSpec())
        cell = await IPython(sandbox).run(SCAN.format(first=first.encode(), second=second.encode()))
        assert (cell.error, cell.result) == (None, "0")
