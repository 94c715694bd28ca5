"""Built-in tools: a shell, an interpreter and an editor in a sandbox; a thought; the
submission of the work.

Invariants: an answer is at most about `output_bytes` long, and says how much is left
out; an action that fails in an intact sandbox (no such file, a full disk) is an answer;
if the sandbox is lost or silent, `SandboxError` is raised.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from rollweave.envs.handlers.base import Tool
from rollweave.envs.handlers.tools import Final
from rollweave.sandbox.base import Sandbox
from rollweave.sandbox.provider import provider
from rollweave.sandbox.tools import (
    OUTPUT_BYTES,
    TIMEOUT_S,
    Bash,
    BashResult,
    CellResult,
    Editor,
    IPython,
    Text,
)
from rollweave.schema.errors import (
    ConfigError,
    SandboxError,
    SandboxLostError,
    SandboxRefusedError,
    SandboxTimeoutError,
)

SUBMITTED = "Submitted."

EDITOR = "str_replace_editor"


Arguments = dict[str, Any]


def toolbox(
    sandbox: Sandbox,
    names: Iterable[str],
    *,
    timeout_s: float = TIMEOUT_S,
    output_bytes: int = OUTPUT_BYTES,
) -> list[Tool]:
    """Return the tools with these names (`check_tools`), in the order of the names.
    `timeout_s` limits a command or cell.
    """
    return [MAKERS[name](sandbox, timeout_s, output_bytes) for name in names]


def packages_of(names: Iterable[str]) -> tuple[str, ...]:
    """Return the installed packages that a sandbox needs for the tools with these
    names. If IPython is not installed, cells are plain Python.
    """
    return provider().installed("ipython") if "ipython" in names else ()


def check_tools(names: Iterable[str], calls: str) -> None:
    """Raise ConfigError for options of a handler that name unknown tools, or tools that
    cannot be called in this style.
    """
    if calls not in ("native", "text"):
        raise ConfigError(f"options.calls must be native or text, got {calls!r}")
    for name in names:
        if name not in MAKERS:
            raise ConfigError(f"options.tools must be some of {', '.join(MAKERS)}, got {name!r}")
        if name == EDITOR and calls == "text":
            raise ConfigError(
                f"options.tools must not have {name} where calls = 'text': it takes "
                "more than one text"
            )


def check_positive(**options: float) -> None:
    """Raise ConfigError for an option that is not positive and finite."""
    for name, value in options.items():
        if not 0 < value < float("inf"):
            raise ConfigError(f"options.{name} must be positive and finite, got {value}")


def _bash(sandbox: Sandbox, timeout_s: float, output_bytes: int) -> Tool:
    shell = Bash(sandbox)

    async def call(arguments: Arguments) -> str:
        return _command_output(
            await shell.run(arguments["command"], timeout_s=timeout_s, output_bytes=output_bytes)
        )

    about = (
        "Run a command in a shell that stays from call to call. Standard input is empty; it has "
        f"{timeout_s:g} seconds."
    )
    return _tool("bash", about, {"command": _string("What to run.")}, call)


def _ipython(sandbox: Sandbox, timeout_s: float, output_bytes: int) -> Tool:
    interpreter = IPython(sandbox)

    async def call(arguments: Arguments) -> str:
        return clipped(
            _cell_output(
                await interpreter.run(
                    arguments["code"], timeout_s=timeout_s, output_bytes=output_bytes
                )
            ),
            output_bytes,
        )

    about = (
        f"Run Python code in an interpreter that stays from call to call. It has {timeout_s:g} "
        "seconds."
    )
    return _tool("ipython", about, {"code": _string("A cell.")}, call)


def _editor(sandbox: Sandbox, _: float, output_bytes: int) -> Tool:
    editor = Editor(sandbox)

    async def call(arguments: Arguments) -> str:
        missing = [name for name in NEEDS[arguments["command"]] if name not in arguments]
        if missing:
            return f"{arguments['command']} needs {' and '.join(missing)}."
        return clipped(await _edit(editor, arguments), output_bytes)

    about = (
        "View and edit text files. view: numbered lines of a file, or the names in a folder. "
        "create: a new file. str_replace: old_str, which must be in the file exactly once, becomes "
        "new_str. insert: new_str becomes lines after insert_line. undo_edit: take back the last "
        "edit of the file."
    )
    fields = {
        "command": {"type": "string", "enum": list(NEEDS)},
        "path": _string("Absolute, or from the project's folder."),
        "file_text": _string("Of create."),
        "old_str": _string("Of str_replace."),
        "new_str": _string("Of str_replace and insert."),
        "insert_line": {
            "type": "integer",
            "minimum": 0,
            "description": "Of insert; 0 is before the first line.",
        },
        "view_range": {
            "type": "array",
            "items": {"type": "integer", "minimum": -1},
            "minItems": 2,
            "maxItems": 2,
            "description": "First and last line; -1 is the end.",
        },
    }
    return _tool(EDITOR, about, fields, call, required=("command", "path"))


NEEDS: dict[str, tuple[str, ...]] = {
    "view": (),
    "create": ("file_text",),
    "str_replace": ("old_str", "new_str"),
    "insert": ("insert_line", "new_str"),
    "undo_edit": (),
}
"""Commands of the editor, and the arguments that each needs in addition to a path."""


async def _edit(editor: Editor, arguments: Arguments) -> str:
    path = arguments["path"]
    match arguments["command"]:
        case "view":
            first, last = map(int, arguments.get("view_range", (1, 0)))
            return (
                await editor.view(path, first=max(1, first), last=last if last > 0 else None)
            ).text or "(empty)"
        case "create":
            await editor.create(path, arguments["file_text"])
            return f"Created {path}."
        case "str_replace":
            return _edited(await editor.replace(path, arguments["old_str"], arguments["new_str"]))
        case "insert":
            return _edited(
                await editor.insert(path, int(arguments["insert_line"]), arguments["new_str"])
            )
        case _:
            await editor.undo(path)
            return f"The last edit of {path} is undone."


def _think(*_: object) -> Tool:
    async def call(arguments: Arguments) -> str:
        return "Noted."

    about = "Write down a thought. Nothing happens."
    return _tool("think", about, {"thought": _string("The thought.")}, call)


def _submit(*_: object) -> Tool:
    async def call(arguments: Arguments) -> str:
        return Final(SUBMITTED)

    return _tool("submit", "The work is done: hand it in.", {}, call)


MAKERS: dict[str, Callable[[Sandbox, float, int], Tool]] = {
    "bash": _bash,
    "ipython": _ipython,
    EDITOR: _editor,
    "think": _think,
    "submit": _submit,
}


def clipped(text: str, output_bytes: int) -> str:
    """Return the text, or its head and its tail if it is longer than `output_bytes`."""
    data = text.encode(errors="replace")
    if len(data) <= output_bytes:
        return text
    half = output_bytes // 2
    head, tail = data[:half].decode(errors="ignore"), data[-half:].decode(errors="ignore")
    return f"{head}\n[... {len(data) - 2 * half} bytes left out ...]\n{tail}"


def _command_output(result: BashResult) -> str:
    notes = [f"exit status {result.exit_code}"] if result.exit_code else []
    notes += ["out of time"] if result.timed_out else []
    notes += ["the shell was restarted"] if result.restarted else []
    return _noted(result.output, notes)


def _cell_output(cell: CellResult) -> str:
    parts = [
        cell.output.rstrip("\n"),
        cell.result or "",
        cell.error.traceback if cell.error else "",
    ]
    notes = ["out of time"] if cell.timed_out else []
    notes += [f"the interpreter ended with status {cell.died}"] if cell.died is not None else []
    notes += ["the interpreter was restarted"] if cell.restarted else []
    return _noted("\n".join(part for part in parts if part), notes)


def _noted(output: str, notes: list[str]) -> str:
    lines = [output.rstrip("\n")] if output.strip() else []
    lines += [f"[{'; '.join(notes)}]"] if notes else []
    return "\n".join(lines) or "(no output)"


def _edited(excerpt: Text) -> str:
    return f"Edited. The lines around:\n{excerpt.text}"


def _tool(
    name: str,
    about: str,
    fields: Mapping[str, Any],
    call: Callable[[Arguments], Awaitable[str]],
    *,
    required: Iterable[str] | None = None,
) -> Tool:
    """Return a tool that reports failures in an intact sandbox. Without `required`, all
    fields are required.
    """

    async def reporting(arguments: Arguments) -> str:
        try:
            return await call(arguments)
        except (SandboxLostError, SandboxTimeoutError, SandboxRefusedError):
            raise
        except SandboxError as error:
            return f"Failed: {error}"

    schema = {
        "type": "object",
        "properties": dict(fields),
        "required": list(fields if required is None else required),
        "additionalProperties": False,
    }
    return Tool(name=name, description=about, parameters=schema, call=reporting)


def _string(about: str) -> dict[str, str]:
    return {"type": "string", "description": about}
