"""Whole runs whose attempts run in worker processes: results, and the loss of
workers.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollweave.runtime.supervisors import workers as link
from rollweave.schema.config.root import RunConfig
from rollweave.schema.work import StopReason
from tests.support import fake_runs
from tests.support.worker_runs import LIMIT_S, gone, located, outcomes, places


def test_attempts_run_in_workers_as_in_the_controller(tmp_path: Path) -> None:
    """In lockstep both give the same trajectories; the controller runs no code of an
    environment.
    """
    mode = {"mode": "sync"}
    there = located(tmp_path / "there", rollout=mode)
    here = located(tmp_path / "here", workers=0, rollout=mode)
    assert fake_runs.run(here).error == ""
    for code in ("words", "make_task", "reset"):
        assert places(here, code) == {os.getpid()}
    assert fake_runs.run(there).error == ""
    pids = places(there, "reset")
    assert len(pids) == 2
    for code in ("words", "make_task", "score"):
        assert os.getpid() not in places(there, code)
        assert places(there, code), code
    assert gone(pids)
    assert outcomes(there) == outcomes(here)
    fake_runs.assert_trained_once(there)
    fake_runs.assert_no_processes(there)
    assert fake_runs.replay(there).differing == 0


@pytest.mark.extended
def test_processes_of_environments_have_logs_by_worker(tmp_path: Path) -> None:
    config = located(tmp_path / "run", task={"isolation": "process"})
    assert fake_runs.run(config).error == ""
    logs = fake_runs.run_dir(config) / "logs"
    written = {path.relative_to(logs).as_posix() for path in logs.rglob("env-*.log")}
    assert written >= {"w0/env-0.log", "w1/env-0.log"}
    fake_runs.assert_no_processes(config)


@contextmanager
def striking(config: RunConfig, number: signal.Signals) -> Iterator[list[int]]:
    """Send a signal to a worker whose episodes are under way; then let all continue."""
    struck: list[int] = []
    where = Path(config.tasks[0].options["where"])

    def strike() -> None:
        deadline = time.monotonic() + LIMIT_S
        while len(places(config, "reset")) < config.workers.maximum and time.monotonic() < deadline:
            time.sleep(0.01)
        struck.append(min(places(config, "reset")))
        os.kill(struck[0], number)
        (where / "open").touch()

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        yield struck
    finally:
        thread.join()


@pytest.mark.variants
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_lost_worker_costs_only_its_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, workers: int
) -> None:
    monkeypatch.setattr(link, "SILENT_S", 2.0)
    config = located(tmp_path / "run", workers=workers, is_open=False)
    with striking(config, number) as struck:
        summary = fake_runs.run(config)
    assert summary.error == ""
    assert summary.account.balanced
    assert summary.watchdog["worker_restarted"] == 1
    (warning,) = [
        line for line in fake_runs.lines(config, "warning") if "restarted" in line["message"]
    ]
    reason = "SIGKILL" if number is signal.SIGKILL else "sent nothing for 2 s"
    assert reason in warning["message"]
    stored = [stop for *_, stop in outcomes(config).values()]
    assert stored.count(StopReason.WORKER_LOST) >= 1
    assert gone(places(config, "reset") | set(struck))
    assert len(places(config, "reset")) == workers + 1
    fake_runs.assert_trained_once(config)
    assert fake_runs.replay(config).differing == 0


def test_attempts_of_a_killed_worker_continue(tmp_path: Path) -> None:
    """All attempts wait after a turn: the new worker samples none of these again."""
    config = located(tmp_path / "run", workers=1, is_open=False)
    where = Path(config.tasks[0].options["where"])

    def strike() -> None:
        try:
            fake_runs.until_turns_done(config, 4)
            os.kill(min(places(config, "reset")), signal.SIGKILL)
        finally:
            (where / "open").touch()

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        summary = fake_runs.run(config)
    finally:
        thread.join()
    assert (summary.error, summary.watchdog["worker_restarted"]) == ("", 1)
    repeated = {event.trajectory_id for event in fake_runs.turns_done(config) if event.replayed}
    assert len(repeated) == summary.continued >= 4
    assert not (fake_runs.run_dir(config) / "turns").exists()
    fake_runs.assert_trained_once(config)
    assert fake_runs.replay(config).differing == 0
