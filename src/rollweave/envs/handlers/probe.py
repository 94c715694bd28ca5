"""Inside a sandbox: runs probes, each in a process of its own, and prints what they
saw. Python 3.9, stdlib alone.

In comes JSON, `{"root": folder, "sources": {module: source}, "tests":
["module.Class.method", ...], "seconds": of each}`, and out goes `{test: [what it saw,
...]}`. A probe is a test without what it expects (`envs/handlers/probes.py`): nothing
here can tell whether a test passes.
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

SEEN_BYTES = 1 << 18
"""Of what one test saw: more is cut, and then is no JSON."""

END = "end"
"""Seen last by a test that came to its end."""


class Probe:
    """Stands for a test case: notes values, instead of comparing them with what they
    should be.
    """

    def __init__(self) -> None:
        self.seen: list[str] = []

    def setUp(self) -> None:
        """Before each test."""

    def saw(self, value: object) -> None:
        self.seen.append(told(value))

    def raised(self) -> Raised:
        return Raised(self.seen)


class Raised:
    """Notes what is raised inside."""

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self.seen.append("raised " + (kind.__name__ if kind else "nothing"))
        return True


def told(value: object) -> str:
    """Equal texts for equal values of plain kinds, in whatever order sets and
    dictionaries are. Of others, the kind alone.
    """
    if isinstance(value, int):
        return repr(bool(value)) if value is True or value is False else int.__repr__(value)
    if isinstance(value, float):
        whole = value.is_integer()
        return int.__repr__(int(value)) if whole else float.__repr__(value)
    if isinstance(value, str):
        return str.__repr__(value)
    if isinstance(value, bytes):
        return bytes.__repr__(value)
    if isinstance(value, (list, tuple)):
        inside = ", ".join(told(part) for part in value)
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(sorted(f"{told(key)}: {told(part)}" for key, part in dict.items(value)))
            + "}"
        )
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(told(part) for part in value)) + "}"
    return "None" if value is None else f"<{type(value).__name__}>"


def child(codes: dict[str, CodeType], test: str, root: str, out: int) -> None:
    """Run one test and write what it saw. Does not return."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.chdir(tempfile.mkdtemp())
    sys.path.insert(0, root)
    sys.dont_write_bytecode = True
    module, kind, method = test.split(".")
    seen: list[str] = []
    try:
        space: dict[str, Any] = {"__name__": module, "Probe": Probe}
        exec(codes[module], space)
        case = space[kind]()
        seen = case.seen
        case.setUp()
        result = getattr(case, method)()
        if inspect.iscoroutine(result):
            asyncio.run(result)
        seen.append(END)
    except BaseException as error:
        seen.append("failed " + type(error).__name__)
    os.write(out, json.dumps(seen).encode()[:SEEN_BYTES])
    os._exit(0)


def run(codes: dict[str, CodeType], test: str, root: str, seconds: float) -> object:
    """What one test saw, or nothing where it does not say in time."""
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
    data, alive = b"", True
    while alive and len(data) <= SEEN_BYTES and time.monotonic() < end:
        if select.select([source], [], [], 0.02)[0]:
            part = os.read(source, 1 << 16)
            data += part
            alive = bool(part)
        else:  # a process that it left behind may hold the pipe
            alive = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
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
    found = {}
    for test in job["tests"]:
        found[test] = run(codes, test, job["root"], job["seconds"])
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
