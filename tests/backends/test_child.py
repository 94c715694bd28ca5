"""A child that nobody looks after any more is ended and reaped."""

import asyncio
import gc
import os
from pathlib import Path

import pytest

from rollweave.backends.child import Child, spawn


def start(tmp_path: Path) -> Child:
    return spawn(
        name="sleeper",
        module="tests.backends.sleeper",
        log=tmp_path / "log",
        env={},
        on_frame=lambda _: None,
        on_gone=lambda _: None,
    )


def assert_reaped(pid: int) -> None:
    """Not even a zombie is left."""
    gc.collect()
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, 0)


def test_a_forgotten_child_ends_with_its_event_loop(tmp_path: Path) -> None:
    async def main() -> int:
        return start(tmp_path).pid

    assert_reaped(asyncio.run(main()))


def test_a_loop_that_ends_while_a_child_is_being_reaped(tmp_path: Path) -> None:
    async def main() -> int:
        child = start(tmp_path)
        child.kill()
        await asyncio.sleep(0)  # the reaper begins, and is cancelled with the loop
        return child.pid

    assert_reaped(asyncio.run(main()))
