"""An evaluation is a run with the same configuration and no training."""

import math
from pathlib import Path

import msgspec
import pytest

from rollweave.cli import evaluate
from rollweave.cli.evaluate import evaluation_config, half_width, step_of_run
from rollweave.core.reading.status import Account
from rollweave.record.summary import Summary
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError
from tests.support.synthetic_run import config_of


def evaluation_of(
    tmp_path: Path, *, episodes: int | None = None, temperature: float | None = None
) -> RunConfig:
    run = tmp_path / "run"
    subject = step_of_run(config_of(run), run, 7, tmp_path / "hf")
    return evaluation_config(subject, episodes=episodes, temperature=temperature)


def test_an_evaluation_trains_nothing_and_keeps_the_tasks(tmp_path: Path) -> None:
    config = evaluation_of(tmp_path)
    assert config.run.steps == 0
    assert config.warmup.steps == 0
    assert config.model.path == str(tmp_path / "hf")
    assert config.model.scratch is None
    assert config.tasks == config_of(tmp_path / "run").tasks
    assert config.eval.final_episodes == 200


def test_the_directory_names_the_evaluation(tmp_path: Path) -> None:
    config = evaluation_of(tmp_path, episodes=50, temperature=0.7)
    assert config.run.name == "step-7-t0.7-n50"
    assert Path(config.run.dir) == tmp_path / "run" / "evaluations"
    assert config.eval.temperature == 0.7


def test_refuses_an_infinite_temperature(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--temperature must be a finite number, got inf"):
        evaluation_of(tmp_path, temperature=math.inf)


def test_refuses_a_temperature_by_which_logits_overflow(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--temperature must be 0, or at least 1e-30, got 1e-40"):
        evaluation_of(tmp_path, temperature=1e-40)


def test_refuses_more_episodes_than_there_are_tasks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--episodes must be at most 1000000, got 1{20 * '0'}"):
        evaluation_of(tmp_path, episodes=10**20)


@pytest.mark.parametrize(("rate", "count"), [(0.0, 10), (0.5, 10), (0.93, 200), (1.0, 200)])
def test_the_interval_solves_wilsons_equation(rate: float, count: int) -> None:
    """The ends of the interval are those p that differ from the rate by 1.96 standard
    deviations under p.
    """
    z = 1.96
    center = (rate + z * z / (2 * count)) / (1 + z * z / count)
    for end in (center - half_width(rate, count), center + half_width(rate, count)):
        assert abs(end - rate) == pytest.approx(
            z * math.sqrt(max(0.0, end * (1 - end)) / count), abs=1e-9
        )


def test_the_interval_is_over_distinct_tasks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    account = Account(started=0, trained=0, dropped={}, cancelled=0, buffered=0, in_flight=0)
    once = Summary(
        success_rate={"lake": 0.5},
        mean_reward={"lake": 0.5},
        eval_episodes={"lake": 200},
        steps=0,
        trajectories=0,
        tokens=0,
        wall_s=1.0,
        staleness_max=0,
        inherent_staleness={},
        stop_reasons={},
        account=account,
        retried={},
        watchdog={},
        idle={},
    )
    for tasks, shown, episodes in (({"lake": 25}, 25, "200 of 25 tasks"), ({}, 200, "200")):
        evaluate._show(msgspec.structs.replace(once, eval_tasks=tasks), "lake", tmp_path)
        row = capsys.readouterr().out.splitlines()[1]
        assert f"{half_width(0.5, shown):.3f}" in row
        assert row.rstrip().endswith(episodes)
