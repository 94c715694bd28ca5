"""Whole runs through real processes: their results, and that every fault ends in a run
that accounts for everything.
"""

import errno
import json
import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from rollweave.core.policy.modes import ALPHA
from rollweave.record.journal import Replay
from rollweave.record.rundir import RunDir
from rollweave.record.store import TrajectoryReader
from rollweave.record.trace import ENGINES
from rollweave.runtime import life
from rollweave.runtime.launch import train
from rollweave.runtime.metrics import Silent
from rollweave.schema.errors import ConfigError, CorruptJournalError, DiskError
from rollweave.schema.events import GroupSubmitted
from tests.support.fake_runs import (
    FAKES,
    ROOT,
    assert_no_processes,
    assert_trained_once,
    controller,
    fault,
    lines,
    make_config,
    pids,
    replay,
    run,
    run_dir,
    trained,
    turns_done,
    until_turns_done,
)
from tests.support.variants import mostly_slow


def test_a_run_writes_all_its_results(tmp_path: Path) -> None:
    config = make_config(tmp_path, eval={"every": 2, "episodes": 2})
    summary = run(config)
    assert (summary.error, summary.steps, summary.interrupted) == ("", 4, False)
    assert summary.account.balanced
    assert (summary.account.in_flight, summary.account.trained) == (0, 16)
    assert summary.eval_episodes == {"game": 4}
    written = json.loads((run_dir(config) / "summary.json").read_text())
    assert {name: written[name] for name in ("steps", "success_rate", "staleness_max")} == {
        "steps": 4,
        "success_rate": summary.success_rate,
        "staleness_max": summary.staleness_max,
    }
    assert summary.staleness_max <= ALPHA
    status = json.loads((run_dir(config) / "status.json").read_text())
    assert (status["ended"], status["phase"], status["step"]) == (True, "finished", 4)
    assert status["waits"] == []
    steps = lines(config, "step")
    assert [line["step"] for line in steps] == [0, 1, 2, 3]
    assert sum(sum(line["staleness"].values()) for line in steps) == 16
    assert sum(line["started"] for line in steps) <= summary.trajectories
    assert [line["final"] for line in lines(config, "evaluation")][-1] is True
    assert (run_dir(config) / "best").resolve().parent == run_dir(config) / "checkpoints"
    reader = TrajectoryReader(run_dir(config) / "trajectories")
    scored = [
        entry
        for entry in reader.entries
        if entry.score is not None and entry.score.reward is not None
    ]
    assert {entry.trajectory_id for entry in scored} >= {
        name for ids in trained(config).values() for name in ids
    }
    assert all(reader.load(entry).sequences[0].versions()[0] >= 0 for entry in scored)
    spans = json.loads((run_dir(config) / "trace.json").read_text())
    assert {span["pid"] for span in spans if span.get("ph") == "X"} >= {ENGINES}
    assert_trained_once(config)
    assert_no_processes(config)


def test_an_environment_that_never_starts_ends_the_run_after_a_few_tasks(tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        task={"env": "tests.support.game:Broken"},
        rollout={"groups_per_step": 16, "max_running": 4},
    )
    summary = run(config)
    assert "no attempt at game has started its environment, and those at 6 tasks" in summary.error
    assert re.search(r"reset raised KeyError: 'map_\d+' \(.*game\.py:\d+\)", summary.error)
    assert summary.account.balanced


def test_success_is_reported_only_if_an_environment_defines_it(tmp_path: Path) -> None:
    """Every reward is above 0; the periodic evaluation that falls after the last step
    is not the only evaluation.
    """
    config = make_config(
        tmp_path,
        task={"env": "tests.support.game:Rewarded"},
        eval={"every": 9, "episodes": 2, "stop_at": 0.0},
    )
    summary = run(config)
    assert (summary.error, summary.success_rate, summary.eval_episodes) == ("", {}, {"game": 4})
    assert 0.25 <= summary.mean_reward["game"] <= 1.25
    assert (summary.steps, summary.ended_by) == (4, "")
    assert all(
        line["success"] == {} for line in [*lines(config, "step"), *lines(config, "evaluation")]
    )
    assert [line["step"] for line in lines(config, "evaluation") if not line["final"]] == [0, 4]
    assert (
        sum(
            "eval.stop_at needs a success rate" in line["message"]
            for line in lines(config, "warning")
        )
        == 1
    )


