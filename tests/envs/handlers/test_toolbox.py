"""The built-in tools, in real sandboxes, called by a scripted agent."""

import contextlib
import os
import signal
from typing import Any

import pytest

from rollweave.envs.handlers.sandboxes import Sandboxes
from rollweave.envs.handlers.toolbox import check_tools, clipped, toolbox
from rollweave.envs.handlers.tools import converse
from rollweave.sandbox.base import SandboxSpec
from rollweave.schema.chat import Message
from rollweave.schema.errors import ConfigError, SandboxLostError
from tests.envs.handlers.agents import Scripted, calls, sandboxes

ASK = [Message(role="user", content="Go.")]
EDITOR = "str_replace_editor"


async def answers(
    boxes: Sandboxes, *calls_made: tuple[str, Any], output_bytes: int = 2000, timeout_s: float = 20
) -> list[str]:
    """Return the tools' answers to these calls, in one sandbox."""
    sandbox = await boxes.start(SandboxSpec(workdir="/project"))
    try:
        tools = toolbox(
            sandbox,
            ["bash", "ipython", EDITOR, "think", "submit"],
            output_bytes=output_bytes,
            timeout_s=timeout_s,
        )
        messages = await converse(
            Scripted([*(calls(call) for call in calls_made), "End."]), ASK, tools
        )
    finally:
        await sandbox.stop(0)
    return [message.content for message in messages if message.role == "tool"]


async def test_shell_and_interpreter_keep_state_and_report_errors() -> None:
    async with sandboxes() as boxes:
        replies = await answers(
            boxes,
            ("bash", {"command": "cd /tmp; X=3"}),
            ("bash", {"command": "pwd; echo $X; false"}),
            ("bash", {"command": "exit 3"}),
            ("ipython", {"code": "a = 20"}),
            ("ipython", {"code": "print('b'); a + 1"}),
            ("ipython", {"code": "1 / 0"}),
            ("ipython", {"code": "import os; os._exit(5)"}),
            ("think", {"thought": "hm"}),
            ("submit", {}),
        )
    assert replies[0] == "(no output)"
    assert replies[1] == "/tmp\n3\n[exit status 1]"
    assert replies[2] == "exit\n[exit status 3; the shell was restarted]"
    assert replies[3:5] == ["(no output)", "b\n21"]
    assert "ZeroDivisionError" in replies[5]
    assert "ended with status 5" in replies[6]
    assert replies[7:] == ["Noted.", "Submitted."]


async def test_the_editor_edits_and_reports_failures() -> None:
    async with sandboxes() as boxes:
        replies = await answers(
            boxes,
            (EDITOR, {"command": "create", "path": "a/b.txt", "file_text": "one\ntwo\nthree\n"}),
            (
                EDITOR,
                {"command": "str_replace", "path": "a/b.txt", "old_str": "two", "new_str": "2"},
            ),
            (EDITOR, {"command": "insert", "path": "a/b.txt", "insert_line": 0, "new_str": "zero"}),
            (EDITOR, {"command": "view", "path": "/project/a/b.txt", "view_range": [2, -1]}),
            (EDITOR, {"command": "undo_edit", "path": "a/b.txt"}),
            ("bash", {"command": "cat a/b.txt"}),
            (EDITOR, {"command": "view", "path": "a"}),
            (EDITOR, {"command": "create", "path": "a/b.txt", "file_text": ""}),
            (EDITOR, {"command": "view", "path": "no/such"}),
            (EDITOR, {"command": "view", "path": "nul\0"}),
            (EDITOR, {"command": "insert", "path": "a/b.txt", "new_str": "x"}),
            (EDITOR, {"command": "delete", "path": "a/b.txt"}),
            ("bash", {"command": "nul\0"}),
        )
    assert replies[0] == "Created a/b.txt."
    assert "     2\t2\n" in replies[1]
    assert "     1\tzero\n" in replies[2]
    assert replies[3] == "     2\tone\n     3\t2\n     4\tthree\n"
    assert replies[5] == "one\n2\nthree"
    assert replies[6] == "b.txt\n"
    assert replies[7].startswith("Refused: path must not exist yet")
    assert replies[8] == "Failed: No such file or directory: no/such"
    assert replies[9].startswith("Refused: ")
    assert replies[10] == "insert needs insert_line."
    assert "'delete' is not one of" in replies[11]
    assert replies[12].startswith("Refused: ")


async def test_clips_long_output() -> None:
    longs: list[tuple[str, Any]] = [
        ("bash", {"command": "head -c 5000000 /dev/zero | tr '\\0' x"}),
        ("ipython", {"code": "print('x' * 5_000_000)"}),
        ("ipython", {"code": "'x' * 5_000_000"}),
        ("ipython", {"code": "raise ValueError('x' * 5_000_000)"}),
        (EDITOR, {"command": "view", "path": "/project/long"}),
    ]
    write = ("bash", {"command": "head -c 5000000 /dev/zero | tr '\\0' x > long"})
    async with sandboxes() as boxes:
        _, *replies = await answers(boxes, write, *longs)
    assert len(replies) == len(longs)
    for call, reply in zip(longs, replies, strict=True):
        assert len(reply) < 2200, call
        assert "left out" in reply or "more line" in reply, call


async def test_reports_timeouts() -> None:
    async with sandboxes() as boxes:
        replies = await answers(boxes, ("bash", {"command": "echo a; sleep 100"}), timeout_s=0.5)
    assert replies[0].startswith("a\n[")
    assert "out of time" in replies[0]


async def test_a_lost_sandbox_raises() -> None:
    async with sandboxes() as boxes:
        sandbox = await boxes.start(SandboxSpec())
        tools = toolbox(sandbox, ["bash"])

        def speak(messages: Any) -> Message:
            with contextlib.suppress(ProcessLookupError):  # what is inside may live longer
                os.kill(sandbox.pid, signal.SIGKILL)  # type: ignore[attr-defined]
            return calls(("bash", {"command": "echo"}))

        with pytest.raises(SandboxLostError):
            await converse(Scripted(speak), ASK, tools)


def test_refuses_unknown_tools_and_call_styles() -> None:
    check_tools(["bash", EDITOR], "native")
    with pytest.raises(ConfigError, match=r"options\.tools must be some of bash"):
        check_tools(["bash", "browser"], "native")
    with pytest.raises(ConfigError, match=r"must not have str_replace_editor where calls = 'text'"):
        check_tools(["bash", EDITOR], "text")


def test_clipped_keeps_head_and_tail_of_any_text() -> None:
    assert clipped("abc", 3) == "abc"
    assert clipped("abcdef", 4) == "ab\n[... 2 bytes left out ...]\nef"
    assert clipped("é" * 10, 6) == "é\n[... 14 bytes left out ...]\né"
