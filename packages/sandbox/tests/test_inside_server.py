"""The action server, run by an isolated Python without site packages: programs, files,
hostile paths, excessive output and shutdown.
"""

import ast
import asyncio
import os
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from packages.sandbox.tests.action_server import BLIND, FOLDER, served, start, wait_for_end
from rollweave.sandbox.tools import Bash, IPython
from rollweave.schema import errors
from rollweave_sandbox.channel import Channel, Reply
from rollweave_sandbox.inside.frames import FrameDecoder, pack
from rollweave_sandbox.inside.server import CALLS


async def run(
    channel: Channel, *argv: str, body: bytes = b"", timeout_s: float = 60.0, **args: Any
) -> Reply:
    return await channel.call("exec", body, timeout_s=timeout_s, argv=list(argv), **args)


def streams(reply: Reply) -> tuple[bytes, bytes]:
    split = reply.header["split"]
    return reply.body[:split], reply.body[split:]


async def test_a_program_gets_its_input_folder_and_environment(tmp_path: Path) -> None:
    async with served() as channel:
        command = ("sh", "-c", 'cat; pwd; echo "$NAME" >&2; exit 3')
        given: dict[str, Any] = {"cwd": str(tmp_path), "env": {"NAME": "value"}}
        reply = await run(channel, *command, body=b"in\n", **given)
        assert streams(reply) == (f"in\n{tmp_path}\n".encode(), b"value\n")
        ended = [reply.header[name] for name in ("rc", "timed_out", "truncated")]
        assert ended == [3, False, False]


async def test_input_may_be_missing_or_unread() -> None:
    async with served() as channel:
        assert (await run(channel, "cat")).body == b""
        assert (await run(channel, "true", body=b"x" * (1 << 22))).header["rc"] == 0


async def test_concurrent_large_input_and_output() -> None:
    async with served() as channel:
        data = os.urandom(1 << 22)
        reply = await run(channel, "cat", body=data, output_limit=1 << 22)
        assert reply.body == data
        assert not reply.header["truncated"]


async def test_excessive_output_is_truncated_and_does_not_block_the_program() -> None:
    async with served() as channel:
        reply = await run(
            channel, "sh", "-c", "head -c 50000000 /dev/zero; echo end >&2", output_limit=100
        )
        assert streams(reply) == (b"\0" * 100, b"end\n")
        assert reply.header["truncated"]


async def test_a_program_that_times_out_is_killed_with_its_children() -> None:
    async with served() as channel:
        reply = await run(
            channel, "sh", "-c", "trap '' TERM INT; sleep 1000 & echo $!; sleep 1000", timeout_s=0.5
        )
        assert reply.header["timed_out"]
        assert reply.header["rc"] == -signal.SIGKILL
        await wait_for_end(int(reply.body))


async def test_a_grandchild_that_keeps_the_pipe_open_delays_nothing() -> None:
    async with served() as channel:
        reply = await run(channel, "sh", "-c", "sleep 1000 & echo $!", timeout_s=60.0)
        assert not reply.header["timed_out"]
        os.kill(int(reply.body), signal.SIGKILL)


TRUE = {"action": "exec", "argv": ["true"]}


@pytest.mark.parametrize(
    ("args", "rule"),
    [
        ({"action": "fly"}, "action must be one of"),
        ({"action": "exec"}, "argv must be a list of strings"),
        ({"action": "exec", "argv": []}, "argv must have at least a program"),
        ({"action": "exec", "argv": ["a\0b"]}, "argv must be a list of strings without NUL"),
        ({**TRUE, "env": {"a=b": "c"}}, "env must have names without '='"),
        ({**TRUE, "output_limit": -1}, "output_limit must be an integer from 0"),
        ({**TRUE, "timeout_s": -1.0}, "timeout_s must be a number from 0"),
        ({"action": "read"}, "path must be a string"),
        ({"action": "read", "path": "/dev/zero"}, "path must be a regular file, got a device"),
        ({"action": "read", "path": "/proc"}, "path must be a regular file, got a folder"),
        ({"action": "read", "path": sys.executable, "limit": 10}, "path must have at most 10 b"),
        ({"action": "write", "path": "/proc"}, "file, or nothing yet, got a folder"),
        ({"action": "write", "path": "x", "mode": "rw"}, "mode must be an integer"),
        ({"action": "bash", "output_limit": 1.5}, "output_limit must be an integer"),
    ],
)
async def test_refuses_invalid_calls(args: dict[str, Any], rule: str) -> None:
    async with served() as channel:
        with pytest.raises(errors.SandboxRefusedError, match=rule):
            await channel.call(**{"timeout_s": 20.0, **args})
        await channel.call("ping", timeout_s=20.0)


async def test_failures_give_a_reason(tmp_path: Path) -> None:
    async with served() as channel:
        for args in (
            {"action": "exec", "argv": ["/not/there"]},
            {"action": "read", "path": str(tmp_path / "not")},
            {"action": "view", "path": str(tmp_path / "not")},
        ):
            with pytest.raises(errors.SandboxError, match=r"No such file or directory: /"):
                await channel.call(timeout_s=20.0, **args)  # type: ignore[arg-type]


async def test_files_are_read_and_written_atomically(tmp_path: Path) -> None:
    async with served() as channel:
        path, data = tmp_path / "new" / "folder" / "file", os.urandom(1 << 20)
        await channel.call("write", data, timeout_s=20.0, path=str(path), mode=0o700)
        assert path.read_bytes() == data
        reply = await channel.call("read", timeout_s=20.0, path=str(path))
        assert (reply.body, reply.header["mode"]) == (data, 0o700)
        await channel.call("write", b"short", timeout_s=20.0, path=str(path))
        assert path.read_bytes() == b"short"
        assert path.stat().st_mode & 0o777 == 0o700
        assert os.listdir(path.parent) == ["file"]


