"""Hosts join, leave and are lost; their processes end with their membership."""

import asyncio
import contextlib
import math
import os
import re
import signal
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from rollweave.record.rundir import RunDir
from rollweave.runtime.hosts import cluster as cluster_module
from rollweave.runtime.hosts.agent import HostAgent, Permissions
from rollweave.runtime.hosts.cluster import GatheredHosts
from rollweave.runtime.hosts.remote import RemoteHost
from rollweave.runtime.tasks import Tasks
from rollweave.schema.config.engines import ClusterConfig
from rollweave.schema.errors import HostError
from rollweave.schema.events import Event, HostJoined, Lender, LendersReported
from rollweave.schema.hosts import HostAccepted, LenderState, Resources
from tests.runtime.hosts.joined import SECRET, Listening, agent, listening
from tests.runtime.hosts.started import Started, on, until
from tests.support.processes import alive

WAIT_S = 60.0


async def joined(here: Listening) -> RemoteHost:
    return await asyncio.wait_for(here.joined.get(), WAIT_S)


async def lost(here: Listening) -> tuple[str, str]:
    return await asyncio.wait_for(here.lost.get(), WAIT_S)


async def last_line(process: asyncio.subprocess.Process) -> tuple[int | None, str]:
    _, errors = await asyncio.wait_for(process.communicate(), WAIT_S)
    return process.returncode, errors.decode().strip()


async def test_a_host_joins_with_its_resources(tmp_path: Path) -> None:
    named = ("--resource", "H20=4", "--resource", "fast")
    async with listening(tmp_path) as here, agent(here.address, *named):
        host = await joined(here)
        assert (host.name, host.address) == ("b", "127.0.0.1")
        assert host.resources.cpus >= 1
        assert host.resources.labels == {"H20": 4.0, "fast": math.inf}


async def test_a_released_host_ends_its_processes_and_exits(tmp_path: Path) -> None:
    async with listening(tmp_path) as here, agent(here.address, "--user-code") as process:
        one = Started(on(await joined(here)), tmp_path / "one.log")
        await one.ask(b"hello")
        pid = one.process.pid
        await here.listener.close()
        await one.end()
        code, text = await last_line(process)
        assert code == 0
        assert text.endswith("host b: the run is over")
        assert not alive(pid)
        assert here.lost.empty()


async def test_a_killed_agent_is_a_lost_host_and_leaves_no_process(tmp_path: Path) -> None:
    async with listening(tmp_path) as here, agent(here.address, "--user-code") as process:
        host = await joined(here)
        started = [Started(on(host), tmp_path / f"{n}.log") for n in range(3)]
        for one in started:
            await one.ask(b"hello")
        process.kill()
        name, reason = await lost(here)
        assert name == "b"
        for one in started:
            assert await one.end() == f"host b is lost: {reason}"
            await until(lambda one=one: not alive(one.process.pid))  # type: ignore[misc]
        with pytest.raises(OSError, match="host b is lost"):
            Started(on(host), tmp_path / "late.log")


async def test_a_stopped_host_is_lost_and_ends_its_processes_when_it_continues(
    tmp_path: Path,
) -> None:
    async with (
        listening(tmp_path, silent_s=1.0, lease_s=1.5) as here,
        agent(here.address, "--user-code") as process,
    ):
        one = Started(on(await joined(here)), tmp_path / "one.log")
        await one.ask(b"hello")
        os.kill(process.pid, signal.SIGSTOP)
        os.kill(one.process.pid, signal.SIGSTOP)
        _, reason = await lost(here)
        assert "silent for 1 s" in reason
        assert await one.end() == f"host b is lost: {reason}"
        os.kill(process.pid, signal.SIGCONT)
        await joined(here)  # as a new member
        assert not alive(one.process.pid)


class CutLink:
    """A connection between agent and controller that can stop carrying bytes."""

    def __init__(self, port: int) -> None:
        self._port, self.open = port, asyncio.Event()
        self.open.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._carry(reader, far_writer))
            group.create_task(self._carry(far_reader, writer))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self.open.wait()
                writer.write(data)
                await writer.drain()
            await self.open.wait()
        writer.close()


@contextlib.asynccontextmanager
async def cut_link(port: int) -> AsyncIterator[tuple[CutLink, str]]:
    link = CutLink(port)
    server = await asyncio.start_server(link.serve, "127.0.0.1", 0)
    async with server:
        yield link, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        link.open.set()


async def test_a_cut_off_host_ends_its_processes_by_itself_and_joins_again(tmp_path: Path) -> None:
    async with (
        listening(tmp_path, silent_s=1.0, lease_s=2.0) as here,
        cut_link(here.listener.port) as (link, address),
        agent(address, "--user-code"),
    ):
        one = Started(on(await joined(here)), tmp_path / "one.log")
        await one.ask(b"hello")
        pid = one.process.pid
        link.open.clear()
        await lost(here)
        await one.end()
        await until(lambda: not alive(pid))  # without any message from here
        link.open.set()
        again = Started(on(await joined(here)), tmp_path / "two.log")
        assert await again.ask(b"hello") == b"echo hello"


