"""The fork in which a mutant's tests run ends at its limit, and leaves no process."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mutants import runner
from tests.mutants.runner import _contain, _ending_here, _set_limit
from tests.support.processes import alive


def wait_status(do: Callable[[], None], folder: Path) -> int:
    pid = os.fork()
    if not pid:
        with _ending_here():
            _contain(do, folder)
    assert os.waitpid(pid, 0)[1] == 0
    return int((folder / "status").read_text())


def test_what_the_tests_leave_in_another_session_is_killed(tmp_path: Path) -> None:
    def leave() -> None:
        pid = os.fork()
        if not pid:
            os.setsid()
            signal.pause()
        (tmp_path / "left").write_text(str(pid))

    assert wait_status(leave, tmp_path) == 0
    assert not alive(int((tmp_path / "left").read_text()))


@pytest.mark.parametrize("deletes", [False, True])
def test_a_test_that_hangs_is_killed_at_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deletes: bool
) -> None:
    """Also if its mutant deletes what the test has in its folder, or the folder."""
    folder = tmp_path / "own"
    folder.mkdir()
    monkeypatch.setattr(runner, "FIRST_LIMIT_S", 0.0 if deletes else 60.0)

    def hang() -> None:
        _set_limit(folder, 0.0)
        if deletes:
            shutil.rmtree(folder)
        signal.pause()

    assert wait_status(hang, folder) == signal.SIGKILL
