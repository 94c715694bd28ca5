"""The tools inside a sandbox as the host sees them: bash, IPython and an editor, with
typed results.

Nothing that a sandbox sends is trusted: a reply of another shape is a `SandboxError`.
Texts are UTF-8 with replacement characters where bytes are none, and without terminal
escapes; beyond a bound their middle is left out, which they say. Calls of one `Bash` or
`IPython` wait for each other; a cancelled call is interrupted inside. All of them raise
the errors of `Channel.call`. After ProRL Agent's efficient tools (§3.2.3): a raw
terminal, an interpreter in process, a Unix socket.
"""

import asyncio
import re
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from rollweave.sandbox.channel import Reply
from rollweave.schema.base import Struct
from rollweave.schema.errors import SandboxSpoiledError
from rollweave.schema.text import valid

OUTPUT_BYTES = 30_000
"""Of a command's output: about 10,000 tokens."""

TIMEOUT_S = 60.0
"""Of a command or cell."""

BASH_SLACK_S = 20.0
"""A reply may come that much after the time-out: the shell starts, is waited for,
interrupted, killed, each with its bound.
"""

CELL_SLACK_S = 75.0
"""The same of an interpreter, which starts slowly from a cold disk."""

EDIT_S = 30.0
"""For a file: a slow disk."""

ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ "
    r"-/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[PX^_][^\x1b]*\x1b\\|[ -/]*[0-~])"
)
"""Of terminals (ECMA-48): colours, movements, titles."""

T = TypeVar("T")


class Caller(Protocol):
    """A sandbox, or a channel into one."""

    async def call(self, action: str, body: bytes = b"", *, timeout_s: float, **args: Any) -> Reply:
        """An action of its server, as `Channel.call`. Raises SandboxError."""


class BashResult(Struct, frozen=True, kw_only=True):
    """Of one command.

    `restarted`: what the shell had in memory is lost, before this command or by it.
    """

    output: str
    exit_code: int
    timed_out: bool
    restarted: bool
    dropped_bytes: int
    seconds: float


class CellError(Struct, frozen=True, kw_only=True):
    """An exception that a cell ended with."""

    name: str
    message: str
    traceback: str