async def test_a_host_that_comes_back_at_once_waits_for_the_loss_of_the_former_one(
    tmp_path: Path,
) -> None:
    """After a power failure, its first connection never ends."""
    async with (
        listening(tmp_path, silent_s=3.0) as here,
        cut_link(here.listener.port) as (link, address),
        agent(address) as former,
    ):
        await joined(here)
        link.open.clear()
        former.kill()
        async with agent(here.address):
            assert (await lost(here))[0] == "b"
            assert (await joined(here)).name == "b"
            assert here.refused.empty()


async def test_a_wrong_secret_is_refused_in_one_line(tmp_path: Path) -> None:
    async with listening(tmp_path) as here, agent(here.address, secret=b"wrong") as process:
        code, text = await last_line(process)
        assert code == 2
        assert "host b: --secret-file or ROLLWEAVE_HOST_SECRET must hold the secret" in text
        assert here.address in text
        assert await here.refused.get() == (
            "a host at 127.0.0.1 must know the run's secret, got another one"
        )
        assert here.joined.empty()


@pytest.mark.extended
async def test_a_second_host_of_a_name_is_refused(tmp_path: Path) -> None:
    async with listening(tmp_path) as here, agent(here.address):
        await joined(here)
        async with agent(here.address) as second:
            code, text = await last_line(second)
            assert code == 2
            assert "host names must be distinct, got b a second time" in text
            assert "a second time" in await here.refused.get()
        async with agent(here.address, name="c"):
            assert (await joined(here)).name == "c"


async def test_another_version_of_the_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollweave.runtime.hosts.listener.VERSION", "9.9")
    async with listening(tmp_path) as here, agent(here.address) as process:
        code, text = await last_line(process)
        assert code == 2
        assert "rollweave on host b must be version 9.9" in text


async def test_a_host_that_does_not_see_the_runs_directory_is_refused(tmp_path: Path) -> None:
    async with listening(tmp_path) as here:
        (tmp_path / "mark").write_text("another run")
        async with agent(here.address) as process:
            code, text = await last_line(process)
            assert code == 2
            assert "must see the run's directory" in text
            assert "must see the run's directory" in await here.refused.get()
            assert here.joined.empty()


async def test_an_agent_names_the_controller_that_it_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollweave.core.policy.waiting.FIRST_S", 0.0)
    lines: asyncio.Queue[str] = asyncio.Queue()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        host = HostAgent(
            name="b",
            controller=unused.getsockname(),
            secret=SECRET,
            resources=Resources(cpus=1, memory_bytes=1),
            join_s=60.0,
            on_change=lines.put_nowait,
        )
        joining = asyncio.create_task(host.run())
        line = await asyncio.wait_for(lines.get(), WAIT_S)
        joining.cancel()
    assert line.startswith(f"host b: waiting 0 s for the controller at {host.where}: ")
    assert "Connect call failed" in line


async def test_an_agent_gives_up_without_a_controller() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{unused.getsockname()[1]}"
        async with agent(where, "--join-s", "1") as process:
            code, text = await last_line(process)
    assert code == 2
    assert f"the controller at {where} must be reached within 1 s" in text


@pytest.mark.variants
@pytest.mark.parametrize(
    "options", [("--secret-file", "/nowhere"), ("--resource", "=3"), ("--resource", "H20=none")]
)
async def test_wrong_options_are_refused(options: tuple[str, str]) -> None:
    async with agent("127.0.0.1:1", *options) as process:
        code, text = await last_line(process)
    assert code == 2
    assert text.count("\n") == 0
    assert options[0] in text


async def test_strangers_neither_join_nor_keep_hosts_out(tmp_path: Path) -> None:
    async with listening(tmp_path) as here, contextlib.AsyncExitStack() as stack:
        for payload in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(200), SECRET * 10):
            for _ in range(10):
                _, writer = await asyncio.open_connection("127.0.0.1", here.listener.port)
                stack.callback(writer.close)
                writer.write(payload)
        async with agent(here.address):
            assert (await joined(here)).name == "b"


class HangingAgent(HostAgent):
    """An agent on a host whose file system hangs until `answer` is set."""

    def __init__(self, name: str, port: int) -> None:
        super().__init__(
            name=name,
            controller=("127.0.0.1", port),
            secret=SECRET,
            resources=Resources(cpus=1, memory_bytes=1),
            join_s=WAIT_S,
        )
        self.answer = threading.Event()

    def enter(self, accepted: HostAccepted, archive: bytes, folder: Path) -> str:
        self.answer.wait()
        return ""


@contextlib.asynccontextmanager
async def hanging(name: str, port: int) -> AsyncIterator[None]:
    hung = HangingAgent(name, port)
    running = asyncio.create_task(hung.run())
    try:
        yield
    finally:
        hung.answer.set()
        running.cancel()
        await asyncio.wait([running])