async def test_a_file_without_a_size_is_read_and_an_endless_one_refused() -> None:
    async with served() as channel:
        assert b"Linux" in (await channel.call("read", timeout_s=20.0, path="/proc/version")).body


async def test_a_fifo_blocks_neither_reader_nor_writer(tmp_path: Path) -> None:
    path = str(tmp_path / "fifo")
    os.mkfifo(path)
    async with served() as channel:
        for action in ("read", "write", "view"):
            with pytest.raises(errors.SandboxRefusedError, match="got a FIFO"):
                await channel.call(action, timeout_s=20.0, path=path)


async def test_many_concurrent_calls() -> None:
    async with served() as channel:
        replies = await asyncio.gather(*(run(channel, "echo", str(number)) for number in range(40)))
        assert [int(reply.body) for reply in replies] == list(range(40))


async def test_refuses_calls_beyond_the_concurrency_limit(tmp_path: Path) -> None:
    fifo = tmp_path / "gate"
    os.mkfifo(fifo)
    async with served() as channel:
        waiting = [asyncio.create_task(run(channel, "cat", str(fifo))) for _ in range(CALLS)]
        more = await asyncio.gather(
            *(run(channel, "true") for _ in range(5)), return_exceptions=True
        )
        assert all(isinstance(error, errors.SandboxRefusedError) for error in more)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        while True:  # until they have ended inside: a refusal is at once
            try:
                assert (await run(channel, "echo", "room")).body == b"room\n"
                break
            except errors.SandboxRefusedError:
                continue


async def test_a_cancelled_program_is_killed(tmp_path: Path) -> None:
    fifo = tmp_path / "pid"
    os.mkfifo(fifo)
    async with served() as channel:
        task = asyncio.create_task(run(channel, "sh", "-c", f"echo $$ > {fifo}; exec sleep 1000"))
        pid = int(await asyncio.to_thread(fifo.read_text))
        task.cancel()
        await wait_for_end(pid)
        await channel.call("ping", timeout_s=20.0)


@pytest.mark.parametrize("how", ["closed", "garbage"])
async def test_its_programs_end_with_the_server(how: str, tmp_path: Path) -> None:
    fifo = tmp_path / "pid"
    os.mkfifo(fifo)
    process, own_end = start()
    with own_end:
        argv = ["sh", "-c", f"echo $$ > {fifo}; exec sleep 1000"]
        own_end.sendall(pack({"id": 1, "action": "exec", "argv": argv}))
        program = int(await asyncio.to_thread(fifo.read_text))
        own_end.sendall(
            pack({"id": 2, "action": "bash"}, f"sleep 1000 & echo $! > {fifo}; sleep 1000".encode())
        )
        job = int(await asyncio.to_thread(fifo.read_text))
        if how == "garbage":
            own_end.sendall(struct.pack("<II", 0xFFFFFFFF, 0))
        else:
            own_end.shutdown(socket.SHUT_WR)
        await wait_for_end(program)
        await wait_for_end(job)
    assert process.wait(20) == 0


async def test_a_server_that_is_killed_mid_call() -> None:
    process, own_end = start()
    channel = Channel(own_end)
    pid = (await channel.call("ping", timeout_s=20.0)).header["pid"]
    call = asyncio.create_task(
        channel.call("exec", timeout_s=60.0, argv=["cat", "/dev/zero"], output_limit=1)
    )
    await channel.call("ping", timeout_s=20.0)
    assert pid == process.pid
    process.kill()
    with pytest.raises(errors.SandboxLostError):
        await call
    process.wait()


async def test_the_same_id_twice_is_refused_while_it_runs() -> None:
    process, own_end = start()
    with own_end:
        own_end.settimeout(20)
        own_end.sendall(pack({"id": 1, "action": "exec", "argv": ["sleep", "1000"]}) * 2)
        decoder = FrameDecoder()
        while (frame := decoder.take()) is None:
            decoder.feed(own_end.recv(65536))
        assert (frame[0]["id"], frame[0]["kind"]) == (1, "refused")
    assert process.wait(20) == 0


async def test_a_late_reply_times_out_and_the_server_survives() -> None:
    async with served() as channel:
        with pytest.raises(errors.SandboxTimeoutError):
            await channel.call("exec", timeout_s=0.0, slack_s=0.0, argv=["sleep", "1000"])
        await channel.call("ping", timeout_s=20.0)


async def test_ends_are_detected_without_pidfd() -> None:
    async with served(code=BLIND) as channel:
        assert (await run(channel, "sh", "-c", "sleep 0.01; exit 3")).header["rc"] == 3
        assert (await run(channel, "sleep", "1000", timeout_s=0.2)).header["timed_out"]
        bash, cells = Bash(channel), IPython(channel)
        assert (await bash.run("echo a")).output == "a\n"
        assert (await bash.run("kill -9 $$")).exit_code == 137
        assert (await bash.run("sleep 1000", timeout_s=0.2)).timed_out
        assert (await cells.run("import os; os._exit(3)")).died == 3
        assert (await cells.run("1 + 1")).result == "2"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: str(path.name))
def test_uses_python_3_9_and_its_standard_library_alone(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text, feature_version=(3, 9))
    assert "Python 3.9" in (ast.get_docstring(tree) or "")
    allowed = {"IPython", "traitlets"} if path.name == "worker.py" else set[str]()
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        for name in names:
            assert name.split(".")[0] in sys.stdlib_module_names | allowed
