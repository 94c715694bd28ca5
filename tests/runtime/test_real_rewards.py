"""Whole runs whose rewards are those of a judge: several share one that is too small
for them, its verdicts about groups are what is trained on, and a killed controller asks
about the same groups again.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollweave.core.state import GroupStatus
from rollweave.record.store import TrajectoryReader
from rollweave.schema.config.root import RunConfig
from rollweave.schema.work import Purpose
from tests.support.judge_thread import AT_ONCE, Judge, serving
from tests.support.real_runs import GROUPS, MEMBERS, lake, living, run_dir, run_to_end, summary


@pytest.fixture
def judge() -> Iterator[Judge]:
    with serving() as judge:
        yield judge


def judged(directory: Path, judge: Judge, *, pairwise: bool, **sections: Any) -> RunConfig:
    asked = {"model": "m", "rubric": "Be fair.", "pairwise": pairwise}
    return lake(
        directory,
        rewards=[{"name": "judge", "weight": 0.5, "url": judge.url, "judge": asked}],
        eval={"every": 0, "final_episodes": 2},
        **sections,
    )


def trained_rewards(config: RunConfig) -> dict[str, list[float]]:
    """Return the judge's rewards of each group's members that have a final reward."""
    reader, groups = TrajectoryReader(run_dir(config) / "trajectories"), dict[str, list[float]]()
    for entry in reader.entries:
        if entry.purpose is Purpose.TRAIN and entry.score is not None:
            name = str(entry.trajectory_id).partition(".")[0]
            if "judge" in entry.score.rewards and entry.score.reward is not None:
                groups.setdefault(name, []).append(entry.score.rewards["judge"])
    return groups


def check_shares(config: RunConfig) -> None:
    """Check that the members of each group share the wins of its comparisons."""
    groups = trained_rewards(config)
    assert len(groups) >= GROUPS * config.run.steps
    for shares in groups.values():
        assert len(shares) == MEMBERS
        assert sum(shares) == pytest.approx(MEMBERS / 2)


@pytest.mark.slow
def test_three_runs_share_a_judge_that_is_too_small_for_them(tmp_path: Path, judge: Judge) -> None:
    configs = [
        judged(tmp_path / "graded", judge, pairwise=False),
        judged(tmp_path / "paired", judge, pairwise=True, workers={"count": 1}),
        judged(tmp_path / "decoupled", judge, pairwise=True, rollout={"mode": "decoupled"}),
    ]
    with contextlib.ExitStack() as stack:
        for life in [stack.enter_context(living(config)) for config in configs]:
            life.finish()
    for config in configs:
        account = summary(config)["account"]
        assert account["trained"] == GROUPS * MEMBERS * config.run.steps
        assert "reward_unavailable" not in account["dropped"]
    assert judge.refused > 0, "the judge was too small"
    assert judge.most_at_once <= AT_ONCE
    assert set(judge.answers.values()) == {1}, "no reward is computed twice"
    runs = {key.partition("/")[0] for key in judge.answers}
    assert len({run for run in runs if not run.startswith("dry-run")}) == 3
    for config in configs[1:]:
        check_shares(config)


@pytest.mark.extended
def test_a_killed_controller_compares_the_same_groups_again(tmp_path: Path, judge: Judge) -> None:
    config = judged(tmp_path, judge, pairwise=True, warmup={"steps": 0})
    with living(config) as life:
        life.until(lambda core: bool(core.state.trajectories), "an attempt")
        judge.open.clear()
        core = life.until(
            lambda core: any(
                group.status is GroupStatus.COMPARING for group in core.state.groups.values()
            ),
            "a comparison",
        )
        (group, *_) = [
            group.id
            for group in core.state.groups.values()
            if group.status is GroupStatus.COMPARING
        ]
        life.kill()
    judge.open.set()
    run_to_end(config, resume=True)
    assert summary(config)["account"]["trained"] == GROUPS * MEMBERS * config.run.steps
    check_shares(config)
    assert group in trained_rewards(config), "its members were not rolled out again"
