"""The real engine and the real trainer in one run.

These tests are slow only because of imports.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from rollweave.record.journal import Replay
from rollweave.record.store import TrajectoryReader
from rollweave.record.summary import Summary
from rollweave.runtime.launch import train
from rollweave.schema.config.root import RunConfig
from tests.support.real_runs import lake


def check(config: RunConfig, summary: Summary) -> None:
    assert (summary.error, summary.steps) == ("", config.run.steps)
    assert summary.account.balanced
    assert summary.account.trained == 8 * config.run.steps
    assert summary.eval_episodes == {"lake": 8}
    run = Path(config.run.dir) / config.run.name
    replay = Replay(run / "journal.bin", config)
    assert replay.finish().account() == summary.account
    assert replay.differing == 0
    reader = TrajectoryReader(run / "trajectories")
    for entry in reader.entries:
        for sequence in reader.load(entry).sequences:
            assert all(logprob <= 0 for logprob in sequence.logprobs)
            assert sequence.versions()[1] <= config.run.steps


@pytest.mark.slow
def test_a_run_in_threads(tmp_path: Path) -> None:
    config = lake(tmp_path)
    check(config, train(config, inproc=True))


@pytest.mark.slow
def test_a_run_in_processes_that_continues_with_more_steps(tmp_path: Path) -> None:
    config = lake(tmp_path)
    check(config, train(config))
    longer = lake(tmp_path, run={"steps": 3})
    check(longer, train(longer, resume=True))


def test_the_controller_does_not_import_torch() -> None:
    """It shares its cores with engines and trainer, and starts in a second."""
    code = "import rollweave.runtime.launch, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
