"""One suite over all back ends, with the requirements of every sandbox."""

import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from rollweave.sandbox.base import MIB, Backend, Limits, Sandbox, SandboxSpec
from rollweave.sandbox.tools import Bash, IPython
from rollweave.schema.errors import SandboxError, SandboxLostError, SandboxRefusedError
from rollweave_sandbox import running
from rollweave_sandbox.processes import Table, started
from rollweave_sandbox.registry import Plain
from tests.support.sandboxes import ISOLATING, NAMES, REAL_APPTAINER, SPEC, left_of, opened, sh
from tests.support.variants import mostly_extended

WITHOUT_ZYGOTE = pytest.mark.parametrize(
    "backend", mostly_extended(NAMES, {"bubblewrap", "plain"}), indirect=True
)
"""A fork of the zygote differs in its start alone from what bubblewrap starts."""


@pytest_asyncio.fixture(params=[*NAMES, REAL_APPTAINER])
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    async with opened(request.param) as opened_backend:
        yield opened_backend


@pytest_asyncio.fixture(params=NAMES)
async def layered(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    """Return a back end whose sandboxes' writes are files that we can reach."""
    async with opened(request.param) as opened_backend:
        yield opened_backend


@pytest_asyncio.fixture(params=ISOLATING)
async def isolating(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    async with opened(request.param) as opened_backend:
        yield opened_backend


async def test_a_program_runs_and_its_result_is_complete(backend: Backend) -> None:
    sandbox = await backend.start(SPEC)
    result = await sandbox.exec(["sh", "-c", "cat; echo err >&2; exit 3"], stdin=b"in\0\xff")
    assert (result.rc, result.stdout, result.stderr) == (3, b"in\0\xff", b"err\n")
    assert (result.timed_out, result.truncated) == (False, False)
    await sandbox.stop()
    assert sandbox.ended == "stopped"


@pytest.mark.variants
async def test_files_round_trip_and_commands_see_them(backend: Backend) -> None:
    sandbox = await backend.start(SPEC)
    data = os.urandom(3 * MIB)
    home = (await sh(sandbox, "pwd")).strip()
    await sandbox.write(f"{home}/a", data, mode=0o700)
    assert await sandbox.read(f"{home}/a", limit=4 * MIB) == data
    assert (await sh(sandbox, "wc -c < a; stat -c %a a")).split() == [str(len(data)), "700"]
    with pytest.raises(SandboxError):
        await sandbox.read(f"{home}/a", limit=MIB)
    with pytest.raises(SandboxError):
        await sandbox.read(f"{home}/missing")


@pytest.mark.variants
async def test_files_of_any_size_arrive_in_parts(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "PART_BYTES", 1000)
    sandbox = await backend.start(SandboxSpec())
    for size in (999, 1000, 1001, 2000, 5500):
        data = os.urandom(size)
        await sandbox.write("big", data, mode=0o750)
        assert await sandbox.read("big", limit=size) == data
        with pytest.raises(SandboxRefusedError, match=f"path must have at most {size - 1} bytes"):
            await sandbox.read("big", limit=size - 1)
    await sandbox.exec(["mkdir", "folder"])
    with pytest.raises(SandboxRefusedError, match="path must be a regular file"):
        await sandbox.write("folder", bytes(1001))
    assert (await sh(sandbox, "stat -c %a big; ls -A")).split() == ["750", "big", "folder"]


@pytest.mark.extended
@pytest.mark.variants
async def test_data_beyond_the_limit_is_refused_and_the_sandbox_survives(layered: Backend) -> None:
    sandbox = await layered.start(SandboxSpec())
    big = bytes((64 << 20) + 1)
    await sandbox.write("big", big)
    assert await sandbox.read("big", limit=len(big)) == big
    await sandbox.exec(["rm", "big"])
    with pytest.raises(SandboxRefusedError, match=r"exec: body must have at most 67108864 bytes"):
        await sandbox.exec(["cat"], stdin=bytes((64 << 20) + 1))
    assert (await sandbox.exec(["ls"])).stdout == b""


@pytest.mark.variants
async def test_a_command_that_times_out_is_killed_and_the_sandbox_survives(
    backend: Backend,
) -> None:
    sandbox = await backend.start(SPEC)
    result = await sandbox.exec(["sh", "-c", "echo begun; sleep 100"], timeout_s=0.5)
    assert (result.timed_out, result.stdout) == (True, b"begun\n")
    assert (await sandbox.exec(["echo", "on"])).stdout == b"on\n"


@pytest.mark.variants
async def test_output_is_truncated_at_the_limit(backend: Backend) -> None:
    sandbox = await backend.start(SandboxSpec(limits=Limits(output_bytes=2048)))
    result = await sandbox.exec(["head", "-c", "1000000", "/dev/zero"])
    assert result.truncated
    assert 0 < len(result.stdout) <= 2 * 2048


async def test_only_given_environment_variables_are_passed_on(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "secret")
    sandbox = await backend.start(SandboxSpec(env={"GIVEN": "a b=c,d\n"}))
    source = "import os; print(repr(os.environ.get('GIVEN')), 'A_SECRET' in os.environ)"
    interpreter = "python3" if backend.name == "apptainer" else sys.executable
    result = await sandbox.exec([interpreter, "-c", source])
    assert result.stdout == b"'a b=c,d\\n' False\n"


async def test_sandboxes_do_not_see_each_others_files(backend: Backend) -> None:
    one, other = await asyncio.gather(backend.start(SPEC), backend.start(SPEC))
    await one.exec(["sh", "-c", "echo x > mine"])
    assert (await other.exec(["ls"])).stdout == b""


async def test_a_stop_sends_sigterm_before_sigkill(layered: Backend) -> None:
    sandbox = await layered.start(SPEC)
    loop = "trap 'echo bye > bye; exit 0' TERM; echo up > up; while :; do sleep 0.01; done"
    polite = asyncio.create_task(sh(sandbox, loop))
    await _up(sandbox)
    writes = os.dup(sandbox._handle.writes)  # type: ignore[attr-defined]
    await sandbox.stop(grace_s=60.0)
    await asyncio.gather(polite, return_exceptions=True)
    assert _read(writes, "home/agent/bye") == b"bye\n"
    with pytest.raises(SandboxLostError, match="stopped"):
        await sandbox.exec(["true"])


@WITHOUT_ZYGOTE
async def test_a_stop_kills_commands_that_ignore_sigterm(backend: Backend) -> None:
    sandbox = await backend.start(SPEC)
    loop = "trap '' TERM; echo up > up; while :; do sleep 0.01; done"
    deaf = asyncio.create_task(sh(sandbox, loop))
    await _up(sandbox)
    pid = sandbox.pid  # type: ignore[attr-defined]
    tree = _tree(pid)
    assert len(tree) >= 2
    await sandbox.stop(grace_s=0.1)
    assert Table.now().below(tree) == []
    with pytest.raises(SandboxLostError):
        await deaf


async def _up(sandbox: Sandbox) -> None:
    """Wait until a running command has written the file `up`."""
    assert await sh(sandbox, "until grep -s up up; do sleep 0.01; done") == "up\n"


def _read(folder: int, path: str) -> bytes:
    try:
        with open(os.open(path, os.O_RDONLY, dir_fd=folder), "rb") as file:
            return file.read()
    finally:
        os.close(folder)


def _tree(pid: int) -> dict[int, int]:
    return {line.pid: line.started for line in Table.now().below(started([pid]))}


async def test_a_kill_ends_pending_calls(backend: Backend) -> None:
    sandbox = await backend.start(SPEC)
    running = [asyncio.create_task(sandbox.exec(["sleep", "100"])) for _ in range(3)]
    await sandbox.exec(["true"])
    sandbox.kill()
    results = await asyncio.gather(*running, return_exceptions=True)
    assert [type(result) for result in results] == [SandboxLostError] * 3
    assert sandbox.ended == "killed"
    await sandbox.stop()


@pytest.mark.variants
async def test_a_killed_sandbox_runs_no_further_call(backend: Backend) -> None:
    sandbox = await backend.start(SandboxSpec())
    sandbox.kill()
    with pytest.raises(SandboxLostError, match="killed"):
        await sandbox.exec(["true"])


async def test_a_branch_begins_where_the_snapshot_was_taken(layered: Backend) -> None:
    first = await layered.start(SPEC)
    make = "echo 1 > a; echo 2 > b; mkdir -p d/e; echo 3 > d/e/f; ln -s a link"
    await sh(first, f"{make}; chmod 4755 b; mkfifo fifo")
    snapshot = await first.snapshot()
    await sh(first, "echo changed > a; rm -r d")
    one, two = await asyncio.gather(layered.branch(snapshot), layered.branch(snapshot))
    await sh(one, "rm a; echo one > b")
    seen = await sh(two, "cat a b d/e/f link; ls; stat -c %a b")
    assert seen.split() == ["1", "2", "3", "1", "a", "b", "d", "link", "755"]
    later = await layered.branch(await one.snapshot())
    assert (await sh(later, "ls; cat b d/e/f")).split() == ["b", "d", "link", "one", "3"]
    assert (await first.exec(["cat", "a"])).stdout == b"changed\n"


@WITHOUT_ZYGOTE
async def test_a_snapshot_of_selected_paths_has_nothing_else(backend: Backend) -> None:
    first = await backend.start(SPEC)
    script = (
        "mkdir -p d/e f; echo 1 > a; echo 2 > d/e/b; echo 3 > d/c; echo 4 > f/x; ln -s ../d/c "
        "d/in; ln -s /etc/passwd d/out"
    )
    await sh(first, f"{script}; chmod 0 d/c; ln -s d link; mkfifo d/fifo")
    snapshot = await first.snapshot(
        only=["a", "d/e", "d/in", "d/out", "d/fifo", "link/c", "missing"], at="/home/taken"
    )
    branch = await backend.branch(snapshot)
    listed = await sh(branch, "ls -A; cd ../taken; find . | sort; cat a d/e/b; readlink d/in")
    paths = [".", "./a", "./d", "./d/e", "./d/e/b", "./d/in"]
    assert listed.split() == [*paths, "1", "2", "../d/c"]
    full_branch = await backend.branch(await first.snapshot(only=["."], at="/home/taken"))
    seen = await sh(full_branch, "cat ../taken/f/x ../taken/d/c; ls; cat ../taken/d/out")
    assert seen == "4\n3\n"
    for only, at in (
        *((["../x"], "/taken"), (["/etc"], "/taken"), ([""], "/taken")),
        *((["a"], ""), (["a"], "taken"), ((), "/taken")),
    ):
        with pytest.raises(ValueError, match="must"):
            await first.snapshot(only=only, at=at)


@pytest.mark.variants
async def test_exceeding_wall_time_ends_a_sandbox_with_the_limit_as_reason(
    backend: Backend,
) -> None:
    sandbox = await backend.start(SandboxSpec(limits=Limits(wall_s=2.0)))
    with pytest.raises(SandboxLostError, match="wall_s"):
        await sandbox.exec(["sleep", "60"], timeout_s=60.0)


@pytest.mark.variants
@WITHOUT_ZYGOTE
async def test_exceeding_cpu_time_ends_a_sandbox_with_the_limit_as_reason(backend: Backend) -> None:
    sandbox = await backend.start(SandboxSpec(limits=Limits(cpu_s=1.5)))
    with pytest.raises(SandboxLostError, match="cpu_s"):
        await sh(sandbox, "for i in 1 2 3; do (while :; do :; done) & done; wait", timeout_s=90.0)


async def test_closing_the_back_end_ends_its_sandboxes_and_refuses_starts() -> None:
    async with opened("plain") as plain:
        sandbox = await plain.start(SPEC)
        running = asyncio.create_task(sandbox.exec(["sleep", "100"]))
        await sandbox.exec(["true"])
    with pytest.raises(SandboxLostError):
        await running


@WITHOUT_ZYGOTE
@pytest.mark.parametrize("end", ["kill", "stop"])
async def test_a_reply_of_a_sandbox_that_was_told_to_end_is_no_result(
    backend: Backend, end: str
) -> None:
    """The end may reach a program before the server that reports its result."""
    sandbox = await backend.start(SPEC)
    supervisor = backend._launcher._process  # type: ignore[attr-defined]
    supervisor.send_signal(signal.SIGSTOP)
    try:
        running = asyncio.create_task(sandbox.exec(["true"]))
        await asyncio.sleep(0)  # the call is sent
        ending = asyncio.create_task(sandbox.stop()) if end == "stop" else sandbox.kill()
        await asyncio.wait(sandbox.channel._calls.values())
    finally:
        supervisor.send_signal(signal.SIGCONT)
    with pytest.raises(SandboxLostError):
        await running
    if ending is not None:
        await ending


async def test_a_cancelled_start_leaves_no_process(backend: Backend) -> None:
    await (await backend.start(SPEC)).stop()
    for turns in range(0, 40, 4):
        starting = asyncio.create_task(backend.start(SPEC))
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        if not starting.cancelled():
            await starting.result().stop()


async def test_the_sandboxes_of_a_killed_supervisor_end(isolating: Backend) -> None:
    sandbox = await isolating.start(SPEC)
    pid = sandbox.pid  # type: ignore[attr-defined]
    tree = _tree(pid)
    isolating._launcher._process.send_signal(signal.SIGKILL)  # type: ignore[attr-defined]
    with pytest.raises(SandboxLostError):
        await sandbox.exec(["sleep", "100"])
    await asyncio.to_thread(_wait_for_the_end_of, tree)
    with pytest.raises(SandboxLostError):
        await isolating.start(SPEC)


def _wait_for_the_end_of(tree: dict[int, int]) -> None:
    while Table.now().below(tree):
        time.sleep(0.01)


async def test_the_uid_inside_is_as_specified(isolating: Backend) -> None:
    agent = await isolating.start(SandboxSpec(hostname="box-1"))
    root = await isolating.start(SandboxSpec(fakeroot=True))
    seen = await sh(agent, "id -u; hostname; pwd")
    assert seen.split() == ["1000", "box-1", "/home/agent"]
    seen = await sh(root, "id -u; chown 1000 . 2>/dev/null || echo no; touch /root/x && echo yes")
    assert seen.split()[0] == "0"


@pytest.mark.variants
async def test_a_missing_command_is_refused_and_the_sandbox_survives(backend: Backend) -> None:
    sandbox = await backend.start(SPEC)
    with pytest.raises(SandboxError):
        await sandbox.exec(["/no/such/program"])
    with pytest.raises(SandboxRefusedError):
        await sandbox.exec([])
    assert (await sandbox.exec(["echo", "on"])).stdout == b"on\n"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"image": "relative"}, "image must be"),
        ({"workdir": "/proc/x"}, "workdir must be"),
        ({"workdir": "/a/../b"}, "workdir must be"),
        ({"hostname": "no spaces"}, "hostname must be"),
        ({"env": {"a-b": ""}}, "env must have"),
        ({"limits": {"processes": 1}}, "limits.processes must be at least 4, got 1"),
        ({"limits": {"wall_s": 0.0}}, "limits.wall_s must be positive"),
    ],
)
def test_refuses_invalid_specifications(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        msgspec.convert(wrong, SandboxSpec)


async def test_cells_see_the_variables_of_their_own_sandbox(layered: Backend) -> None:
    """Also those which an interpreter reads once, where a zygote read its own."""
    pytest.importorskip("IPython")
    env = {"TZ": "ABC-9", "TMPDIR": "/tmp"}
    sandbox = await layered.start(SandboxSpec(env=env, packages=("ipython",)))
    cells = IPython(sandbox)
    cell = "import os, tempfile, time; (time.tzname[0], time.timezone, tempfile.gettempdir())"
    assert (await cells.run(cell)).result == "('ABC', -32400, '/tmp')"


@pytest.mark.variants
async def test_tools_work_inside(backend: Backend) -> None:
    sandbox = await backend.start(SPEC)
    bash, cells = Bash(sandbox), IPython(sandbox)
    await bash.run("mkdir -p d && cd d && x=3")
    assert (await bash.run("basename $PWD; echo $x")).output == "d\n3\n"
    await cells.run("value = 20")
    assert (await cells.run("value + 1")).result == "21"
    with pytest.raises(SandboxLostError):
        await asyncio.gather(cells.run("import time; time.sleep(60)"), sandbox.stop(grace_s=0.0))


def test_a_garbage_collected_back_end_leaves_no_folder() -> None:
    plain = Plain()
    folders = [plain._launcher._base, plain._launcher._snapshots]
    assert left_of(folders) == folders
    del plain
    gc.collect()
    assert left_of(folders) == []


@WITHOUT_ZYGOTE
async def test_sandboxes_on_the_hosts_network_have_separate_addresses(backend: Backend) -> None:
    """Two servers on the same port, found by their sandbox's name where there is an
    /etc/hosts of ours.
    """
    spec = SandboxSpec(network=True)
    server = (
        "import os, socket; s = socket.create_server((os.environ['LOOPBACK'], "
        "int(os.environ.get('AT', 0))))\n"
        "print(*s.getsockname(), socket.gethostbyname(socket.gethostname()), flush=True)\n"
        "input()"
    )
    one, two = await backend.start(spec), await backend.start(spec)
    listen = f'exec 3< <(exec python3 -c "{server}" < <(sleep 100)); read -u 3 line; echo $line'
    address, port, named = (await Bash(one).run(listen)).output.split()
    second = await Bash(two).run(f"export AT={port}; {listen}")
    other, same_port, _ = second.output.split()
    assert port == same_port
    assert address != other
    assert address.startswith("127.")
    assert backend.name == "plain" or named == address
    branch = await backend.branch(await one.snapshot())
    assert (await sh(branch, "echo $LOOPBACK")).strip() not in ("", address)