def test_truncated_turns_are_counted_and_marked(tmp_path: Path) -> None:
    config = make_config(tmp_path, task={"max_turn_tokens": 1})
    summary = run(config)
    assert summary.error == ""
    assert summary.cut_turns == {"game": summary.turns}
    assert all(sum(line["cut_turns"].values()) == line["turns"] for line in lines(config, "step"))
    reader = TrajectoryReader(run_dir(config) / "trajectories")
    spans = [
        turn
        for entry in reader.entries
        for sequence in reader.load(entry).sequences
        for turn in sequence.turns
    ]
    assert {turn.finish_reason for turn in spans} == {"length"}


def test_reaching_the_target_ends_the_run(tmp_path: Path) -> None:
    summary = run(make_config(tmp_path, steps=40, eval={"every": 1, "episodes": 1, "stop_at": 0.0}))
    assert summary.steps < 40
    assert summary.ended_by == "eval.stop_at was reached at step 0"


def test_the_journal_replays_to_identical_commands(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    summary = run(config)
    replayed = replay(config)
    assert replayed.events > 100
    assert replayed.differing == 0
    replayed.core.check()
    assert replayed.core.account() == summary.account
    assert replayed.core.finished


def test_a_killed_engine_fails_its_turns_and_is_restarted(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    fault(config, "kill-engine")
    summary = run(config)
    assert (summary.error, summary.steps) == ("", 4)
    assert summary.watchdog["engine_restarted"] == 1
    (warning,) = [line for line in lines(config, "warning") if "restarted" in line["message"]]
    assert "SIGKILL" in warning["message"]
    assert summary.account.balanced
    assert_trained_once(config)
    assert replay(config).differing == 0
    assert_no_processes(config)


def test_an_environment_may_change_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))  # child processes import `tests`, in any directory
    make_config(tmp_path)
    task = {"env": "tests.support.game:Wanderer"}
    config = make_config(tmp_path, task=task, run={"dir": "here"}, model={"path": "model"})
    fault(config, "kill-engine")
    fault(config, "kill-trainer-2")
    summary = run(config)
    assert Path.cwd() == Path("/")
    monkeypatch.chdir(tmp_path)
    assert (summary.error, summary.steps) == ("", 4)
    assert (summary.watchdog["engine_restarted"], summary.watchdog["trainer_restarted"]) == (1, 1)
    assert_trained_once(config)


def test_a_stuck_engine_is_named_and_replaced(tmp_path: Path) -> None:
    config = make_config(tmp_path, watchdog={"turn_s": 1.0}, engines={"count": 1})
    fault(config, "stick-engine")
    summary = run(config)
    assert (summary.error, summary.steps) == ("", 4)
    assert summary.watchdog["engine_restarted"] == 1
    assert_trained_once(config)


@pytest.mark.variants
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_trainer_returns_to_its_checkpoint(tmp_path: Path, ranks: int) -> None:
    """Whichever rank is killed, all of them return."""
    config = make_config(tmp_path, trainer={"ranks": ranks})
    fault(config, "kill-trainer-2")
    summary = run(config)
    assert (summary.error, summary.steps) == ("", 4)
    assert summary.watchdog["trainer_restarted"] == 1
    assert summary.account.balanced
    assert_trained_once(config)
    assert replay(config).differing == 0
    assert_no_processes(config)


