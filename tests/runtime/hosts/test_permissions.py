"""A run gets from a host no more than its operator allows, and no host gets onto
terminals and disks more than it should.
"""

import asyncio
import contextlib
import dataclasses
import math
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollweave.envs import registry
from rollweave.io.extras import USER_CODE_REFUSED, USER_CODE_VARIABLE
from rollweave.io.framing import FramedSocket
from rollweave.io.wire import decoder_of, encode
from rollweave.runtime.hosts import remote
from rollweave.runtime.hosts.agent import HostAgent, Permissions
from rollweave.runtime.hosts.authentication import admit
from rollweave.runtime.hosts.cluster import options_for, programs_of, refusal
from rollweave.runtime.hosts.remote import ProcessLog, RemoteHost
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError, HostError
from rollweave.schema.hosts import (
    AgentMessage,
    Device,
    HostAccepted,
    HostReady,
    JoinHost,
    Program,
    Programs,
    Resources,
    Share,
    StartProcess,
    UserModule,
    wrong_offer,
)
from tests.runtime.hosts.joined import SECRET, Listening, listening
from tests.runtime.hosts.started import PROGRAM, Started, on, until

WAIT_S = 60.0
GPU = Device(index=3, kind="NVIDIA H20", memory_bytes=1)
OWN = Programs(**{program.value: PROGRAM for program in Program})


def agent(port: int, permissions: Permissions | None = None, *, name: str = "b") -> HostAgent:
    """Return the agent of a host with one GPU."""
    return HostAgent(
        name=name,
        controller=("127.0.0.1", port),
        secret=SECRET,
        resources=Resources(cpus=1, memory_bytes=1, devices=(GPU,)),
        join_s=WAIT_S,
        permissions=dataclasses.replace(permissions or Permissions(), programs=OWN),
    )


@contextlib.asynccontextmanager
async def joined(
    here: Listening, permissions: Permissions, *, port: int | None = None
) -> AsyncIterator[RemoteHost]:
    """Yield a host whose agent runs on our event loop, and connects by `port`."""
    running = asyncio.create_task(agent(port or here.listener.port, permissions).run())
    try:
        yield await asyncio.wait_for(here.joined.get(), WAIT_S)
    finally:
        running.cancel()
        await asyncio.wait([running])


# The agent's side.

FREE, ANY, LENT = Permissions(), Permissions(user_code=True), Permissions(lent="/nowhere")


@pytest.mark.parametrize(
    ("permissions", "refused"),
    [
        (FREE, {Program.WORKER: "needs --user-code here", Program.ROLE: "needs --user-code here"}),
        (ANY, {}),
        (
            LENT,
            {
                program: "this host lends an engine, and starts no"
                for program in Program
                if program is not Program.RELAY and program is not Program.ENGINE
            },
        ),
    ],
    ids=["without user code", "with user code", "lent"],
)
async def test_an_agent_starts_what_its_operator_allows(
    tmp_path: Path, permissions: Permissions, refused: dict[Program, str]
) -> None:
    """The controller of the test asks for everything."""
    async with listening(tmp_path) as here, joined(here, permissions) as host:
        for program in Program:
            one = Started(
                host.starting(program, Share(threads=3, devices=(3,))), tmp_path / f"{program}.log"
            )
            if program in refused:
                assert "cannot be started on host b: " in await one.end()
                assert refused[program] in one.reasons[0]
                continue
            if permissions.lent and program is Program.ENGINE:
                assert "the engine that lends at /nowhere" in await one.end()
                continue
            code = b"-" if permissions.user_code else USER_CODE_REFUSED.encode()
            assert await one.ask(b"environment") == b"3 3 " + code
            one.process.kill()
            await one.end()
        foreign = Started(
            host.starting(Program.RELAY, Share(devices=(0,))), tmp_path / "foreign.log"
        )
        assert "GPUs must be among those that this host offers, [3]" in await foreign.end()


@pytest.mark.parametrize("given", [{"env": {"LD_PRELOAD": "x"}}, {"archive": b"files"}])
async def test_an_agent_takes_no_files_and_variables_that_it_does_not_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    monkeypatch.setattr(  # as of a controller that ignores what a host allows
        "rollweave.runtime.hosts.listener.HostListener._given",
        lambda listener, _: (listener._accepted, listener._archive),
    )
    async with listening(tmp_path, **given) as here:
        with pytest.raises(HostError, match="sent files or variables that it must not send"):
            await asyncio.wait_for(agent(here.listener.port).run(), WAIT_S)
        assert here.joined.empty()


