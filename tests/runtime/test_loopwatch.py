"""Code that blocks the event loop is named while it does, and the user can still end
the run.
"""

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollweave.core.policy.experience import sample
from rollweave.envs.boundary import GuardedEnv
from rollweave.runtime.loopwatch import Culprit, LoopWatch
from rollweave.schema.config.run import Faults
from tests.runtime import holding
from tests.support.fake_runs import ROOT, assert_no_processes, lines, make_config, run, write

HERE = "tests.runtime.holding"


@pytest.fixture(autouse=True)
def real_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first fork waits for the server, which blocks the event loop."""
    monkeypatch.setattr("rollweave.io.child.Popen", subprocess.Popen)


class Reports:
    """Records the reports of a watch. `reported` is set by the first one."""

    def __init__(self) -> None:
        self.reported = threading.Event()
        self.noticed: list[Culprit] = []
        self.over: list[tuple[Culprit, float]] = []

    def watch(self) -> LoopWatch:
        return LoopWatch(
            on_blocked=self._notice,
            on_over=lambda culprit, seconds: self.over.append((culprit, seconds)),
        )

    def _notice(self, culprit: Culprit) -> None:
        self.noticed.append(culprit)
        self.reported.set()


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reports]:
    """Let the code of `holding` block until the watch has reported something."""
    started = Reports()
    monkeypatch.setattr(holding, "until", started.reported)
    yield started
    started.reported.set()


@pytest.mark.parametrize(
    ("kind", "is_async"), [("Async", True), ("Heir", True), ("Deep", True), ("Quick", False)]
)
async def test_an_environment_that_blocks_is_named_with_its_method(
    reports: Reports, kind: str, is_async: bool
) -> None:
    env = GuardedEnv(f"{HERE}:{kind}", {}, faults=Faults(), seed=0, block=False)
    with reports.watch():
        await env.step("a")  # returns because it was noticed
        while not reports.over:  # noqa: ASYNC110 (the loop is what is watched)
            await asyncio.sleep(0)
    (culprit,) = reports.noticed
    assert (culprit.name, culprit.is_async) == (f"{HERE}:{kind}.step", is_async)
    assert culprit.place.startswith(f"{holding.__file__}:")
    ((again, seconds),) = reports.over
    assert again is culprit
    assert seconds > 0.3
    assert ("asyncio.to_thread" in culprit.now) is is_async


async def test_a_function_that_a_configuration_names_is_named(reports: Reports) -> None:
    with reports.watch():
        await asyncio.sleep(0)
        sample([], 1, strategy=holding.in_order, version=0)
    assert [culprit.name for culprit in reports.noticed] == [f"{HERE}:in_order"]


async def test_a_busy_loop_does_not_count_as_blocked(reports: Reports) -> None:
    with reports.watch():
        end = time.monotonic() + 1.5
        while time.monotonic() < end:  # noqa: ASYNC110 (the loop is what is watched)
            await asyncio.sleep(0)
    assert reports.noticed == []


@pytest.mark.parametrize("kind", ["Async", "Handler"])
def test_a_run_reports_what_blocks_it_and_for_how_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from rollweave.runtime import launch

    reported = threading.Event()
    monkeypatch.setattr(holding, "until", reported)
    warnings_shown: list[str] = []

    def show(start: object, command: launch.Warn) -> None:
        warnings_shown.append(command.message)
        reported.set()

    monkeypatch.setattr(launch._Start, "_show", show)
    config = make_config(
        tmp_path,
        steps=1,
        task={"env": f"{HERE}:{kind}"},
        eval={"final_episodes": 0},
        rollout={"retries": 0},
    )
    run(config)
    method = "run" if kind == "Handler" else "step"
    assert warnings_shown[0].startswith(
        f"{HERE}:{kind}.{method} is blocking the event loop ({holding.__file__}:"
    )
    expected = [
        line["message"] for line in lines(config, "warning") if line["component"] == "event loop"
    ]
    assert expected[0].startswith(f"{HERE}:{kind}.{method} blocked the event loop for ")


PROGRAM = """
import sys
from pathlib import Path
import typer
from rollweave.cli.interrupt import install_signals
from rollweave.cli import train
from rollweave.cli.console import errors_reported
from rollweave.schema.config.loading import load
from rollweave.runtime import launch
from tests.support.fake_runs import FAKES

install_signals()
launch.Programs = lambda: FAKES
try:
    with errors_reported():
        train.run(load(Path(sys.argv[1])), resume=False, inproc=False)
except typer.Exit as error:
    sys.exit(error.exit_code)
"""


BLOCKING = "is blocking the event loop"


@pytest.mark.variants
@pytest.mark.parametrize(
    ("kind", "reported", "numbers"),
    [
        ("Async", BLOCKING, (signal.SIGINT, signal.SIGINT)),
        pytest.param("Deaf", BLOCKING, (signal.SIGINT, signal.SIGINT), marks=pytest.mark.slow),
        pytest.param("Handler", BLOCKING, (signal.SIGINT, signal.SIGINT), marks=pytest.mark.slow),
        pytest.param("Async", BLOCKING, (signal.SIGTERM,), marks=pytest.mark.slow),
        pytest.param("Deaf", BLOCKING, (signal.SIGTERM,), marks=pytest.mark.slow),
        ("Plain", "a step begins", (signal.SIGINT, signal.SIGINT)),
    ],
)
def test_a_blocked_run_can_be_ended(
    tmp_path: Path, kind: str, reported: str, numbers: tuple[signal.Signals, ...]
) -> None:
    """It ends with the exit status of an interrupted program, and no child is left."""
    config = make_config(tmp_path, steps=1, task={"env": f"{HERE}:{kind}"})
    command = [sys.executable, "-c", PROGRAM, str(write(config))]
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        )
        stack.callback(process.kill)
        assert process.stderr is not None
        while reported not in (line := process.stderr.readline()):
            assert line
        for number in numbers:
            process.send_signal(number)
            while pending(process.pid):  # two pending signals of one kind would be one
                time.sleep(0.001)
        rest = process.stderr.read()
        assert process.wait(60) == 130
        assert "Traceback" not in rest
    assert_no_processes(config)


def pending(pid: int) -> int:
    """Return the signals that were sent to a process and not delivered yet."""
    with contextlib.suppress(OSError):  # the process has ended
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("ShdPnd:"):
                return int(line.split()[1], 16)
    return 0
