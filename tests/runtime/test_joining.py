"""Engines join and leave while a run trains, with processes, sockets, the command line,
and a controller that is killed.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollweave.record.journal import Replay
from rollweave.schema import commands as c
from rollweave.schema.config.loading import load
from rollweave.schema.config.root import RunConfig
from rollweave.schema.events import WorldLost
from tests.support.commands import invoke
from tests.support.fake_runs import ROOT, assert_no_processes, lines, make_config, run_dir, write
from tests.support.forking import Forked
from tests.support.referee import Referee

LIMIT_S = 60.0


class Life:
    """A controller in a separate process, with fake engines and a fake trainer, and its
    view through the command line.
    """

    def __init__(self, config: RunConfig, process: subprocess.Popen[bytes]) -> None:
        self.config, self.process = config, process

    def engines(self, *arguments: str) -> dict[str, dict[str, Any]]:
        """Return the engines by name as `rollweave engines` lists them now; none if the
        run cannot be reached yet.
        """
        code, text, _ = invoke("engines", str(run_dir(self.config)), "--json", *arguments)
        return {line["id"]: line for line in json.loads(text)["engines"]} if code == 0 else {}

    def until(self, holds: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not holds():
            assert self.process.poll() is None, (
                f"it ended: {(Path(self.config.run.dir) / 'printed').read_text()}"
            )
            assert time.monotonic() < deadline, f"{what}: {self.engines()}"
            time.sleep(0.02)

    def serving(self, *names: str) -> None:
        """Wait until the run has exactly these engines, and all serve."""

        def holds() -> bool:
            engines = self.engines()
            return list(engines) == list(names) and all(
                line["status"] == "serving" for line in engines.values()
            )

        self.until(holds, f"{names} serve")

    def wait_for_turns_of(self, name: str) -> None:
        """Wait until that engine has been given a turn."""
        self.until(lambda: name in turns(self.config), f"a turn for {name}")

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        assert self.process.wait(LIMIT_S) == -signal.SIGKILL
        assert_no_processes(self.config)

    def finish(self) -> dict[str, Any]:
        assert self.process.wait(LIMIT_S) == 0, (Path(self.config.run.dir) / "printed").read_text()
        summary: dict[str, Any] = json.loads((run_dir(self.config) / "summary.json").read_text())
        assert (summary["error"], summary["steps"]) == ("", self.config.run.steps)
        assert not (run_dir(self.config) / "control.sock").exists()
        assert_no_processes(self.config)
        return summary


@contextlib.contextmanager
def living(config: RunConfig, *, resume: bool = False) -> Iterator[Life]:
    command = [
        sys.executable,
        "-m",
        "tests.support.fake_runs",
        str(write(config)),
        *(["resume"] if resume else []),
    ]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src")))}
    with (Path(config.run.dir) / "printed").open("wb") as printed:
        process = Forked(command, env=env, cwd=ROOT, stdout=printed, stderr=printed)
    try:
        yield Life(config, process)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def watched(config: RunConfig) -> Iterator[tuple[Any, list[c.Command]]]:
    for _, event, out in Replay(
        run_dir(config) / "journal.bin", load(run_dir(config) / "config.toml")
    ):
        yield event, out


def turns(config: RunConfig) -> set[str]:
    """Return the engines that were given turns in this life."""
    return {
        command.engine_id
        for _, out in watched(config)
        for command in out
        if isinstance(command, c.StartTurn)
    }


@pytest.mark.parametrize(
    "relays", [pytest.param(0, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.extended)]
)
def test_an_engine_joins_a_training_run_and_serves_turns(tmp_path: Path, relays: int) -> None:
    gate = tmp_path / "gate"
    config = make_config(
        tmp_path,
        options={"wait": str(gate)},
        rollout={"mode": "decoupled", "max_running": 4},
        weights={"relays": relays},
    )
    with living(config) as life:
        life.serving("e0", "e1")
        life.wait_for_turns_of("e1")
        code, text, _ = invoke("engines", str(run_dir(config)), "--add", "1")
        assert code == 0
        assert text.splitlines()[0] == "e2: starting"
        life.serving("e0", "e1", "e2")
        expected = (True, 0 if relays else None)
        assert (life.engines()["e2"]["joined"], life.engines()["e2"]["host"]) == expected
        life.wait_for_turns_of("e2")
        gate.touch()
        summary = life.finish()
    assert summary["engines"] == {"joined": 1, "left": 0}
    referee, replay = Referee(), Replay(run_dir(config) / "journal.bin", config)
    referee.watch(replay)
    assert replay.differing == 0
    replay.core.check()
    loads = [
        command
        for _, out in watched(config)
        for command in out
        if isinstance(command, c.LoadWeights)
    ]
    assert {load.engine_id for load in loads} == {"e0", "e1", "e2"}
    spans = json.loads((run_dir(config) / "trace.json").read_text())
    assert {
        span["args"]["name"]
        for span in spans
        if span.get("name") == "thread_name" and span["pid"] == 1
    } >= {"e2"}
    assert [(line["engine"], line["change"]) for line in lines(config, "engine")] == [
        ("e2", "starts")
    ]


@pytest.mark.extended
def test_a_resumed_run_has_the_engines_that_were_requested(tmp_path: Path) -> None:
    """The controller is killed after one engine joined, and again after another was
    withdrawn.
    """
    gate = tmp_path / "gate"
    config = make_config(
        tmp_path, options={"wait": str(gate)}, rollout={"mode": "decoupled", "max_running": 4}
    )
    with living(config) as life:
        life.serving("e0", "e1")
        life.engines("--add", "1")
        life.serving("e0", "e1", "e2")
        life.kill()
    code, _, errors = invoke("engines", str(run_dir(config)))
    assert code == 2
    assert errors == [
        f"error: RUN must be the directory of a living run, and none is in {run_dir(config)}"
    ]
    with living(config, resume=True) as life:
        life.serving("e0", "e1", "e2")
        assert [line["joined"] for line in life.engines().values()] == [False, False, True]
        life.until(lambda: turns(config), "a turn for any engine")
        leaving = min(turns(config))
        assert life.engines("--remove", leaving)[leaving]["status"] == "leaving", (
            "its episodes wait at the gate"
        )
        life.kill()
    staying = [name for name in ("e0", "e1", "e2") if name != leaving]
    with living(config, resume=True) as life:
        life.serving(*staying)
        life.engines("--add", "1")
        life.serving(*staying, "e3")
        gate.touch()
        summary = life.finish()
    assert summary["engines"]["joined"] == 2
    lost = [event for event, _ in watched(config) if isinstance(event, WorldLost)]
    assert [[slot.id for slot in event.engines] for event in lost] == [staying]


@pytest.mark.parametrize("mode", ["bounded", pytest.param("decoupled", marks=pytest.mark.slow)])
def test_an_engine_leaves_a_training_run(tmp_path: Path, mode: str) -> None:
    gate = tmp_path / "gate"
    config = make_config(tmp_path, options={"wait": str(gate)}, rollout={"mode": mode})
    with living(config) as life:
        life.serving("e0", "e1")
        life.wait_for_turns_of("e0")
        life.engines("--remove", "e0", "--now")
        life.serving("e1")
        code, _, errors = invoke("engines", str(run_dir(config)), "--remove", "e1")
        assert (code, errors) == (2, ["error: --remove: e1 is the last engine"])
        gate.touch()
        summary = life.finish()
    assert summary["engines"] == {"joined": 0, "left": 1}
    assert summary["retried"] == {}, "its turns continued on other engines"
