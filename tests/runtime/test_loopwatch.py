"""Code that blocks the event loop is named while it does, and the user can still end
the run.
"""

import asyncio
import contextlib
import inspect
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollweave.core.policy.experience import sample
from rollweave.envs.boundary import GuardedEnv
from rollweave.record.trace import CONTROLLER
from rollweave.runtime.loopwatch import BEAT_S, Culprit, LoopWatch, Pulse, find_culprit, watched
from rollweave.schema.commands import Warn
from rollweave.schema.errors import DiskError
from tests.runtime import holding
from tests.support.fake_runs import ROOT, assert_no_processes, lines, make_config, run, write
from tests.support.properties import examples
from tests.support.virtual_time import run_virtually

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
    env = GuardedEnv(f"{HERE}:{kind}", {})
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


async def test_a_function_that_a_configuration_names_is_named_at_once_and_afterwards(
    reports: Reports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that is set back changes no duration, and a full disk ends no run."""
    monkeypatch.setattr(time, "time", lambda: 0.0)
    shown, warned, spans = list[str](), list[str](), list[Any]()

    def show(warning: Warn) -> None:
        shown.append(warning.message)
        reports.reported.set()

    def warn(warning: Warn) -> None:
        warned.append(warning.message)
        if len(warned) == 2:
            raise DiskError(28, "the disk is full")

    unexpected = list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unexpected.append(context))
    trace = SimpleNamespace(span=lambda *span: spans.append(span))
    with watched(show=show, warn=warn, trace=trace, clock=lambda: 100.0):  # type: ignore[arg-type]
        for count in (1, 2):
            reports.reported.clear()
            await asyncio.sleep(0)
            sample([], 1, strategy=holding.in_order, version=0)
            while len(warned) < count:  # noqa: ASYNC110 (the loop is what is watched)
                await asyncio.sleep(0)
    assert (len(shown), unexpected) == (2, [])
    assert shown[0].startswith(f"{HERE}:in_order is blocking the event loop ({holding.__file__}:")
    ((component, kind, name, start, end),) = spans
    assert (component, kind, name, end) == (CONTROLLER, "event loop", f"{HERE}:in_order", 100.0)
    assert 0.4 < end - start < 60
    assert f"{HERE}:in_order blocked the event loop for {end - start:.1f} s (" in warned[0]


def test_nothing_is_left_of_a_watch_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    beats = list[float]()
    monkeypatch.setattr(Pulse, "beat", lambda _, now: beats.append(now))

    async def watch() -> None:
        with Reports().watch():
            await asyncio.sleep(10.5 * BEAT_S)
        assert len(beats) == 11
        await asyncio.sleep(10 * BEAT_S)
        assert len(beats) == 11

    run_virtually(watch())
    assert "loop watch" not in {thread.name for thread in threading.enumerate()}


CULPRIT = Culprit("user:function", "user.py:1", is_async=False)


@settings(max_examples=examples(250))
@example(phase=1, events=[(0, 601, "foreign"), (0, 100, "suspended")])
@given(
    phase=st.integers(1, 199),
    events=st.lists(
        st.tuples(
            st.integers(0, 900),
            st.sampled_from([100, 399, 601, 999, 1500, 5000]),
            st.sampled_from(["foreign", "foreign", "ours", "just over", "suspended"]),
        ),
        max_size=5,
    ),
)
def test_what_blocks_the_loop_is_named_once_and_in_time(
    phase: int, events: list[tuple[int, int, str]]
) -> None:
    """The loop and the thread, in milliseconds: each acts every 200, the loop not while
    it is blocked, and neither while the process is suspended.
    """
    pulse = Pulse(0.0)
    beat_at, check_at, last_beat = 0, phase, 0
    named: list[int] = []

    def beat(now: int) -> None:
        nonlocal beat_at, last_beat
        over = pulse.beat(now / 1000)
        assert (over is not None) == bool(named)
        if over is not None:
            assert over == (CULPRIT, pytest.approx((now - last_beat) / 1000))
        beat_at, last_beat = now + round(1000 * BEAT_S), now
        named.clear()

    def found(now: int, what: str) -> Culprit | None:
        if what == "just over":  # the loop runs again during the inspection
            beat(now)
        # A loop that runs has nobody's function on its stack, even if its next beat is
        # late because the process was suspended.
        return None if what in ("ours", "running") else CULPRIT

    def check(now: int, what: str) -> None:
        nonlocal check_at
        if pulse.check(lambda: found(now, what)) is not None:
            assert what == "foreign"
            assert not named, "once each time"
            assert now - last_beat >= 600, "on a busy machine, two beats can be late"
            named.append(now)
        check_at = now + round(1000 * BEAT_S)

    now = 0
    for runs, lasts, what in [*events, (1000, 0, "ours")]:
        now += runs
        while min(beat_at, check_at) < now:
            beat(beat_at) if beat_at <= check_at else check(check_at, "running")
        start, now = now, now + lasts
        if what == "suspended":
            beat_at, check_at = max(beat_at, now + 1), max(check_at, now)
            continue
        while check_at < now:
            check(check_at, what)
            assert named or what != "foreign" or check_at < start + 1000, "within a second"
        beat_at = max(beat_at, now)


KINDS = {
    "loop": ("asyncio.events", f"{sysconfig.get_path('stdlib')}/asyncio/events.py"),
    "library": ("json", f"{sysconfig.get_path('stdlib')}/json/__init__.py"),
    "frozen": ("importlib", "<frozen importlib._bootstrap>"),
    "rollweave": ("rollweave.envs.boundary", "/src/rollweave/envs/boundary.py"),
    "package": ("torch.nn", f"{sysconfig.get_path('purelib')}/torch/nn.py"),
    "user": ("mine", "/home/mine.py"),
}


@settings(max_examples=examples(300))
@given(stack=st.lists(st.sampled_from(sorted(KINDS)), max_size=7))
def test_the_culprit_is_the_first_foreign_function_that_we_call(stack: list[str]) -> None:
    """`stack` begins with the outermost function."""
    frame: Any = None
    for line, kind in enumerate(stack):
        module, file = KINDS[kind]
        code = SimpleNamespace(
            co_filename=file, co_name="f", co_qualname=f"f{line}", co_flags=inspect.CO_COROUTINE
        )
        frame = SimpleNamespace(
            f_back=frame, f_globals={"__name__": module}, f_code=code, f_lineno=line, f_locals={}
        )
    found = find_culprit(frame)
    begin = max([line for line, kind in enumerate(stack) if kind == "loop"], default=-1)
    calls = [
        (line, kind)
        for line, kind in enumerate(stack)
        if line > begin and kind in ("rollweave", "package", "user")
    ]
    ours = next((line for line, kind in calls if kind == "rollweave"), len(stack))
    first = next((line for line, kind in calls if line > ours and kind != "rollweave"), None)
    if first is None:
        assert found is None
        return
    assert found is not None
    assert found.name == f"{KINDS[stack[first]][0]}:f{first}"
    inside = [line for line, kind in calls if line >= first and kind != "package"]
    place = max(inside, default=first)
    assert found.place == f"{KINDS[stack[place]][1]}:{place}"
    assert found.is_async


@pytest.mark.variants
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