class CellResult(Struct, frozen=True, kw_only=True):
    """Of one cell: what it printed or displayed, the last expression's value as text,
    its exception.

    `died`: the exit status of the interpreter, if the cell ended it. `restarted`: names
    are lost, before this cell or by it.
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
    """Numbered lines of a file, of `lines` in all; or the names in a folder, with
    `lines` 0.
    """

    text: str
    lines: int


class _Output(msgspec.Struct):
    """What replies with output have in common, as it is sent."""

    timed_out: bool
    restarted: bool
    dropped: int
    seconds: float
    split: int


class _Bash(_Output):
    rc: int


class _Cell(_Output):
    result: str | None
    error: CellError | None
    died: int | None
    interpreter: Literal["ipython", "python"]


class _Lines(msgspec.Struct):
    lines: int


class Bash:
    """A shell that lives from command to command: its folder, variables, functions and
    background jobs stay.
    """

    def __init__(self, sandbox: Caller) -> None:
        self._sandbox = sandbox
        self._turn = asyncio.Lock()

    async def run(
        self, command: str, *, timeout_s: float = TIMEOUT_S, output_bytes: int = OUTPUT_BYTES
    ) -> BashResult:
        """Run `command`, with an empty standard input.

        After `timeout_s` seconds it is interrupted, then killed.
        """
        async with self._turn:
            reply = await self._sandbox.call(
                "bash",
                valid(command).encode(),
                timeout_s=timeout_s,
                slack_s=BASH_SLACK_S,
                output_limit=output_bytes,
            )
        found = _converted(reply, _Bash)
        return BashResult(
            output=_joined(reply.body, found),
            exit_code=found.rc,
            timed_out=found.timed_out,
            restarted=found.restarted,
            dropped_bytes=found.dropped,
            seconds=found.seconds,
        )


class IPython:
    """An interpreter that lives from cell to cell: IPython where the sandbox has it,
    plain Python elsewhere.
    """

    def __init__(self, sandbox: Caller) -> None:
        self._sandbox = sandbox
        self._turn = asyncio.Lock()

    async def run(
        self, cell: str, *, timeout_s: float = TIMEOUT_S, output_bytes: int = OUTPUT_BYTES
    ) -> CellResult:
        """Run `cell`, with an empty standard input.

        After `timeout_s` seconds it is interrupted, then killed.
        """
        async with self._turn:
            reply = await self._sandbox.call(
                "ipython",
                valid(cell).encode(),
                timeout_s=timeout_s,
                slack_s=CELL_SLACK_S,
                output_limit=output_bytes,
            )
        found = _converted(reply, _Cell)
        error = found.error
        if error is not None:
            error = CellError(
                name=error.name, message=plain(error.message), traceback=plain(error.traceback)
            )
        return CellResult(
            output=_joined(reply.body, found),
            result=None if found.result is None else plain(found.result),
            error=error,
            died=found.died,
            timed_out=found.timed_out,
            restarted=found.restarted,
            interpreter=found.interpreter,
            dropped_bytes=found.dropped,
            seconds=found.seconds,
        )


class Editor:
    """Text files (UTF-8).

    What breaks a rule raises SandboxRefusedError, and the file is as it was.
    """

    def __init__(self, sandbox: Caller) -> None:
        self._sandbox = sandbox

    async def view(self, path: str, *, first: int = 1, last: int | None = None) -> Text:
        """Lines `first` to `last`, 1-based and inclusive, with their numbers; of a
        folder, the names two levels deep.
        """
        return await self._text("view", path=path, first=first, last=last)

    async def create(self, path: str, text: str, *, overwrite: bool = False) -> None:
        """A new file; refused where one is, unless `overwrite`.

        Its folders are made.
        """
        await self._sandbox.call(
            "create", valid(text).encode(), timeout_s=EDIT_S, path=path, overwrite=overwrite
        )

    async def replace(self, path: str, old: str, new: str) -> Text:
        """`old`, which must be in the file exactly once, becomes `new`.

        The lines around.
        """
        return await self._text("replace", path=path, old=old, new=new)

    async def insert(self, path: str, line: int, text: str) -> Text:
        """`text` becomes lines of their own after line `line`; 0 is before the first.

        The lines around.
        """
        return await self._text("insert", valid(text).encode(), path=path, line=line)

    async def undo(self, path: str) -> None:
        """Take back the last edit of the file, unless it was changed otherwise since; a
        file that it created is removed.
        """
        await self._sandbox.call("undo", timeout_s=EDIT_S, path=path)

    async def _text(self, action: str, body: bytes = b"", **args: Any) -> Text:
        reply = await self._sandbox.call(action, body, timeout_s=EDIT_S, **args)
        return Text(text=reply.body.decode(errors="replace"), lines=_converted(reply, _Lines).lines)


def plain(text: str) -> str:
    """Without terminal escapes, and with replacement characters for NULs, which no text
    has.
    """
    return ESCAPES.sub("", text).replace("\0", "\ufffd")


def _converted(reply: Reply, kind: type[T]) -> T:
    try:
        return msgspec.convert(reply.header, kind)
    except msgspec.ValidationError as error:
        raise SandboxSpoiledError(f"the sandbox sent a reply of another shape: {error}") from error


def _joined(body: bytes, found: _Output) -> str:
    if not found.dropped:
        return plain(body.decode(errors="replace"))
    head, tail = (
        plain(part.decode(errors="replace")) for part in (body[: found.split], body[found.split :])
    )
    return f"{head}\n[... {found.dropped} bytes left out ...]\n{tail}"
