"""Real engines whose places real ranks of the trainer take, and give back."""

import os
import signal
from pathlib import Path

import pytest

from rollweave.core.core import Core
from rollweave.core.state import TrainerStatus
from rollweave.record.journal import Replay
from rollweave.schema.commands import RestartTrainer, StartEngine, TrainStep, Warn
from rollweave.schema.config.root import RunConfig
from tests.support.core import alternating
from tests.support.kinds import of
from tests.support.real_runs import Lineage, check_totals, lake, living, run_dir, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = "tests.runtime.moving_ranks"
TRAINER = "rollweave.runtime.entrypoints.trainer"


def elastic(directory: Path, *, steps: int) -> RunConfig:
    return lake(
        directory,
        run={"steps": steps},
        rollout={"mode": "bounded"},
        engines={"count": 2, "max_slots": 4},
        trainer={"ranks": {"minimum": 1, "maximum": 2}},
        eval={"every": steps},
    )


def test_places_move_between_engines_and_ranks(tmp_path: Path) -> None:
    config, lineage = elastic(tmp_path, steps=5), Lineage()
    with living(config, program=PROGRAM) as life:
        summary = life.finish()
    with alternating():
        lineage.take(config)
        history = list(Replay(run_dir(config) / "journal.bin", config))
    lineage.check(config.run.steps)
    check_totals(config, summary)
    commands = [command for _, _, out in history for command in out]
    restarted = of(commands, RestartTrainer)
    assert [len(one.ranks) for one in restarted][:2] == [2, 1], "there and back"
    assert [one.step for one in of(commands, TrainStep)] == list(range(5)), "each step once"
    assert len(of(commands, StartEngine)) >= 1
    assert summary["scheduling"]["moved_ranks"] == len(restarted)
    assert "trainer_restarted" not in summary["watchdog"]
    told = [one.message for one in of(commands, Warn) if one.component == "trainer"]
    assert told[0].startswith("moves from 1 rank and 2 engines to 2 ranks and 1 engine: steps of ")
    assert told[1].startswith("continues with 2 ranks and 1 engine after ")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_is_killed_in_mid_move(tmp_path: Path, ranks: int) -> None:
    """It is killed while it saves its checkpoint, or while it starts with another."""
    config, lineage = elastic(tmp_path, steps=4), Lineage()

    def moving(core: Core) -> bool:
        saving = core.state.trainer.status is TrainerStatus.SAVING
        return saving if ranks == 1 else len(core.state.hosts.ranks) == ranks

    with alternating(), living(config, program=PROGRAM) as life:
        life.until(moving, "a move")
        victims = wait_for(lambda: life.children(TRAINER)[ranks - 1 :], "a rank", life)
        os.kill(victims[0], signal.SIGKILL)
        summary = life.finish()
        lineage.take(config)
    lineage.check(config.run.steps)
    check_totals(config, summary, losses=1)
    assert summary["watchdog"]["trainer_restarted"] >= 1
    assert summary["scheduling"]["moved_ranks"] >= 2
