"""One suite for both ways to start a process: on this host, and by an agent on
another.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollweave.io.child import Spawn, child_of
from tests.runtime.hosts.joined import joined_host
from tests.runtime.hosts.started import PROGRAM, Started, on, until
from tests.support.processes import alive


@pytest.fixture(params=["local", "remote"])
async def start(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Spawn]:
    if request.param == "local":
        yield child_of(PROGRAM, env={"OMP_NUM_THREADS": "3"})
    else:
        async with joined_host(tmp_path) as (host, _):
            yield on(host)


@pytest.fixture
async def one(start: Spawn, tmp_path: Path) -> Started:
    return Started(start, tmp_path / "logs" / "one.log")


async def test_frames_are_answered_in_order(one: Started) -> None:
    for number in range(100):
        one.process.send(str(number).encode())
    for number in range(100):
        assert await asyncio.wait_for(one.frames.get(), 30) == b"echo %d" % number
    one.process.kill()
    await one.end()


async def test_more_processes_than_the_loop_has_threads(start: Spawn, tmp_path: Path) -> None:
    count = min(32, (os.cpu_count() or 1) + 4)
    others = [Started(start, tmp_path / f"{number}.log") for number in range(count)]
    for one in others:
        assert await one.ask(b"here") == b"echo here"
    last = Started(start, tmp_path / "last.log")
    assert await last.ask(b"here") == b"echo here"
    last.process.send(b"fail")
    assert "exit status 3" in await last.end()
    for one in others:
        one.process.kill()
        await one.end()


async def test_large_frames_arrive_whole(one: Started) -> None:
    assert await one.ask(bytes(1 << 25)) == b"echo " + bytes(1 << 25)
    assert len(await one.ask(b"large")) == 32 << 20
    one.process.kill()
    await one.end()


async def test_environment_directory_and_output_arrive(
    one: Started, request: pytest.FixtureRequest
) -> None:
    assert (await one.ask(b"environment")).startswith(b"3 ")
    directory = Path((await one.ask(b"directory")).decode())
    if "local" in request.node.callspec.id:
        assert directory == Path.cwd()
    else:
        assert directory.name.startswith("rollweave-host-")
    await until(lambda: one.log.exists() and "begun" in one.log.read_text())
    one.process.kill()
    await one.end()


async def test_an_orderly_end_is_reported_with_its_status(one: Started) -> None:
    await one.ask(b"hello")
    one.process.send(b"end")
    assert "ended" in (reason := await one.end())
    assert "exit status 0" in reason


async def test_a_failure_is_reported_with_the_end_of_the_log(one: Started) -> None:
    await one.ask(b"hello")
    one.process.send(b"fail")
    assert "exit status 3" in (reason := await one.end())
    assert "a reason on standard error" in reason


async def test_a_killed_process_is_gone_before_its_end_is_reported(one: Started) -> None:
    await one.ask(b"hello")
    pid = one.process.pid
    assert alive(pid)
    one.process.kill()
    one.process.kill()
    assert "killed" in await one.end()
    assert not alive(pid)
    one.process.kill()
    one.process.send(b"nothing receives this")


async def test_a_process_that_kills_itself_is_reported_with_the_signal(one: Started) -> None:
    await one.ask(b"hello")
    one.process.send(b"die")
    assert "SIGKILL" in await one.end()


async def test_a_process_may_be_killed_before_it_has_begun(start: Spawn, tmp_path: Path) -> None:
    for number in range(5):
        one = Started(start, tmp_path / f"{number}.log")
        await asyncio.sleep(number * 0.01)  # at several moments of its start
        one.process.kill()
        assert "killed" in await one.end()


async def test_a_stopped_process_can_be_killed(one: Started) -> None:
    await one.ask(b"hello")
    os.kill(one.process.pid, signal.SIGSTOP)
    one.process.kill()
    await one.end()


async def test_a_module_that_does_not_exist_is_the_reason(tmp_path: Path) -> None:
    one = Started(child_of("tests.no_such_module"), tmp_path / "none.log")
    assert "no_such_module" in await one.end()