async def test_a_host_that_hangs_as_it_enters_is_named_and_given_up(tmp_path: Path) -> None:
    async with listening(tmp_path, enter_s=1.0) as here, hanging("b", here.listener.port):
        assert await asyncio.wait_for(here.refused.get(), WAIT_S) == (
            "host b must see the run's directory and unpack the user's files within 1 s, got no "
            "answer: a file system may hang there"
        )
        assert here.listener.entering == ()
        async with agent(here.address):  # the name is free
            assert (await joined(here)).name == "b"


async def test_the_wait_for_hosts_names_those_that_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollweave.core.policy.waiting.FIRST_S", 0.0)
    monkeypatch.setenv("ROLLWEAVE_HOST_SECRET", SECRET.decode())
    shown: asyncio.Queue[str] = asyncio.Queue()
    cluster = ClusterConfig(address="127.0.0.1:0", hosts=1)
    async with asyncio.timeout(WAIT_S), Tasks() as tasks:
        hosts = GatheredHosts(cluster, {}, RunDir(tmp_path), tasks, on_status=shown.put_nowait)
        gathering = asyncio.create_task(hosts.gather())
        port = int((await shown.get()).rpartition(":")[2])
        async with hanging("b", port):
            while not (await shown.get()).endswith("so far: none; entering the run: b"):
                pass
            gathering.cancel()
            await asyncio.wait([gathering])
            await hosts.close()
        tasks.cancel_all()


async def test_hosts_that_hang_keep_no_others_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollweave.runtime.hosts.listener.MAX_UNAUTHENTICATED", 1)
    async with listening(tmp_path) as here, hanging("b", here.listener.port):
        await until(lambda: here.listener.entering == ("b",))
        async with agent(here.address, name="c"):
            assert (await joined(here)).name == "c"
        assert here.listener.entering == ("b",)


def lending_agent(port: int, *, name: str) -> HostAgent:
    """Return the agent of a host that lends an engine to the run at this port."""
    return HostAgent(
        name=name,
        controller=("127.0.0.1", port),
        secret=SECRET,
        resources=Resources(cpus=1, memory_bytes=1),
        join_s=WAIT_S,
        permissions=Permissions(lent="/nowhere"),
        on_change=lambda _: None,
    )


async def test_hosts_that_lend_are_offered_to_a_run_that_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not count among the hosts that the run waits for, and may leave before it
    begins.
    """
    monkeypatch.setenv("ROLLWEAVE_HOST_SECRET", SECRET.decode())
    shown: asyncio.Queue[str] = asyncio.Queue()
    events: asyncio.Queue[Event] = asyncio.Queue()
    cluster = ClusterConfig(address="127.0.0.1:0", hosts=1)
    async with asyncio.timeout(WAIT_S), Tasks() as tasks:
        hosts = GatheredHosts(
            cluster, {}, RunDir(tmp_path), tasks, loans="mine", on_status=shown.put_nowait
        )
        gathering = asyncio.create_task(hosts.gather())
        port = int((await shown.get()).split("--join ")[1].split()[0].rpartition(":")[2])
        gone, lender = lending_agent(port, name="gone"), lending_agent(port, name="lends")
        leaving = asyncio.create_task(gone.run())
        while "gone has joined" not in await shown.get():
            pass
        leaving.cancel()
        while "gone is lost" not in await shown.get():
            pass
        lending = asyncio.create_task(lender.run())
        while "lends" not in await shown.get():
            pass
        assert not gathering.done()
        with pytest.raises(HostError, match="host names must be distinct, got lends a second"):
            await lending_agent(port, name="lends").run()
        assert re.search(r"; the run waits up to \d+ s for 1 more of 1 hosts$", await shown.get())
        async with agent(f"127.0.0.1:{port}", name="own"):
            await gathering
            assert {slot.name: slot.lends for slot in hosts.slots} == {"lends": True, "own": False}
            assert [*hosts.present()] == ["own"]
            hosts.report_to(events.put_nowait)
            for _ in range(20):
                await asyncio.sleep(0)
            assert events.empty(), "it has not said how much of it is used"
            assert lender.report(LenderState(kv_use=0.25))
            assert [slot.number for slot in hosts.slots] == [*hosts.hosts.by_number] == [0, 1]
            (host,) = [slot for slot in hosts.slots if slot.lends]
            assert hosts.hosts.host(host.number).name == "lends"
            offered = Lender(name="lends", host=host.number, kv_use=0.25)
            assert await events.get() == LendersReported(lenders=(offered,))
            assert lender.report(LenderState(kv_use=0.5, recalled=True))
            recalled = msgspec.structs.replace(offered, kv_use=0.5, recalled=True)
            assert await events.get() == LendersReported(lenders=(recalled,))
            monkeypatch.setattr(cluster_module, "UNHEARD_S", -1.0)
            assert lender.report(LenderState(kv_use=0.5))
            async with agent(f"127.0.0.1:{port}", name="last"):
                joined = await events.get()
            assert isinstance(joined, HostJoined), "a lender that is not heard of is left out"
        lending.cancel()
        await asyncio.wait([lending])
        await hosts.close()
        tasks.cancel_all()
