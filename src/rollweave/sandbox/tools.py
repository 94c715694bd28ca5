"""The host's interface to the tools inside a sandbox: bash, IPython and an editor, with
typed results.

A sandbox is not trusted: a reply of an unexpected shape is a `SandboxError`. Texts are
UTF-8 with replacement characters for invalid bytes, and without terminal escapes; the
middle of long texts is left out and marked. Calls of one `Bash` or `IPython` wait for
each other; a cancelled call is interrupted inside. All of them raise the errors of
`Sandbox.call`. The tools follow ProRL Agent's efficient tools (§3.2.3): a raw terminal,
an interpreter in process, a Unix socket.
"""

import asyncio
import re
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from rollweave.sandbox.base import Reply, fields_of
from rollweave.schema.base import Struct
from rollweave.schema.text import valid

OUTPUT_BYTES = 30_000
"""Default maximum bytes of a command's output: about 10,000 tokens."""

TIMEOUT_S = 60.0
"""Default maximum seconds of a command or cell."""

BASH_SLACK_S = 20.0
"""Seconds that a reply may be later than the timeout. Starting the shell, waiting for
it, interrupting it and killing it have separate bounds.
"""

CELL_SLACK_S = 75.0
"""Seconds that an interpreter's reply may be later than the timeout: an interpreter
starts slowly from a cold disk.
"""

EDIT_S = 30.0
"""Maximum seconds of an editor's action, even with a slow disk."""

ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[PX^_][^\x1b]*\x1b\\|[ -/]*[0-~])"
)
"""Terminal escapes (ECMA-48): colors, movements, titles."""


class Caller(Protocol):
    """A sandbox, or a channel into one."""

    async def call(self, action: str, body: bytes = b"", *, timeout_s: float, **args: Any) -> Reply:
        """Call an action of its server, as `Sandbox.call` does. Raises SandboxError."""


class BashResult(Struct, frozen=True, kw_only=True):
    """The result of one command.

    `restarted` says that the shell's state was lost, before this command or by it.
    """

    output: str
    exit_code: int
    timed_out: bool
    restarted: bool
    dropped_bytes: int
    seconds: float


class CellError(Struct, frozen=True, kw_only=True):
    """The exception that ended a cell."""

    name: str
    message: str
    traceback: str


class CellResult(Struct, frozen=True, kw_only=True):
    """The result of one cell: its output, the last expression's value as text, and its
    exception.

    `died` is the exit status of the interpreter if the cell ended it. `restarted` says
    that names were lost, before this cell or by it.
    """

    output: str
    result: str | None
    error: CellError | None
    died: int | None
    timed_out: bool
    restarted: bool
    interpreter: Literal["ipython", "python"]
    dropped_bytes: int
    seconds: float


class Text(Struct, frozen=True, kw_only=True):
    """Numbered lines of a file with `lines` lines in all, or the names in a folder,
    with `lines` 0.
    """

    text: str
    lines: int


class _Output(msgspec.Struct):
    """The common fields of replies with output."""

    timed_out: bool
    restarted: bool
    dropped: int
    seconds: float
    split: int


F = TypeVar("F", bound=_Output)


class _Bash(_Output):
    rc: int


class _Cell(_Output):
    result: str | None
    error: CellError | None
    died: int | None
    interpreter: Literal["ipython", "python"]


class _Lines(msgspec.Struct):
    lines: int


class _Persistent:
    """A program that persists between calls, which wait for each other."""

    def __init__(self, sandbox: Caller) -> None:
        self._sandbox = sandbox
        self._turn = asyncio.Lock()

    async def _run(
        self, action: str, text: str, kind: type[F], *, timeout_s: float, slack_s: float, limit: int
    ) -> tuple[F, dict[str, Any]]:
        """Call an action. Return the fields of its reply, and the fields that all
        results have.
        """
        async with self._turn:
            reply = await self._sandbox.call(
                action,
                valid(text).encode(),
                timeout_s=timeout_s,
                slack_s=slack_s,
                output_limit=limit,
            )
        fields = fields_of(reply, kind)
        return fields, {
            "output": _joined(reply.body, fields),
            "timed_out": fields.timed_out,
            "restarted": fields.restarted,
            "dropped_bytes": fields.dropped,
            "seconds": fields.seconds,
        }