@pytest.mark.parametrize("there", [False, True])
async def test_a_host_without_the_users_module_cannot_serve_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    monkeypatch.chdir(tmp_path)  # a host works in the folder of the user's files
    folder, lines = tmp_path / "files", list[str]()
    folder.mkdir()
    if there:
        (folder / "users_module.py").touch()
    (tmp_path / "mark").write_text("this run")
    needed = UserModule(setting="tasks.0.env", value="users_module:Env", module="users_module")
    given: dict[str, Any] = {"lease_s": 1.0, "mark": "this run", "modules": (needed,)}
    accepted = HostAccepted(mark_path=str(tmp_path / "mark"), **given)
    one = agent(9, ANY)
    one._on_change = lines.append
    problem = one.enter(accepted, b"", folder)
    if there:
        assert (problem, lines) == ("", ["host b: joined the run at 127.0.0.1:9"])
    else:
        assert problem == (
            "host b: tasks.0.env must be importable on every host, got users_module:Env: there "
            "is no module users_module"
        )
        assert lines == []
    assert Path.cwd() == folder


@contextlib.asynccontextmanager
async def entered(tmp_path: Path, changes: asyncio.Queue[str]) -> AsyncIterator[FramedSocket]:
    """Yield a controller's connection to an agent that has entered its run. `changes`
    gets the agent's lines.
    """
    loop, frames = asyncio.get_running_loop(), asyncio.Queue[bytes]()
    (tmp_path / "mark").write_text("this run")
    accepted = HostAccepted(lease_s=WAIT_S, mark_path=str(tmp_path / "mark"), mark="this run")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        one = agent(server.getsockname()[1])
        one._on_change = changes.put_nowait
        running = asyncio.create_task(one.run())
        sock, _ = await loop.sock_accept(server)
        seal = await admit(sock, SECRET)
        control = FramedSocket(sock, on_frame=frames.put_nowait, on_end=lambda _: None, seal=seal)
        try:
            control.send(encode(accepted))
            while not isinstance(decoder_of(AgentMessage)(await frames.get()), HostReady):
                pass
            yield control
        finally:
            control.close()
            running.cancel()
            await asyncio.wait([running])


@pytest.mark.parametrize(
    ("repeated", "reason"),
    [
        (
            StartProcess(process=1, key=b"", program=Program.RELAY, share=Share()),
            "process 1 runs already",
        ),
        (
            HostAccepted(lease_s=WAIT_S, mark_path="", mark="", env={"LD_PRELOAD": "x"}),
            "this host is accepted already",
        ),
    ],
    ids=["a number", "an acceptance"],
)
async def test_an_agent_leaves_a_controller_that_repeats_what_comes_once(
    tmp_path: Path, repeated: StartProcess | HostAccepted, reason: str
) -> None:
    """Else processes would outlive the membership, or have variables that nothing has
    checked.
    """
    changes: asyncio.Queue[str] = asyncio.Queue()
    async with asyncio.timeout(WAIT_S), entered(tmp_path, changes) as control:
        assert "joined the run" in await changes.get()
        for _ in range(2):
            control.send(encode(repeated))
        assert (await changes.get()).endswith(f"sent an invalid frame: {reason}")


class Tampering:
    """A link that alters one byte of what it carries next to the controller, in the
    connection with the number `altered`.
    """

    def __init__(self, port: int) -> None:
        self._port, self.connections, self.altered = port, 0, -1

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.connections = self.connections, self.connections + 1
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._carry(reader, far_writer, number))
            group.create_task(self._carry(far_reader, writer, -2))

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if number == self.altered:
                    data, self.altered = data[:-1] + bytes([data[-1] ^ 1]), -1
                writer.write(data)
                await writer.drain()
        writer.close()


