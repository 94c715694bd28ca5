"""One suite for both worlds: their journals are judged by one referee, and hold the
same kinds of events and commands.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollweave.record.journal import Replay
from rollweave.schema.config.root import RunConfig
from rollweave_sim.run import directory_of, simulate
from tests.support.core import always_split
from tests.support.fake_runs import make_config, make_model, run, run_dir
from tests.support.referee import Referee

MODES = ("sync", "one_step", "stream", "partial", "bounded", "decoupled")


def live(directory: Path, mode: str, **sections: Any) -> tuple[RunConfig, Path]:
    """A run through real processes."""
    config = make_config(
        directory, **{**sections, "rollout": {**sections.get("rollout", {}), "mode": mode}}
    )
    assert run(config).error == ""
    return config, run_dir(config) / "journal.bin"


def simulated(directory: Path, mode: str, **sections: Any) -> tuple[RunConfig, Path]:
    """The same configuration, simulated."""
    run_config = make_config(
        directory, **{**sections, "rollout": {**sections.get("rollout", {}), "mode": mode}}
    )
    data = run_config.model_dump() | {"sim": {"model": "qwen3-8b"}}
    data["trainer"] |= {"ranks": 8}  # the simulated GPUs
    data["tasks"] = [
        task | {"env": "frozenlake", "tag": task["tag"] or "game"} for task in data["tasks"]
    ]
    config = RunConfig.model_validate(data)
    with directory_of(config) as at:
        assert simulate(config, run=at).summary.error == ""
    return config, at.journal


World = Callable[..., tuple[RunConfig, Path]]


def in_both_worlds(*fast: str) -> pytest.MarkDecorator:
    """Run a test in every mode. Modes are decisions of the core, which both worlds
    share: live runs of those that are not in `fast` are extended.
    """
    return pytest.mark.parametrize(
        ("world", "mode"),
        [
            pytest.param(
                world,
                mode,
                marks=[pytest.mark.extended] if world is live and mode not in fast else [],
            )
            for world in (live, simulated)
            for mode in MODES
        ],
    )


def judge(config: RunConfig, journal: Path) -> Referee:
    referee, replay = Referee(), Replay(journal, config)
    referee.watch(replay)
    assert replay.differing == 0
    return referee


@in_both_worlds("sync", "partial", "decoupled")
def test_a_run_keeps_the_contract(world: World, mode: str, tmp_path: Path) -> None:
    referee = judge(*world(tmp_path, mode, eval={"every": 2, "episodes": 2}))
    assert referee.owed() == []
    assert {
        "TurnDone",
        "RewardReady",
        "StepTrained",
        "WeightsLoaded",
        "CheckpointSaved",
        "RecordEvaluation",
    } <= referee.seen


@pytest.mark.parametrize("migration", ["rank", "gain"])
@pytest.mark.parametrize("world", [live, simulated])
def test_a_run_that_schedules_trajectories_keeps_the_contract(
    world: World, migration: str, tmp_path: Path
) -> None:
    rollout = {"scheduling": "trajectory", "group_size": 4, "max_running": 16}
    referee = judge(
        *world(
            tmp_path,
            "bounded",
            rollout=rollout,
            ablation={"changes": [migration]},
            engines={"count": 2, "max_slots": 2},
        )
    )
    assert referee.owed() == []
    assert {
        "Predict",
        "Harvest",
        "FitPredictor",
        "StepTrained",
    } <= referee.seen  # a live run may end before its predictor is up


@in_both_worlds("bounded")
def test_a_run_with_prefill_engines_keeps_the_contract(
    world: World, mode: str, tmp_path: Path
) -> None:
    engines = [{"phase": "prefill", "max_slots": 8}, {"phase": "decode", "max_slots": 8}]
    with always_split():
        referee = judge(*world(tmp_path, mode, engines=engines))
    assert referee.owed() == []
    assert {"PrefillDone", "Migrate", "MigrationDone", "TurnDone"} <= referee.seen


@pytest.mark.parametrize("world", [live, simulated])
def test_a_fleet_of_several_degrees_keeps_the_contract(world: World, tmp_path: Path) -> None:
    referee = judge(
        *world(tmp_path, "sync", engines=[{"count": 1, "degree": 2}, {"count": 2, "degree": 1}])
    )
    assert referee.owed() == []


@pytest.mark.parametrize("mode", ["sync", "bounded"])
@pytest.mark.parametrize("world", [live, simulated])
def test_a_run_with_relays_keeps_the_contract(world: World, mode: str, tmp_path: Path) -> None:
    referee = judge(*world(tmp_path, mode, engines={"count": 3}, weights={"relays": 2}))
    # the last weights may be unneeded
    assert [owed for owed in referee.owed() if not owed.startswith("take")] == []
    assert {"RelayJoined", "FetchWeights", "WeightsFetched", "WeightsLoaded"} <= referee.seen


@pytest.mark.parametrize("world", [live, simulated])
def test_a_colocated_run_with_relays_keeps_the_contract(world: World, tmp_path: Path) -> None:
    referee = judge(
        *world(
            tmp_path,
            "sync",
            trainer={"colocated": True},
            engines={"count": 3},
            weights={"relays": 2},
        )
    )
    assert [owed for owed in referee.owed() if not owed.startswith("take")] == []
    assert {"FetchWeights", "SuspendEngine", "WeightsLoaded", "StepTrained"} <= referee.seen
    assert "StageWeights" not in referee.seen


@pytest.mark.parametrize(
    ("world", "sample"), [(live, "ratio"), (simulated, "ratio"), (simulated, "td_error")]
)
def test_a_run_that_measures_groups_keeps_the_contract(
    world: World, sample: str, tmp_path: Path
) -> None:
    """The live trainer waits until there is a choice. With one engine nothing is
    consolidated.
    """
    make_model(tmp_path / "model")
    (tmp_path / "model" / "hold").write_text("14")
    rollout = {"groups_per_step": 1, "max_running": 16}
    referee = judge(
        *world(
            tmp_path,
            "decoupled",
            steps=12,
            rollout=rollout,
            buffer={"sample": sample},
            algorithm={"advantage": "gae"},
            engines={"count": 1},
        )
    )
    assert referee.owed() == []
    assert {"MeasureGroups", "GroupsMeasured", "StepTrained"} <= referee.seen


def test_both_worlds_have_the_same_kinds_of_events_and_commands(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    # In step with training, so that nothing grows stale on a machine that is busy
    # otherwise, and is cancelled.
    violations = [
        judge(*world(tmp_path / name, "sync")).seen
        for name, world in (("a", live), ("b", simulated))
    ]
    violations[1].discard("TimerFired")  # a live run of stand-ins is over before its timer
    assert violations[0] - {"TimerFired"} == violations[1]


@pytest.mark.parametrize("world", [live, simulated])
def test_cancelled_work_stops_once(world: World, tmp_path: Path) -> None:
    """With spare members: the slowest of each group are cancelled at any stage."""
    referee = judge(
        *world(tmp_path, "sync", rollout={"spare_members": 2, "spare_groups": 1, "max_running": 16})
    )
    assert referee.owed() == []
    assert "CancelTrajectory" in referee.seen