class Bash(_Persistent):
    """A shell that persists between commands, with its folder, variables, functions and
    background jobs.
    """

    async def run(
        self, command: str, *, timeout_s: float = TIMEOUT_S, output_bytes: int = OUTPUT_BYTES
    ) -> BashResult:
        """Run `command`, with an empty standard input.

        After `timeout_s` seconds it is interrupted, then killed.
        """
        fields, common = await self._run(
            "bash", command, _Bash, timeout_s=timeout_s, slack_s=BASH_SLACK_S, limit=output_bytes
        )
        return BashResult(exit_code=fields.rc, **common)


class IPython(_Persistent):
    """An interpreter that persists between cells: IPython if the sandbox has it, else
    plain Python.
    """

    async def run(
        self, cell: str, *, timeout_s: float = TIMEOUT_S, output_bytes: int = OUTPUT_BYTES
    ) -> CellResult:
        """Run `cell`, with an empty standard input.

        After `timeout_s` seconds it is interrupted, then killed.
        """
        fields, common = await self._run(
            "ipython", cell, _Cell, timeout_s=timeout_s, slack_s=CELL_SLACK_S, limit=output_bytes
        )
        error = fields.error
        if error is not None:
            error = CellError(
                name=error.name, message=plain(error.message), traceback=plain(error.traceback)
            )
        return CellResult(
            result=None if fields.result is None else plain(fields.result),
            error=error,
            died=fields.died,
            interpreter=fields.interpreter,
            **common,
        )


class Editor:
    """An editor of text files (UTF-8).

    An edit that breaks a rule raises SandboxRefusedError and leaves the file unchanged.
    """

    def __init__(self, sandbox: Caller) -> None:
        self._sandbox = sandbox

    async def view(self, path: str, *, first: int = 1, last: int | None = None) -> Text:
        """Return lines `first` to `last`, 1-based and inclusive, with their numbers.
        For a folder, return the names two levels deep.
        """
        return await self._text("view", path=path, first=first, last=last)

    async def create(self, path: str, text: str, *, overwrite: bool = False) -> None:
        """Create a file and missing folders. An existing file is refused unless
        `overwrite` is set.
        """
        await self._sandbox.call(
            "create", valid(text).encode(), timeout_s=EDIT_S, path=path, overwrite=overwrite
        )

    async def replace(self, path: str, old: str, new: str) -> Text:
        """Replace `old`, which must occur exactly once, by `new`.

        Returns the lines around the edit.
        """
        return await self._text("replace", path=path, old=old, new=new)

    async def insert(self, path: str, line: int, text: str) -> Text:
        """Insert `text` as separate lines after line `line`; 0 is before the first.

        Returns the lines around the edit.
        """
        return await self._text("insert", valid(text).encode(), path=path, line=line)

    async def undo(self, path: str) -> None:
        """Undo the last edit of the file, unless the file was changed by other means
        since. A file that the edit created is removed.
        """
        await self._sandbox.call("undo", timeout_s=EDIT_S, path=path)

    async def _text(self, action: str, body: bytes = b"", **args: Any) -> Text:
        reply = await self._sandbox.call(action, body, timeout_s=EDIT_S, **args)
        return Text(text=reply.body.decode(errors="replace"), lines=fields_of(reply, _Lines).lines)


def plain(text: str) -> str:
    """Return the text without terminal escapes, and with replacement characters for
    NULs.
    """
    return ESCAPES.sub("", text).replace("\0", "\ufffd")


def _joined(body: bytes, fields: _Output) -> str:
    if not fields.dropped:
        return plain(body.decode(errors="replace"))
    head, tail = (
        plain(part.decode(errors="replace"))
        for part in (body[: fields.split], body[fields.split :])
    )
    return f"{head}\n[... {fields.dropped} bytes left out ...]\n{tail}"