@pytest.mark.parametrize("connection", ["of the host", "of a process"])
async def test_an_altered_frame_ends_the_connection_and_is_named(
    tmp_path: Path, connection: str
) -> None:
    async with listening(tmp_path) as here:
        link = Tampering(here.listener.port)
        server = await asyncio.start_server(link.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, joined(here, ANY, port=port) as host:
            one = Started(on(host), tmp_path / "one.log")
            await one.ask(b"hello")
            if connection == "of the host":
                link.altered = 0
                _, reason = await asyncio.wait_for(here.lost.get(), WAIT_S)
            else:
                link.altered = link.connections - 1
                one.process.send(b"hello")
                reason = await one.end()
        assert "sent an invalid frame: frame " in reason
        assert "has a wrong authentication code: it was altered, repeated or left out" in reason


def test_processes_without_the_permission_import_only_what_is_built_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(USER_CODE_VARIABLE, USER_CODE_REFUSED)
    assert registry.load(registry.BUILT_IN["nim"], what="environment")
    for reference in ("os:getcwd", "rollweave.io.child:os.system", "tests.support.game:Game"):
        with pytest.raises(ConfigError, match="whose agent runs without --user-code"):
            registry.load(reference, what="environment")


# The controller's side.


def config(**sections: Any) -> RunConfig:
    data = {
        "run": {"name": "r", "steps": 1},
        "model": {"path": "m"},
        "tasks": [{"env": "frozenlake"}],
        "cluster": {"launcher": "local", "hosts": 2},
        "pools": {"own": {"resource": "own"}, "serving": {"resource": "serving"}},
        **sections,
    }
    return RunConfig.model_validate(data)


def offer(**changes: Any) -> JoinHost:
    resources = {"cpus": 2, "memory_bytes": 1, **changes.pop("resources", {})}
    fields = {"name": "b", "address": "10.0.0.2", "package": "1", **changes}
    return JoinHost(resources=Resources(**resources), **fields)


POOLED = {"trainer": {"pool": "own"}, "engines": [{"pool": "own"}, {"pool": "serving"}]}
WARM = {"tasks": [{"env": "tests.support.game:Game"}], "warmup": {"steps": 1}}


@pytest.mark.parametrize(
    ("sections", "pools", "changes", "line"),
    [
        ({}, (), {}, ""),
        ({"warmup": {"steps": 1}}, (), {}, ""),
        ({**WARM, "tasks": [{"env": "code"}]}, (), {}, ""),
        ({"workers": {"count": 1}}, (), {"user_code": True}, ""),
        (
            {"workers": {"count": 1}},
            (),
            {},
            "host b must run the user's code, since workers.count is set and workers.pool (none, "
            "which stands for all hosts) includes this host: start its agent with --user-code",
        ),
        ({"workers": {"count": 1, "pool": "own"}, **POOLED}, ("serving",), {}, ""),
        ({**WARM, **POOLED}, ("serving",), {"lends": True}, ""),
        (WARM, (), {}, "since warmup.steps is set and trainer.pool"),
        (
            {"engines": {"kind": "vllm", "args": ["--tool-parser-plugin", "p.py"]}},
            (),
            {},
            "since engines.args is set and engines.pool",
        ),
        ({"engines": {"kind": "vllm", "python": "/x"}}, (), {}, "since engines.python is set"),
        ({"engines": {"kind": "vllm"}}, (), {}, ""),
        (
            {},
            ("serving",),
            {"lends": True},
            "host b lends an engine, and runs no ranks of the trainer: trainer.pool must name a "
            "pool without this host, got none, which stands for all hosts",
        ),
        (
            {"engines": {"kind": "vllm", "pool": "serving"}, "trainer": {"pool": "own"}},
            ("serving",),
            {"lends": True},
            "runs no inference servers",
        ),
    ],
)
def test_a_run_names_the_host_and_the_option_that_it_needs(
    sections: dict[str, Any], pools: tuple[str, ...], changes: dict[str, Any], line: str
) -> None:
    given = refusal(offer(**changes), pools, programs_of(config(**sections)), ())
    assert line in given
    assert bool(line) == bool(given)


def test_variables_are_named_by_the_operator_and_never_sent_to_a_lender() -> None:
    names = ("HF_TOKEN", "COLOR")
    assert refusal(offer(variables=("COLOR",)), (), (), names) == (
        "host b must pass on HF_TOKEN of cluster.env: start its agent with --env HF_TOKEN"
    )
    assert refusal(offer(variables=names), (), (), names) == ""
    assert refusal(offer(lends=True), (), (), names) == ""
    hosted = programs_of(config(workers={"count": 1}))
    assert options_for(hosted, names) == " --user-code --env HF_TOKEN --env COLOR"
    assert options_for(programs_of(config()), ()) == ""


async def test_what_a_host_may_not_have_is_not_sent(tmp_path: Path) -> None:
    sent = {"archive": b"files", "env": {"COLOR": "blue", "TOKEN": "secret"}}
    async with listening(tmp_path, **sent) as here:
        plain, _ = given = here.listener._given(offer(variables=("COLOR",)))
        assert (given[1], plain.archive_bytes, plain.env) == (b"", 0, {"COLOR": "blue"})
        accepted, archive = here.listener._given(offer(user_code=True, variables=("TOKEN",)))
        assert (archive, accepted.archive_bytes) == (b"files", 5)
        assert accepted.env == {"TOKEN": "secret"}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, ""),
        ({"name": "rechner-ü 1"}, ""),
        ({"resources": {"labels": {"H20": math.inf}}}, ""),
        ({"name": "b\x1b[2J"}, r"the name of a host must have 1 to 64 printable.*'b\\x1b\[2J'"),
        ({"name": "b\u202egnp"}, r"1 to 64 printable characters, got 'b\\u202egnp'$"),
        ({"name": "b" * 65}, "1 to 64 printable"),
        ({"name": ""}, "1 to 64 printable"),
        ({"name": "b\nhost c has joined"}, "1 to 64 printable"),
        ({"address": "10.0.0.2\x1b"}, "host b must offer an address"),
        ({"address": "http://x/"}, "an address"),
        ({"package": "1\x9b"}, "a version"),
        ({"resources": {"cpus": 0}}, "cores"),
        ({"resources": {"memory_bytes": -1}}, "memory"),
        ({"resources": {"labels": {"H\x1b": 1.0}}}, "resources"),
        ({"resources": {"labels": {"H": math.nan}}}, "resources"),
        ({"resources": {"labels": {str(n): 1.0 for n in range(300)}}}, "at most 256"),
        ({"resources": {"devices": (GPU, GPU)}}, "GPUs with distinct numbers"),
        (
            {"resources": {"devices": (Device(index=0, kind="\x1b]0;", memory_bytes=1),)}},
            "GPUs with distinct",
        ),
        ({"variables": ("A=B",)}, "names of variables"),
    ],
)
def test_an_offer_is_bounded_and_printable(changes: dict[str, Any], line: str) -> None:
    wrong = wrong_offer(offer(**changes))
    assert bool(wrong) == bool(line)
    if line:
        assert wrong.isprintable()
        assert len(wrong) < 300
        with pytest.raises(AssertionError, match=line):
            raise AssertionError(wrong)


