"""The control socket: its requests, its access, and their effects on a run."""

import asyncio
import contextlib
import os
import socket
import stat
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from rollweave.core.core import Core
from rollweave.core.mechanisms.membership.members import first_engines
from rollweave.runtime import control
from rollweave.runtime.control import LINE_BYTES, MAX_CONNECTIONS, Control, ask
from rollweave.runtime.tasks import Tasks
from rollweave.schema import events as e
from rollweave.schema import status
from rollweave.schema.base import EngineId, as_json
from rollweave.schema.commands import Warn
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError, RollweaveError
from rollweave.schema.events import TrainerReady as Ready
from tests.support.core import ALLOCATION, config

E0, E1, E2 = EngineId("e0"), EngineId("e1"), EngineId("e2")


class Run:
    """A core of two engines behind a control socket, and nothing else."""

    def __init__(self, path: Path, config_: RunConfig, tasks: Tasks) -> None:
        self.core, self.path = Core(config_), path
        self.warnings: list[Warn] = []
        self.core.handle(0.0, e.RunStarted(engines=first_engines(config_)))
        self.control = Control(
            path,
            config=config_,
            state=lambda: self.core.state,
            post=self.post,
            tasks=tasks,
            warn=self.warnings.append,
        )

    def post(self, event: e.Event, then: Callable[[], None] | None = None, /) -> None:
        self.core.handle(1.0, event)
        if then is not None:
            asyncio.get_running_loop().call_soon(then)

    def serve(self) -> None:
        """Let all engines have weights."""
        for engine in list(self.core.state.engines):
            self.post(e.EngineJoined(engine_id=engine, epoch=0, max_slots=3, kv_total_tokens=9))
        self.post(Ready(epoch=0, step=0))
        self.post(e.WeightsPublished(epoch=0, version=0, publication_id=0))
        for engine in list(self.core.state.engines):
            self.post(e.WeightsLoaded(engine_id=engine, epoch=0, version=0, publication_id=0))

    async def ask(self, request: status.ControlRequest) -> status.ControlReply:
        return await asyncio.to_thread(ask, self.path, request)

    async def raw(self, data: bytes, *, ends: bool = True) -> bytes:
        """Return its reply to these bytes."""
        return await asyncio.to_thread(self._raw, data, ends)

    def _raw(self, data: bytes, ends: bool) -> bytes:
        with self.connected() as connection:
            connection.sendall(data)
            if ends:
                connection.shutdown(socket.SHUT_WR)
            answer = b""
            while more := connection.recv(1 << 16):
                answer += more
            return answer

    def connected(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(30.0)
        connection.connect(str(self.path))
        return connection


@contextlib.asynccontextmanager
async def running(path: Path, config_: RunConfig | None = None) -> AsyncIterator[Run]:
    tasks = Tasks()
    run = Run(path, config_ or config("bounded"), tasks)
    with contextlib.closing(run.control):
        async with tasks:
            try:
                run.control.open()
                yield run
            finally:
                tasks.cancel_all()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "control.sock"


@pytest.fixture
def notes(path: Path) -> None:
    path.write_text("a user's notes")


async def test_engines_are_listed_added_and_withdrawn(path: Path) -> None:
    async with running(path) as run:
        run.serve()
        reply = await run.ask(status.ListEngines())
        assert [
            (line.id, line.status, line.version, line.slots, line.joined) for line in reply.engines
        ] == [(E0, "serving", 0, 3, False), (E1, "serving", 0, 3, False)]
        reply = await run.ask(status.AddEngines(count=2))
        assert (reply.added, reply.error) == ((E2, EngineId("e3")), "")
        expected = [(E2, "starting", True), ("e3", "starting", True)]
        assert [(line.id, line.status, line.joined) for line in reply.engines[2:]] == expected
        reply = await run.ask(status.WithdrawEngine(engine_id=E0))
        assert reply.error == ""
        assert [line.id for line in reply.engines] == [E1, E2, "e3"], "it had no turns"
        assert run.core.state.membership.withdrawn == [E0]


async def test_impossible_requests_are_refused(path: Path) -> None:
    async with running(path) as run:
        assert (
            "no engine 'e7'; there are e0, e1"
            in (await run.ask(status.WithdrawEngine(engine_id=EngineId("e7")))).error
        )
        assert "no group 1" in (await run.ask(status.AddEngines(group=1))).error
        assert (await run.ask(status.WithdrawEngine(engine_id=E0))).error == "", (
            "no engine has weights yet"
        )
        assert (await run.ask(status.WithdrawEngine(engine_id=E1))).error == "e1 is the last engine"
        run.post(e.StopRequested())
        while not run.core.finished:
            run.post(Ready(epoch=0, step=0))
            run.post(e.WeightsPublished(epoch=0, version=0, publication_id=0))
            run.post(e.CheckpointSaved(epoch=0, step=0))
            run.core.state.error = run.core.state.error or "enough"
        assert (await run.ask(status.AddEngines())).error == "the run is over"
    async with running(
        path, config("sync", rollout={"scheduling": "trajectory"}, allocation=ALLOCATION)
    ) as run:
        for request in (status.AddEngines(), status.WithdrawEngine(engine_id=E0)):
            assert "[allocation] decides" in (await run.ask(request)).error


async def test_simultaneous_requests_get_different_engines(path: Path) -> None:
    async with running(path) as run:
        replies = await asyncio.gather(*(run.ask(status.AddEngines(count=3)) for _ in range(4)))
    added = [name for reply in replies for name in reply.added]
    assert sorted(added) == sorted(f"e{number}" for number in range(2, 14))
    assert not any(reply.error for reply in replies)


NONSENSE = [
    b"",
    b"\n",
    b"hello\n",
    b"\xff\xfe\n",
    b'{"type":"ListEngines"}',
    b'{"type":"FireEngines"}\n',
    b'{"type":"AddEngines","count":0}\n',
    b'{"type":"AddEngines","count":65}\n',
    b'{"type":"AddEngines","count":1e99}\n',
    b'{"type":"AddEngines","group":-1}\n',
    b'{"type":"ListEngines","more":1}\n',
    b'{"a":' + b"[" * (LINE_BYTES - 100) + b"\n",
    b'{"type":"WithdrawEngine","engine_id":"' + b"e" * LINE_BYTES + b'"}\n',
]


async def test_nonsense_is_refused(path: Path) -> None:
    async with running(path) as run:
        before = run.core.snapshot()
        for data in NONSENSE:
            answer = await run.raw(data)
            assert b'"error":"a request must be' in answer, (data[:60], answer)
            assert answer.count(b"\n") == 1
            assert len(answer) < 1000
        assert run.core.snapshot() == before
        assert len((await run.ask(status.ListEngines())).engines) == 2


async def test_silent_and_leaving_clients_delay_no_other(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(path) as run:
        silent = [run.connected() for _ in range(MAX_CONNECTIONS - 1)]
        for connection in silent:
            connection.send(b"{")
        assert len((await run.ask(status.ListEngines())).engines) == 2, "there is a place left"
        silent.append(run.connected())
        request = asyncio.create_task(run.ask(status.ListEngines()))
        silent.pop().close()
        assert len((await request).engines) == 2, "there is one again"
        for connection in silent:
            connection.close()
    monkeypatch.setattr(control, "LINE_S", 0.05)
    async with running(path) as run:
        assert await run.raw(b"{", ends=False) == b"", "it was given up"


async def test_only_the_owner_may_connect_and_no_file_is_left(path: Path) -> None:
    former = os.umask(0)
    try:
        async with running(path) as run:
            mode = os.lstat(path).st_mode
            assert stat.S_ISSOCK(mode)
            assert stat.S_IMODE(mode) == 0o600
            assert run.warnings == []
    finally:
        os.umask(former)
    assert os.listdir(path.parent) == []
    with pytest.raises(ConfigError, match="RUN must be the directory of a living run"):
        ask(path, status.ListEngines())


async def test_a_killed_runs_socket_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    with pytest.raises(ConfigError, match="RUN must be the directory of a living run"):
        ask(path, status.ListEngines())
    async with running(path) as run:
        assert len((await run.ask(status.ListEngines())).engines) == 2


async def test_a_path_may_be_longer_than_a_sockets_address(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    async with running(deep / "control.sock") as run:
        assert len((await run.ask(status.ListEngines())).engines) == 2


async def test_a_run_continues_if_no_socket_can_be_made(path: Path, notes: None) -> None:
    async with running(path) as run:
        (warning,) = run.warnings
        assert f"no socket at {path}" in warning.message
    assert os.lstat(path).st_size == len("a user's notes")
    with pytest.raises(ConfigError, match="RUN must be the directory of a living run"):
        ask(path, status.ListEngines())


async def test_a_client_waits_while_all_connections_are_taken(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as other:
        listener.bind(str(path))
        listener.listen(0)  # one connection is left
        other.connect(str(path))
        request = asyncio.ensure_future(asyncio.to_thread(ask, path, status.ListEngines()))
        assert await asyncio.wait([request], timeout=0.5) == (set(), {request})
        listener.accept()[0].close()
        connection = (await asyncio.to_thread(listener.accept))[0]
        with connection:
            await asyncio.to_thread(
                connection.recv, LINE_BYTES
            )  # closing before the request arrives would break the pipe
            connection.sendall(b"{}\n")
        assert await request == status.ControlReply()


async def test_a_reply_that_precedes_the_request_counts(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run refuses a request that it has not read, and closes the connection."""
    closed = threading.Event()

    def encode_after_reply(request: status.ControlRequest) -> bytes:
        assert closed.wait(30.0)
        return as_json(request)

    monkeypatch.setattr(control, "as_json", encode_after_reply)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        asking = asyncio.ensure_future(asyncio.to_thread(ask, path, status.ListEngines()))
        connection = (await asyncio.to_thread(listener.accept))[0]
        with connection:
            connection.sendall(b'{"error":"full"}\n')
        closed.set()
        assert await asking == status.ControlReply(error="full")


def test_an_invalid_reply_is_an_error(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        request = asyncio.new_event_loop()
        try:
            waiting = request.run_in_executor(None, ask, path, status.ListEngines())
            listener.accept()[0].close()
            with pytest.raises(RollweaveError, match=r"did not answer|does not answer"):
                request.run_until_complete(waiting)
        finally:
            request.run_until_complete(request.shutdown_default_executor())
            request.close()
