"""Whole runs whose number of worker processes changes with the attempts."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rollweave.core.mechanisms.cluster import scaling
from rollweave.record.journal import Replay
from rollweave.schema.commands import Command, RemoveWorker, RestartWorker
from rollweave.schema.config.root import RunConfig
from rollweave.schema.work import StopReason
from tests.support import fake_runs
from tests.support.worker_runs import LIMIT_S, gone, located, outcomes, places


def elastic(directory: Path) -> RunConfig:
    """Return the configuration of a run with up to two workers, which have places for
    two attempts each. Its environments wait for the file `open`.
    """
    return located(
        directory,
        is_open=False,
        workers={"count": {"minimum": 0, "maximum": 2}},
        rollout={"mode": "sync", "max_running": 4},
        steps=3,
    )


def while_running(config: RunConfig, act: Callable[[Path], None]) -> threading.Thread:
    """Run `act`, with the file for which environments wait, beside the run."""
    where = Path(config.tasks[0].options["where"]) / "open"

    def acted() -> None:
        try:
            act(where)
        finally:
            where.touch()

    thread = threading.Thread(target=acted)
    thread.start()
    return thread


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.01)


def commands_of(config: RunConfig, kind: type[Command]) -> list[Command]:
    """Return all commands of a kind, in order."""
    events = Replay(fake_runs.run_dir(config) / "journal.bin", config)
    return [one for *_, commands in events for one in commands if isinstance(one, kind)]


def test_workers_start_from_zero_when_attempts_need_them(tmp_path: Path) -> None:
    config = elastic(tmp_path / "run")
    thread = while_running(
        config, lambda _: until(lambda: len(places(config, "reset")) == 2, "two workers")
    )
    summary = fake_runs.run(config)
    thread.join()
    assert (summary.error, summary.watchdog) == ("", {})
    assert summary.workers["starts"] == 2
    assert 0 < summary.workers["seconds"] < 2 * summary.wall_s
    step = fake_runs.lines(config, "step")[0]["workers"]
    assert (step["running"], step["wanted"]) == (2, 2)
    assert gone(places(config, "reset"))
    fake_runs.assert_trained_once(config)
    fake_runs.assert_no_processes(config)
    assert fake_runs.replay(config).differing == 0


def test_a_worker_that_is_killed_while_the_other_starts_costs_only_its_attempts(
    tmp_path: Path,
) -> None:
    config = elastic(tmp_path / "run")
    struck: list[int] = []

    def strike(_: Path) -> None:
        until(lambda: bool(places(config, "reset")), "an attempt")
        struck.append(min(places(config, "reset")))
        os.kill(struck[0], signal.SIGKILL)

    thread = while_running(config, strike)
    summary = fake_runs.run(config)
    thread.join()
    assert summary.error == ""
    assert summary.account.balanced
    assert summary.watchdog["worker_restarted"] == 1
    assert StopReason.WORKER_LOST in {stop for *_, stop in outcomes(config).values()}
    assert gone(places(config, "reset"))
    fake_runs.assert_trained_once(config)
    assert fake_runs.replay(config).differing == 0


def test_workers_end_while_the_trainer_works_and_start_again_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole step has no worker; none of them had an attempt when it ended."""
    monkeypatch.setattr(scaling, "IDLE_S", 0.0)
    config = elastic(tmp_path / "run")
    assert config.model.path is not None
    hold = Path(config.model.path) / "hold"
    hold.write_text("1000")
    first: set[int] = set()

    def act(where: Path) -> None:
        until(lambda: len(places(config, "reset")) == 2, "two workers")
        first.update(places(config, "reset"))
        where.touch()
        assert gone(first), "they end while the trainer is held"
        hold.unlink()

    thread = while_running(config, act)
    try:
        summary = fake_runs.run(config)
    finally:
        hold.unlink(missing_ok=True)
        thread.join()
    assert (summary.error, summary.watchdog) == ("", {})
    assert StopReason.WORKER_LOST not in {stop for *_, stop in outcomes(config).values()}
    assert places(config, "reset") - first, "other processes ran the next step"
    started, ended = commands_of(config, RestartWorker), commands_of(config, RemoveWorker)
    assert summary.workers["starts"] == len(started) >= 4
    assert len(ended) >= 2
    fake_runs.assert_trained_once(config)
    fake_runs.assert_no_processes(config)
    assert fake_runs.replay(config).differing == 0


@pytest.mark.extended
def test_a_resumed_run_starts_workers_from_zero_again(tmp_path: Path) -> None:
    config = elastic(tmp_path / "run")
    (Path(config.tasks[0].options["where"]) / "open").touch()
    fake_runs.fault(config, "kill-controller-2")
    fake_runs.killed(config)
    before = places(config, "reset")
    assert before
    summary = fake_runs.run(config, resume=True)
    assert summary.error == ""
    assert summary.account.balanced
    assert places(config, "reset") - before
    assert summary.workers["starts"] >= 2
    fake_runs.assert_trained_once(config)
    assert fake_runs.replay(config).differing == 0