async def test_a_host_with_a_wrong_name_is_refused_in_one_line(tmp_path: Path) -> None:
    async with listening(tmp_path) as here:
        with pytest.raises(HostError) as raised:
            await asyncio.wait_for(agent(here.listener.port, name="b\x1b[2J\n").run(), WAIT_S)
        line = await asyncio.wait_for(here.refused.get(), WAIT_S)
        assert line.isprintable()
        assert "'b\\x1b[2J\\n'" in line
        assert str(raised.value) == line


async def test_a_process_that_logs_much_fills_neither_disk(tmp_path: Path) -> None:
    log = tmp_path / "one.log"
    async with listening(tmp_path) as here, joined(here, ANY) as host:
        one = Started(on(host), log)
        assert await one.ask(b"log") == b"logged"
        await until(lambda: log.exists() and log.read_text().endswith("last\n"))
        text = log.read_text()
        assert len(text) < 300_000
        assert "bytes of output are left out here]" in text
        one.process.kill()
        await one.end()


def test_a_log_is_printable_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "LOG_BYTES", 2000)
    monkeypatch.setattr(remote, "RATE_BYTES", 1000)
    cut: list[str] = []
    log = ProcessLog(tmp_path / "e0.log", cut.append)
    for piece in (b"\x1b[2J", b"\xc2", b"\x9b\r\n\xff", b"\x07\xe2\x80\xaedone\n"):
        log.write(piece)
    assert log.path.read_text() == "\\u001b[2J\\u009b\n\\xff\\u0007\\u202edone\n"
    assert cut == []
    for number in range(100):
        log.tick()
        log.write(b"%d %s\n" % (number, b"x" * 90))
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes.keys() == {"e0.log", "e0.log.1"}
    assert all(size <= 1200 for size in sizes.values())
    assert log.path.read_text().splitlines()[-1].startswith("99 x")
    (line,) = cut
    assert "older output is in e0.log.1, and what was older still is cut" in line
    before = log.path.stat().st_size
    for _ in range(5):
        log.write(b"y" * 900)
    assert log.path.stat().st_size - before <= 1200, "a flood is left out"
    assert len(cut) == 1, "it is said once"