def test_a_full_disk_fails_one_checkpoint_and_not_the_run(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    fault(config, "full-disk")
    summary = run(config)
    assert (summary.error, summary.steps) == ("", 4)
    assert summary.watchdog["checkpoint_failed"] == 1
    assert any("no space left" in line["message"] for line in lines(config, "warning"))


def test_a_nonfinite_loss_ends_the_run_and_names_the_batch(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    fault(config, "nan-2")
    summary = run(config)
    assert summary.steps == 2
    assert "no luck; batch of groups g" in summary.error
    assert "last good checkpoint: step 2" in summary.error
    assert (run_dir(config) / "checkpoints" / "step-000002" / "trainer.json").exists()
    assert summary.account.balanced
    assert summary.account.in_flight == 0
    assert_no_processes(config)


@pytest.mark.parametrize(
    ("name", "error"),
    [("no-engine", "no engine is left"), ("no-trainer", "the trainer failed 3 times")],
)
def test_a_process_that_cannot_start_ends_the_run_with_its_reason(
    tmp_path: Path, name: str, error: str
) -> None:
    config = make_config(tmp_path, watchdog={"restarts": 2})
    fault(config, name)
    summary = run(config)
    assert error in summary.error
    assert "cannot start" in summary.error  # the end of its log
    assert (summary.steps, summary.account.started) == (0, 0)
    assert_no_processes(config)
    (tmp_path / "model" / name).unlink()
    assert run(config, resume=True).steps == 4


def test_a_trainer_that_can_never_start_is_started_once(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    fault(config, "refused")
    summary = run(config)
    assert summary.error == "the trainer cannot continue: the fake warm-up is not finite"
    assert "trainer_restarted" not in summary.watchdog
    assert_no_processes(config)
    (tmp_path / "model" / "refused").unlink()
    assert run(config, resume=True).steps == 4


@pytest.mark.variants
@pytest.mark.parametrize("step", [0, 2])
def test_a_killed_controller_resumes_to_the_same_totals(tmp_path: Path, step: int) -> None:
    config = make_config(tmp_path)
    fault(config, f"kill-controller-{step}")
    died = controller(config)
    assert died.wait(60) == -signal.SIGKILL
    assert_no_processes(config)
    summary = run(config, resume=True)
    assert (summary.error, summary.steps) == ("", 4)
    assert summary.account.balanced
    assert (summary.account.trained, summary.account.in_flight) == (16, 0)
    assert_trained_once(config)
    assert lines(config, "resumed")[0]["differing"] == 0
    assert [line["step"] for line in lines(config, "step")][-1] == 3
    times = [
        line["at"]
        for kind in ("started", "step", "resumed", "finished")
        for line in lines(config, kind)
    ]
    assert max(times) == lines(config, "finished")[0]["at"]
    assert_no_processes(config)


@pytest.mark.variants
@pytest.mark.parametrize("mode", ["sync", "one_step", "partial", "bounded", "decoupled"])
def test_rollouts_of_a_killed_controller_continue(tmp_path: Path, mode: str) -> None:
    """The controller dies while the environments of all rollouts wait, after a turn."""
    gate = tmp_path / "open"
    config = make_config(tmp_path, options={"wait": str(gate)}, rollout={"mode": mode})
    died = controller(config)
    until_turns_done(config, 4)
    died.kill()
    died.wait(60)
    gate.touch()
    summary = run(config, resume=True)
    assert (summary.error, summary.steps, summary.account.balanced) == ("", 4, True)
    (resumed,) = lines(config, "resumed")
    assert resumed["recorded"] == summary.continued >= 4
    assert_trained_once(config)
    assert sum(event.replayed for event in turns_done(config)) >= 4
    assert not (run_dir(config) / "turns").exists()


@pytest.mark.parametrize("mode", mostly_slow(["sync", "bounded", "decoupled"], {"bounded"}))
def test_an_evaluation_of_a_killed_controller_continues(tmp_path: Path, mode: str) -> None:
    """The controller dies while half of the episodes are scored, and the others wait
    after a turn: none is drawn again, and no turn is sampled again.
    """
    gate = tmp_path / "open"
    config = make_config(
        tmp_path,
        steps=1,
        task={"env": "tests.support.game:HeldOut"},
        options={"wait": str(gate)},
        rollout={"mode": mode},
        eval={"final_episodes": 4},
    )
    died = controller(config)
    until_turns_done(config, 4, name="e")
    while (evaluation := replay(config).core.state.evaluations.current) is None or (
        sum(map(len, evaluation.rewards.values())) < 2
    ):
        time.sleep(0.01)
    died.kill()
    died.wait(60)
    gate.touch()
    summary = run(config, resume=True)
    assert (summary.error, summary.steps, summary.continued) == ("", 1, 2)
    assert [sum(line["episodes"].values()) for line in lines(config, "evaluation")] == [4]
    repeated = [event for event in turns_done(config, name="e") if event.replayed]
    assert (len(repeated), len({event.trajectory_id for event in repeated})) == (2, 2)
    events = [event for _, event, _ in Replay(run_dir(config) / "journal.bin", config)]
    assert not any(isinstance(event, GroupSubmitted) for event in events), "none is drawn again"
    assert lines(config, "resumed")[0]["differing"] == 0
    assert_no_processes(config)


@pytest.mark.extended
def test_a_finished_run_may_continue_with_more_steps(tmp_path: Path) -> None:
    config = make_config(tmp_path, steps=2)
    run(config)
    assert run(config, resume=True).steps == 2  # the run is complete already
    longer = make_config(tmp_path, steps=4)
    summary = run(longer, resume=True)
    assert (summary.error, summary.steps, summary.account.balanced) == ("", 4, True)
    assert_trained_once(longer)


def test_a_run_is_not_resumed_with_another_seed_and_loses_nothing(tmp_path: Path) -> None:
    config = make_config(tmp_path, steps=2)
    run(config)
    other = config.model_copy(update={"run": config.run.model_copy(update={"seed": 77})})
    before = RunDir(Path(config.run.dir) / config.run.name).config.read_bytes()
    with pytest.raises(ConfigError, match=r"^run\.seed must stay as the run began, 5, got 77"):
        run(other, resume=True)
    assert RunDir(Path(config.run.dir) / config.run.name).config.read_bytes() == before
    assert run(config, resume=True).steps == 2


class FullDisk(Silent):
    """From step 1 on, the disk has no space for the file `name`."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._name, self._patch, self._write = name, monkeypatch, os.pwrite

    def line(self, line: Mapping[str, Any]) -> None:
        if line["kind"] == "step" and line["step"] == 1:
            self._patch.setattr(os, "pwrite", self.write)

    def write(self, fd: int, data: bytes, offset: int) -> int:
        if Path(f"/proc/self/fd/{fd}").readlink().name != self._name:
            return self._write(fd, data, offset)
        if len(data) > 1:
            return self._write(fd, data[:1], offset)  # a disk fills up in the middle of a write
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.variants
@pytest.mark.parametrize("name", ["journal.bin", "000000.bin", "metrics.jsonl", "trace.json"])
def test_a_full_disk_stops_the_run_with_one_error_and_it_resumes_later(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(DiskError) as caught:
        train(config, progress=FullDisk(name, patch), programs=FAKES)
    assert re.fullmatch(
        rf"cannot write .*/{name}: No space left on device; last good checkpoint: step \d; \d+ "
        r"started = .*; use --resume once there is space",
        str(caught.value),
    )
    assert_no_processes(config)
    summary = run(config, resume=True)
    assert (summary.error, summary.steps, summary.account.balanced) == ("", 4, True)
    assert_trained_once(config)
    assert lines(config, "resumed")[0]["differing"] == 0
    assert {line["step"] for line in lines(config, "step")} == {0, 1, 2, 3}


class Deleted(Silent):
    """Once the first step is trained, the trajectories are deleted."""

    def __init__(self, segment: Path) -> None:
        self._segment = segment

    def line(self, line: Mapping[str, Any]) -> None:
        if line["kind"] == "step" and line["step"] == 0:
            self._segment.unlink()


def test_trajectories_that_are_deleted_end_the_run_by_their_name_and_it_resumes(
    tmp_path: Path,
) -> None:
    config = make_config(tmp_path)
    segment = RunDir(tmp_path / "run").trajectories / "000000.bin"
    with pytest.raises(CorruptJournalError) as caught:
        train(config, progress=Deleted(segment), programs=FAKES)
    assert str(caught.value) == (
        f"{segment} was deleted; bring it back; without it, `--resume` drops its trajectories as "
        "world_lost"
    )
    assert_no_processes(config)
    summary = run(config, resume=True)
    assert (summary.error, summary.steps, summary.account.balanced) == ("", 4, True)


class Buggy(Silent):
    """Stands for a bug of ours: it raises when the third step is shown."""

    def line(self, line: Mapping[str, Any]) -> None:
        if line["kind"] == "step" and line["step"] == 2:
            raise AssertionError("a bug of ours")


def test_a_bug_of_ours_is_a_clean_crash_from_which_the_run_resumes(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with pytest.raises(AssertionError, match="a bug of ours"):
        train(config, progress=Buggy(), programs=FAKES)
    assert_no_processes(config)
    summary = run(config, resume=True)
    assert (summary.error, summary.steps, summary.account.balanced) == ("", 4, True)
    assert_trained_once(config)


def test_an_interrupt_ends_the_run_in_order(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    config = make_config(tmp_path, steps=10_000, options={"wait": str(gate)})
    process = controller(config)
    wait_for(lambda: (tmp_path / "model" / "pids").exists() and len(pids(config)) == 3)
    gate.touch()
    wait_for(lambda: (tmp_path / "model" / "trained.jsonl").exists())
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    printed = json.loads((tmp_path / "printed").read_text())
    assert (printed["interrupted"], printed["error"]) == (True, "")
    written = json.loads((run_dir(config) / "summary.json").read_text())
    account = written["account"]
    ends = (
        account["trained"]
        + sum(account["dropped"].values())
        + account["cancelled"]
        + account["buffered"]
    )
    assert account["started"] == ends
    assert (run_dir(config) / "checkpoints" / f"step-{printed['steps']:06d}").is_dir()
    assert_no_processes(config)


def test_a_second_interrupt_ends_the_run_at_once(tmp_path: Path) -> None:
    config = make_config(tmp_path, options={"wait": str(tmp_path / "gate")})
    process = controller(config)
    wait_for(lambda: (tmp_path / "model" / "pids").exists() and len(pids(config)) == 3)
    wait_for(lambda: (run_dir(config) / "checkpoints" / "step-000000").exists())
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) != 0
    assert_no_processes(config)
    (tmp_path / "gate").touch()
    assert run(config, resume=True).steps == 4
    assert_trained_once(config)


def test_a_run_directory_belongs_to_one_controller(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with (
        RunDir.claim(config, resume=False),
        pytest.raises(ConfigError, match=f"in use by .* process {os.getpid()}"),
    ):
        RunDir.claim(config, resume=False)
    RunDir.claim(config, resume=False).release()  # nothing was written: the run is still fresh
    with pytest.raises(ConfigError, match="found no config"):
        RunDir.claim(config, resume=True)
    run(config)
    with pytest.raises(ConfigError, match="holds a run already"):
        run(config)


def wait_for(condition: object) -> None:
    """Wait until another process has come so far."""
    assert callable(condition)
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "the other process did not come so far"
        time.sleep(0.01)


def test_a_run_killed_at_its_start_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(life, "recover", Mock(side_effect=AssertionError("killed")))
        with pytest.raises(AssertionError, match="killed"):
            run(config)
    assert run(config, resume=True).steps == 4
