"""Inside a sandbox: runs probes, each in a separate process, and prints their notes.
Python 3.9, standard library only.

The input is JSON, `{"root": folder, "sources": {module: source}, "tests":
["module.Class.method", ...], "seconds": for each}`, and the output is `{test: [note,
...]}`. A probe is a test without its expected values (`probes.py`):
nothing here can decide whether a test passes.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import select
import signal
import sys
import tempfile
import time
from types import CodeType
from typing import Any

NOTES_BYTES = 1 << 18
"""Maximum bytes of one test's notes: longer ones are cut, and are then invalid JSON."""

END = "end"
"""The last note of a test that ran to its end."""


class Probe:
    """Takes the place of a test case: notes values, instead of comparing them with the
    expected ones.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []

    def setUp(self) -> None:
        """Run before each test."""

    def note(self, value: object) -> None:
        self.notes.append(describe(value))

    def raised(self) -> Raised:
        return Raised(self.notes)


class Raised:
    """Notes the exception that is raised inside."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self.notes.append("raised " + (kind.__name__ if kind else "nothing"))
        return True


def describe(value: object) -> str:
    """Return equal texts for equal values of plain types, independent of the order of
    sets and dictionaries. For other values, return only the type.
    """
    if isinstance(value, int):
        return repr(bool(value)) if value is True or value is False else int.__repr__(value)
    if isinstance(value, float):
        is_whole = value.is_integer()
        return int.__repr__(int(value)) if is_whole else float.__repr__(value)
    if isinstance(value, str):
        return str.__repr__(value)
    if isinstance(value, bytes):
        return bytes.__repr__(value)
    if isinstance(value, (list, tuple)):
        inside = ", ".join(describe(part) for part in value)
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(
                sorted(f"{describe(key)}: {describe(part)}" for key, part in dict.items(value))
            )
            + "}"
        )
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(describe(part) for part in value)) + "}"
    return "None" if value is None else f"<{type(value).__name__}>"


def child(codes: dict[str, CodeType], test: str, root: str, out: int) -> None:
    """Run one test and write its notes. Does not return."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.chdir(tempfile.mkdtemp())
    sys.path.insert(0, root)
    sys.dont_write_bytecode = True
    module, kind, method = test.split(".")
    notes: list[str] = []
    try:
        space: dict[str, Any] = {"__name__": module, "Probe": Probe}
        exec(codes[module], space)
        case = space[kind]()
        notes = case.notes
        case.setUp()
        result = getattr(case, method)()
        if inspect.iscoroutine(result):
            asyncio.run(result)
        notes.append(END)
    except BaseException as error:
        notes.append("failed " + type(error).__name__)
    os.write(out, json.dumps(notes).encode()[:NOTES_BYTES])
    os._exit(0)


def run(codes: dict[str, CodeType], test: str, root: str, seconds: float) -> object:
    """Return one test's notes; none if it does not write them in time."""
    end = time.monotonic() + seconds
    source, out = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.setsid()
            os.close(source)
            child(codes, test, root, out)
        finally:
            os._exit(1)
    os.close(out)
    data = b""
    while len(data) <= NOTES_BYTES and time.monotonic() < end:
        # Asked first: what an ended process has written is then in the pipe, which a
        # process that the test started may still hold open.
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        if select.select([source], [], [], 0 if ended else 0.02)[0]:
            part = os.read(source, 1 << 16)
            if not part:
                break
            data += part
        elif ended:
            break
    os.close(source)
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    try:
        return json.loads(data)
    except ValueError:
        return []


def main() -> None:
    job = json.loads(sys.stdin.read())
    codes = {module: compile(source, module, "exec") for module, source in job["sources"].items()}
    notes = {}
    for test in job["tests"]:
        notes[test] = run(codes, test, job["root"], job["seconds"])
    sys.stdout.write(json.dumps(notes))


if __name__ == "__main__":
    main()
