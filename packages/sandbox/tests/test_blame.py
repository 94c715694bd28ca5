"""An attack on a sandbox's server by the code inside is attributed to that code and
detected at once, so that no call waits in vain.
"""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from rollweave.envs.handlers.sandboxes import SandboxHandler
from rollweave.sandbox.base import Backend, Sandbox
from rollweave.sandbox.tools import Bash, Editor, IPython
from rollweave.schema.errors import SandboxError, SandboxLostError, SandboxSpoiledError
from tests.support.sandboxes import NAMES, SPEC, opened, python

pytestmark = pytest.mark.variants

SIGNALED = """
import contextlib, os, signal
for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
    if pid != os.getpid():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGNAL)
"""
"""Program that signals every process it sees except itself."""


@pytest_asyncio.fixture(params=[name for name in NAMES if name != "plain"])
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    async with opened(request.param) as opened_backend:
        yield opened_backend


@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSTOP", "SIGTERM"])
async def test_killing_or_stopping_the_server_spoils_the_sandbox(
    backend: Backend, signal: str
) -> None:
    sandbox = await backend.start(SPEC)
    with pytest.raises(SandboxSpoiledError) as lost:
        await _twice(sandbox, python(SIGNALED.replace("SIGNAL", signal)))
    assert await SandboxHandler().run_exception(lost.value) is not None
    with pytest.raises(SandboxSpoiledError):
        await sandbox.exec(["true"])


async def _twice(sandbox: Sandbox, argv: list[str]) -> None:
    """Call until the sandbox is found to be lost; it may answer before."""
    await sandbox.exec(argv)
    await sandbox.exec(["true"])


async def test_ending_a_sandbox_from_outside_does_not_spoil_it(backend: Backend) -> None:
    for end in ("kill", "stop"):
        sandbox = await backend.start(SPEC)
        if end == "kill":
            sandbox.kill()
        else:
            await sandbox.stop()
        with pytest.raises(SandboxLostError) as lost:
            await sandbox.exec(["true"])
        assert await SandboxHandler().run_exception(lost.value) is None


@pytest.mark.parametrize("depth", [101, 2_000])
async def test_folders_too_deep_for_a_snapshot_spoil_the_sandbox(
    backend: Backend, depth: int
) -> None:
    sandbox = await backend.start(SPEC)
    result = await sandbox.exec(
        python(f"import os\nfor _ in range({depth}): os.mkdir('d'); os.chdir('d')")
    )
    assert result.rc == 0, result.stderr
    with pytest.raises(SandboxSpoiledError, match="no snapshot: folders must be at most 100 deep"):
        await sandbox.snapshot()
    assert (await sandbox.exec(["true"])).rc == 0
    await sandbox.stop()


async def test_a_surrogate_raised_in_a_cell_is_answered(backend: Backend) -> None:
    sandbox = await backend.start(SPEC)
    result = await IPython(sandbox).run(r"raise ValueError('\ud800 \udcff')")
    assert result.error is not None
    result.error.message.encode()
    result.error.traceback.encode()
    assert (await IPython(sandbox).run("1 + 1")).result == "2"
    result = await IPython(sandbox).run(r"'\ud800'")
    assert (result.result or "").encode()
    await sandbox.stop()


async def test_arguments_that_are_not_valid_text_round_trip(backend: Backend) -> None:
    sandbox = await backend.start(SPEC)
    assert (await Bash(sandbox).run("echo '\ud800'; touch $'\\377'; ls")).output.encode()
    await Editor(sandbox).create("a.txt", "\ud800\n")
    assert "\ufffd" in (await Editor(sandbox).view("a.txt")).text
    (await Editor(sandbox).view(".")).text.encode()
    await trap(sandbox)
    for call in (
        sandbox.read("check.py"),
        sandbox.write("check.py", b"x"),
        Editor(sandbox).view("check.py"),
    ):
        with pytest.raises(SandboxError) as refused:
            await call
        str(refused.value).encode()
    await sandbox.stop()


async def trap(sandbox: Sandbox) -> None:
    """Make a link with an invalid target, through a path that is not a folder."""
    assert (await sandbox.exec(["bash", "-c", r"ln -s $'/dev/null/\377/x' check.py"])).rc == 0
