"""The process that runs the agent's cells, one after another, with IPython if it can be
imported. Needs Python 3.9 and its standard library alone.

It receives a cell as a frame and answers with `result` and `error` (see `cells`).
Invariants: every cell that returns is answered once; an interrupt is raised in the
agent's code or not at all; texts in an answer are bounded.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import linecache
import os
import signal
import socket
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

from .frames import FrameDecoder, pack

TEXT_CHARS = 100_000
"""Maximum number of characters of a result, a message or a traceback."""

RECEIVE_BYTES = 1 << 18
"""Maximum number of bytes in one read from the socket."""

Answer = dict[str, Any]


def serve(sock: socket.socket) -> None:
    """Answer cells until the other end closes."""
    interrupts = _Interrupts()
    sys.path.insert(0, "")
    sys.argv = [""]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    # Line buffering keeps both streams and the output of programs in order.
    for name, fd in (("stdout", 1), ("stderr", 2)):
        stream = open(  # noqa: SIM115 (it stays open)
            fd, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False
        )
        setattr(sys, name, stream)
    run: Callable[[str], Answer]
    try:
        run, kind = _ipython(), "ipython"
    except ImportError:
        run, kind = Plain().run, "python"
    for name in [
        name for name in sys.modules if name.partition(".")[0] == __name__.partition(".")[0]
    ]:
        del sys.modules[name]  # the agent may have a package of that name, and ours is loaded
    gc.freeze()  # objects of the imports persist, and need no garbage collection
    decoder, us = FrameDecoder(), os.getpid()
    sock.sendall(pack({"id": 0, "interpreter": kind}))
    while data := sock.recv(RECEIVE_BYTES):
        decoder.feed(data)
        while (frame := decoder.take()) is not None:
            header, body = frame
            answer: Answer = {"result": None, "error": None}
            try:
                with interrupts:
                    answer = run(body.decode())
            except BaseException as error:
                answer["error"] = _described(error, None)
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            if os.getpid() != us:  # the cell forked and returned twice, but must be answered once
                os._exit(0)
            sock.sendall(pack({"id": header["id"], **answer}))


class _Interrupts:
    """A context in which SIGINT raises KeyboardInterrupt. Outside the context, SIGINT
    does nothing.
    """

    def __init__(self) -> None:
        self.__exit__()

    def __enter__(self) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *_: object) -> None:
        # SIG_IGN would be inherited by started programs.
        signal.signal(signal.SIGINT, lambda *_: None)


class Plain:
    """Runs cells without IPython: the last expression's value is the result, names
    persist, and there are no magic commands.
    """

    def __init__(self) -> None:
        self._module = types.ModuleType("__main__")
        sys.modules["__main__"] = self._module
        self._count = 0

    def run(self, cell: str) -> Answer:
        self._count += 1
        name = f"<cell {self._count}>"
        # Tracebacks quote the cell.
        linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
        names = self._module.__dict__
        result = None
        try:
            tree = ast.parse(cell, name)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, name, "exec"), names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), name, "eval"), names)
                if value is not None:
                    names["_"] = value
                    result = _short(repr(value))
        except BaseException as error:
            where = error.__traceback__
            while where is not None and not where.tb_frame.f_code.co_filename.startswith("<cell "):
                where = where.tb_next
            return {"result": None, "error": _described(error, where)}
        return {"result": result, "error": None}


def _ipython() -> Callable[[str], Answer]:
    """Return a function that runs a cell in IPython, without color and history file,
    and returns the result and error that IPython would print.
    """
    from IPython import version_info
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    config: Any = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor" if version_info[0] >= 9 else "NoColor"
    shell: Any = InteractiveShell.instance(config=config)
    shell.display_formatter.active_types = ["text/plain"]  # images would be of no use
    results: list[str] = []
    errors: list[dict[str, str]] = []
    hook = shell.displayhook
    hook.write_output_prompt = lambda: None
    hook.finish_displayhook = lambda: None
    hook.write_format_data = lambda data, *_: results.append(data.get("text/plain", ""))
    shell._showtraceback = lambda _, error, lines: errors.append(
        {**_named(error), "traceback": _short("\n".join(lines))}
    )
    # Programs get no separate terminal; their output goes where ours does.
    shell.system = shell.system_raw
    shell.ask_exit = _leave

    def run(cell: str) -> Answer:
        results.clear()
        errors.clear()
        outcome = shell.run_cell(cell, store_history=True)
        error = outcome.error_before_exec or outcome.error_in_exec
        if error is not None and not errors:
            errors.append(_described(error, error.__traceback__))
        result = _short("\n".join(results)) if results else None
        return {"result": result, "error": errors[-1] if errors else None}

    return run


def _leave() -> None:
    """End the interpreter, as `exit` does; the next cell gets a new one."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _described(error: BaseException, where: types.TracebackType | None) -> dict[str, str]:
    try:
        text = "".join(traceback.format_exception(type(error), error, where))
    except BaseException:  # __str__ of the agent's exception fails
        text = type(error).__name__
    return {**_named(error), "traceback": _short(text)}


def _named(error: BaseException) -> dict[str, str]:
    try:
        message = str(error)
    except BaseException:  # __str__ of the agent's exception fails
        message = ""
    return {"name": type(error).__name__, "message": _short(message)}


def _short(text: str) -> str:
    return (
        text
        if len(text) <= TEXT_CHARS
        else f"{text[:TEXT_CHARS]}… ({len(text) - TEXT_CHARS} more characters)"
    )
