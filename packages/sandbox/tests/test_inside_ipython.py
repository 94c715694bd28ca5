"""Cells through a channel, with and without IPython: names persist, and errors,
interrupts and deaths are reported.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from packages.sandbox.tests.action_server import PRELOADED, served, wait_for_end
from rollweave.sandbox.tools import CellResult, IPython
from rollweave.schema.errors import SandboxRefusedError
from rollweave_sandbox.inside.cells import CELL_BYTES

SHORT_S = 0.4
"""Seconds of a timeout that is meant to expire."""


@contextlib.asynccontextmanager
async def interpreter(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[IPython]:
    """Plain Python is had by an IPython that cannot be imported, as where there is
    none; a fork by one imported before.
    """
    if kind == "python":
        (tmp_path / "IPython.py").write_text("raise ImportError('none here')\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    else:
        pytest.importorskip("IPython", reason="the extra `tools` is not installed")
        monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    async with served(cwd=tmp_path, code=PRELOADED if kind == "fork" else "") as channel:
        yield IPython(channel)


@pytest.fixture(params=["ipython", "fork", "python"])
async def cells(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[IPython]:
    async with interpreter(request.param, tmp_path, monkeypatch) as interpreter_:
        assert (await interpreter_.run("")).interpreter == (
            "python" if request.param == "python" else "ipython"
        )
        yield interpreter_


async def well(cells: IPython, cell: str) -> CellResult:
    """Run a cell that must succeed without a restart."""
    result = await cells.run(cell)
    assert (result.error, result.died, result.timed_out, result.restarted) == (
        None,
        None,
        False,
        False,
    ), result
    return result


async def test_names_persist_and_the_last_value_is_the_result(cells: IPython) -> None:
    assert (await well(cells, "import math\nx = 20\nx")).result == "20"
    assert (await well(cells, "x + int(math.sqrt(4))")).result == "22"
    assert (await well(cells, "y = 1")).result is None
    assert (await well(cells, "None")).result is None
    assert (await well(cells, "_ * 2")).result == "44"
    assert (await well(cells, "'žluťoučký 🐴'")).result == "'žluťoučký 🐴'"


@pytest.mark.variants
async def test_output_is_separate_from_the_result_and_in_order(cells: IPython) -> None:
    result = await well(
        cells,
        "import sys, os\nprint('a')\nprint('b', file=sys.stderr)\nos.system('echo "
        "c')\nprint('d', end='')\n5",
    )
    assert (result.output, result.result) == ("a\nb\nc\nd", "5")


async def test_an_exception_has_a_name_a_message_and_a_traceback(cells: IPython) -> None:
    result = await cells.run("def f():\n    return 1 / 0\nprint('before')\nf()")
    assert result.error is not None
    assert (result.error.name, result.error.message) == ("ZeroDivisionError", "division by zero")
    assert "return 1 / 0" in result.error.traceback
    assert "\x1b" not in result.error.traceback
    assert "worker" not in result.error.traceback
    assert (result.output, result.result, result.restarted) == ("before\n", None, False)


@pytest.mark.variants
@pytest.mark.parametrize(
    ("cell", "name"),
    [
        *(("def f(:", "SyntaxError"), ("'open", "SyntaxError"), ("  x\n y", "IndentationError")),
        *(("input()", "EOFError"), ("raise SystemExit(3)", "SystemExit")),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("class Bad:\n    def __repr__(self): raise ValueError('no')\nBad()", "ValueError"),
        (
            "class Bad(Exception):\n    def __str__(self): raise ValueError('no')\nraise Bad",
            "Bad or ValueError",
        ),
        ("def f(): f()\nf()", "RecursionError"),
    ],
)
async def test_the_interpreter_survives_errors(cell: str, name: str, cells: IPython) -> None:
    await well(cells, "kept = 1")
    result = await cells.run(cell)
    assert result.error is not None
    assert result.error.name in name.split(" or ")
    assert (await well(cells, "kept")).result == "1"


@pytest.mark.variants
@pytest.mark.parametrize(
    "cell",
    [
        *("while True: pass", "import time; time.sleep(1000)"),
        *("import os; os.system('sleep 1000; sleep 1000')", "open('fifo').read()"),
    ],
)
async def test_a_cell_out_of_time_is_interrupted_and_names_persist(
    cell: str, cells: IPython, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "fifo")
    await well(cells, "kept = 1")
    result = await cells.run(f"print('begun')\n{cell}", timeout_s=SHORT_S)
    assert (result.timed_out, result.restarted, result.output) == (True, False, "begun\n")
    assert (await well(cells, "kept")).result == "1"


@pytest.mark.extended
async def test_a_cell_that_ignores_the_interrupt_is_killed(cells: IPython) -> None:
    cell = (
        "import os, signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint(os.getpid())\n"
        "while True: pass"
    )
    result = await cells.run(cell, timeout_s=SHORT_S)
    expected = (True, True, 137, None)
    assert (result.timed_out, result.restarted, result.died, result.error) == expected
    await wait_for_end(int(result.output))
    assert (await cells.run("os")).error is not None


@pytest.mark.variants
@pytest.mark.parametrize(
    ("cell", "status"),
    [
        ("import os; os._exit(3)", {3}),
        ("import os; os.kill(os.getpid(), 9)", {137}),
        ("import ctypes; ctypes.string_at(0)", {139}),
        (
            "import os\nfor fd in range(3, 100):\n    try: os.close(fd)\n    except OSError: pass",
            {1, 137},
        ),
        (
            "import os\nfor fd in range(3, 99):\n    try: os.write(fd, b'garb' * 9)\n    except "
            "OSError: 0\nwhile True: pass",
            {137},
        ),
    ],
)
async def test_an_interpreter_that_ended_is_replaced(
    cell: str, status: set[int], cells: IPython
) -> None:
    result = await cells.run(f"kept = 1\nprint('last words', flush=True)\n{cell}")
    assert result.died in status
    assert (result.restarted, result.timed_out) == (True, False)
    assert result.output.startswith("last words\n")
    error = (await cells.run("kept")).error
    assert error is not None
    assert error.name == "NameError"


async def test_death_between_cells_is_reported_by_the_next_cell(cells: IPython) -> None:
    pid = int((await well(cells, "import os; os.getpid()")).result or 0)
    os.kill(pid, 9)
    await wait_for_end(pid)
    result = await cells.run("1")
    assert (result.result, result.restarted, result.died) == ("1", True, None)


async def test_a_cell_that_forks_and_returns_twice_is_answered_once(cells: IPython) -> None:
    await cells.run("import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)")
    assert (await well(cells, "1 + 1")).result == "2"


@pytest.mark.variants
async def test_excessive_output_is_truncated(cells: IPython) -> None:
    result = await well(cells, "print('first'); print('x' * 50_000_000); print('last')")
    assert result.output.startswith("first\nxxx")
    assert result.output.endswith("xxx\nlast\n")
    assert result.dropped_bytes == 50_000_000 + len("first\n\nlast\n") - 30_000
    assert len((await well(cells, "'x' * 50_000_000")).result or "") < 200_000
    with pytest.raises(SandboxRefusedError, match="cell must have at most"):
        await cells.run("#" * (CELL_BYTES + 1))


async def test_a_thread_that_prints_between_cells_is_never_blocked(
    cells: IPython, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "go")
    os.mkfifo(tmp_path / "gone")
    cell = (
        "import threading\ndef work():\n    open('go').read()\n    print('y' * 3_000_000)\n    "
        "open('gone', 'w').close()\n"
    )
    await well(cells, cell + "threading.Thread(target=work).start()")
    await asyncio.to_thread((tmp_path / "go").write_text, "")
    await asyncio.to_thread((tmp_path / "gone").read_text)
    assert (await cells.run("print('now')", output_bytes=1 << 20)).output.endswith("y\nnow\n")


async def test_the_agents_modules_are_not_shadowed(cells: IPython, tmp_path: Path) -> None:
    (tmp_path / "frames.py").write_text("mine = 1\n")
    (tmp_path / "inside.py").write_text("mine = 2\n")
    assert (
        await well(cells, "import frames, inside; frames.mine, inside.mine, __name__")
    ).result == "(1, 2, '__main__')"


@pytest.mark.variants
async def test_concurrent_cells_take_turns(cells: IPython) -> None:
    await well(cells, "n = 0")
    result = await asyncio.gather(*(cells.run("n += 1; n") for _ in range(10)))
    assert [one.result for one in result] == [str(number) for number in range(1, 11)]


async def test_a_cancelled_cell_is_interrupted(cells: IPython, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "begun")
    task = asyncio.create_task(cells.run("kept = 1\nopen('begun', 'w').close()\nwhile True: pass"))
    await asyncio.to_thread((tmp_path / "begun").read_text)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await well(cells, "kept")).result == "1"


async def test_ipython_magic_and_display(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with interpreter("ipython", tmp_path, monkeypatch) as cells:
        assert (await well(cells, "display({'a': 1})\n2")).output == "{'a': 1}\n"
        assert (await well(cells, "!echo program")).output == "program\n"
        assert (await well(cells, "await __import__('asyncio').sleep(0, 5)")).result == "5"
        assert (await well(cells, "5;")).result is None
        assert (await well(cells, "%cd -q /\n%pwd")).result == "'/'"
        result = await cells.run("exit")
        assert (result.died, result.restarted) == (0, True)
