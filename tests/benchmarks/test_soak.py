"""A soak detects lost trajectories, trajectories trained twice and mixed versions; and
a short one, of real processes, finds none.
"""

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.contract import Result
from benchmarks.soak.bench import QUICK, soak
from benchmarks.soak.lineage import Lineage, unaccounted, versions_of
from benchmarks.soak.run_under_test import StepCounter
from rollweave.schema.base import GroupId, TrajectoryId
from rollweave.schema.commands import GroupRef, TrainStep
from rollweave.schema.events import StepTrained, TimerFired
from rollweave.schema.work import SegmentKind
from tests.support.sequences import one_token_each

SMALL = dataclasses.replace(
    QUICK,
    settings=(
        *QUICK.settings,
        "model.scratch.hidden=32",
        "model.scratch.layers=1",
        "rollout.groups_per_step=2",
        "rollout.group_size=4",
        "rollout.max_running=24",
        "engines.count=2",
        "run.checkpoint_every=2",
        "eval.final_episodes=8",
        "watchdog.train_s=3000",
        "watchdog.turn_s=60",
        "watchdog.restarts=20",
    ),
    rounds=5,
    every_s=0.0,
    trainer_at=3,
    controller_at=(5,),
    more=3,
)


def trained(lineage: Lineage, step: int, *names: str) -> None:
    """Record a step on groups of one: its request and its end."""
    groups = tuple(
        GroupRef(id=GroupId(name), name="lake", trajectory_ids=(TrajectoryId(name),))
        for name in names
    )
    lineage.record(TimerFired(), [TrainStep(step=step, part=0, parts=1, groups=groups)])
    lineage.record(StepTrained(epoch=0, step=step, part=0), [])


def test_a_step_that_is_trained_again_counts_as_it_was_trained_last() -> None:
    lineage = Lineage()
    trained(lineage, 0, "a", "b")
    trained(lineage, 1, "c", "d")
    trained(lineage, 2, "e", "f")
    trained(lineage, 1, "d", "g")  # the trainer was lost, and went back to its checkpoint
    trained(lineage, 2, "c", "e")
    assert lineage.ids == ["a", "b", "d", "g", "c", "e"]
    trained(lineage, 3, "a")
    assert sorted(lineage.ids).count("a") == 2


def test_steps_are_counted_as_their_lines_become_complete(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    steps = StepCounter(path)
    steps.read()
    assert (steps.count, steps.last) == (0, -1), "there is no file yet"
    lines = [
        json.dumps(line)
        for line in ({"kind": "started"}, {"kind": "step", "step": 0}, {"kind": "step", "step": 1})
    ]
    path.write_text("\n".join(lines))
    steps.read()
    assert (steps.count, steps.last) == (1, 0), "the last line is not whole"
    with path.open("a") as file:
        file.write('\n{"kind": "evaluation"}\n{"kind": "step", "step": 1}\n')
    steps.read()
    assert (steps.count, steps.last) == (3, 1), "a step that was lost is there twice"


def test_only_sampled_tokens_have_a_version() -> None:
    kinds = [
        (SegmentKind.PROMPT, -1),
        (SegmentKind.OUTPUT, 4),
        (SegmentKind.OBSERVATION, -1),
        (SegmentKind.OUTPUT, 4),
    ]
    assert versions_of([one_token_each(*kinds)]) == {4}
    assert versions_of([one_token_each(*kinds), one_token_each((SegmentKind.OUTPUT, 5))]) == {4, 5}


def test_lost_and_falsely_trained_trajectories_are_unaccounted_for() -> None:
    account = {
        "started": 20,
        "trained": 10,
        "dropped": {"env_error": 2, "evicted": 1},
        "cancelled": 3,
        "buffered": 4,
    }
    assert unaccounted(account, trained=10) == 0
    assert unaccounted({**account, "started": 22}, trained=10) == 2
    assert unaccounted(account, trained=9) == 1


def test_a_broken_promise_is_named() -> None:
    kept = Result(
        bench="soak",
        figures={"unaccounted": 0, "mixed_versions": 0, "steps": 9, "leftovers": None},
        conditions={},
    )
    assert kept.broken == []
    assert Result(
        bench="soak", figures={**kept.figures, "mixed_versions": 1}, conditions={}
    ).broken == ["mixed_versions"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_is_killed_in_every_way_and_nothing_is_lost() -> None:
    lines: list[str] = []
    result = soak(SMALL, progress=lines.append)
    figures = result.figures
    assert result.broken == [], lines
    assert {
        name: count for name, count in figures.items() if name.startswith(("killed", "stopped"))
    } == {
        "killed_engines": 4,
        "stopped_engines": 1,
        "killed_relays": 2,
        "killed_trainer": 1,
        "killed_controller": 1,
    }
    assert figures["rounds_survived"] == SMALL.rounds
    assert figures["replayed_otherwise"] == 0
    assert figures["steps"] > SMALL.more
