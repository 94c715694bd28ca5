"""`rollweave advise` answers a small question, and refuses what it cannot answer."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rollweave.cli.main import app
from rollweave.schema.config.loading import loads
from rollweave_sim.run import simulate
from tests.support.recorded_runs import recorded_run

CONFIG = """
[run]
name = "small"
[sim]
model = "qwen2.5-7b"
gpu = "h100"
[trainer]
ranks = 4
[[tasks]]
env = "dapo-math"
max_tokens = 18432
max_turn_tokens = 16384
[rollout]
groups_per_step = 2
group_size = 2
[engines]
count = 4
[watchdog]
turn_s = 3600.0
"""


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollweave_sim.command_advise.cores", lambda: 1)


def run(tmp_path: Path, *options: str, config: str = CONFIG) -> Result:
    path = tmp_path / "small.toml"
    path.write_text(config)
    return CliRunner().invoke(app, ["advise", str(path), *options])


def answer(result: Result) -> Any:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.extended
def test_the_answer_can_be_simulated_and_is_explained(tmp_path: Path) -> None:
    result = run(tmp_path, "--price", "2", "--json")
    advice = answer(result)
    assert advice["gpus"] == {"h100": {"gpu": "h100", "gpus": 8, "price": 2.0}}
    best = advice["best"]
    assert 1 <= len(best) <= 5
    assert "sync" in {one["mode"] for one in best}
    seconds = [one["step_s"] for one in best]
    assert seconds == sorted(seconds)
    for one in best:
        low, high = one["step_s_range"]
        assert low <= one["step_s"] <= high
        assert one["cost"] == pytest.approx(8 * 2 * one["step_s"] / 3600)
        assert one["staleness"]["mean"] == 0 or one["mode"] != "sync"
        engines = sum(group["count"] * group["degree"] for group in one["engines"])
        assert engines == (8 if one["colocated"] else 8 - one["trainer_gpus"])
        assert sum(one["engines_time"].values()) == pytest.approx(1)
        assert one["tokens_per_s"] * one["step_s"] == pytest.approx(one["step_tokens"])
    assert set(advice["saved_if_halved"]) == {"engines", "trainer", "environment", "weights"}
    told = [line for line in result.stderr.splitlines() if line.startswith("  so far ")]
    assert told, "the search says what it knows"
    assert all(line.endswith("tokens/s") and " a step, " in line for line in told)
    assert advice["left_out"][0].startswith("engines of degree 8 on h100: tp must divide the 28")
    assert advice["left_out"][1].startswith("training on h100: ")
    lines = result.stdout.splitlines()
    shown = lines.index(next(line for line in lines if line.startswith("Question: ")))
    assert lines[shown].startswith("Question: 8 h100, qwen2.5-7b, dapo-math, 2 groups of 2")
    assert lines[shown + 1].startswith("Fastest: mode ")
    assert " cost " in lines[1]
    assert "x GPUs" in lines[1]
    assert "If one part were twice as fast, a step would be shorter by: " in result.stdout
    settings = "\n".join(advice["config"])
    assert settings in result.stdout
    limits = CONFIG[CONFIG.index("[[tasks]]") : CONFIG.index("[rollout]")]
    tasks = '[run]\nname = "again"\nsteps = 2\n' + limits + "[eval]\nfinal_episodes = 0\n"
    outcome = simulate(loads(tasks + settings))
    assert outcome.gpus == 8
    assert outcome.summary.steps == 2


@pytest.mark.slow
def test_equal_questions_have_equal_answers(tmp_path: Path) -> None:
    first, second = run(tmp_path, "--json"), run(tmp_path, "--json")
    assert answer(first) == answer(second)
    assert {one["cost"] for one in answer(first)["best"]} == {None}
    assert " cost " not in first.stdout.splitlines()[1]


@pytest.mark.extended
def test_engines_and_trainer_may_have_different_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, number in {"MOST": 6, "FEWEST": 1, "FINALISTS": 2}.items():  # fewer than users get
        monkeypatch.setattr(f"rollweave_sim.advise.{name}", number)
    options = ("--hardware", "h20", "--gpus", "2", "--hardware", "h800", "--gpus", "4")
    result = run(tmp_path, *options, "--json")
    advice = answer(result)
    assert {one["trainer_pool"] for one in advice["best"]} == {"h800"}
    assert {group["pool"] for one in advice["best"] for group in one["engines"]} >= {"h20"}
    assert any("these GPUs only generate" in line for line in advice["left_out"])
    assert '[pools.h20]\nresource = "H20"' in "\n".join(advice["config"])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--gpus", "1"], "gpus must suffice for engines and a trainer"),
        (["--gpus", "2", "--gpus", "4"], "--gpus must be given once for each --hardware"),
        (["--gpus", "8", "--hardware", "h1"], "gpu must be one of"),
        (["--price", "1", "--price", "2"], "--price must be given once for each kind"),
        (["--model", "gpt"], "model must be one of"),
        (["--workload", "sew"], "did you mean 'swe'"),
    ],
)
def test_wrong_questions_have_one_error(tmp_path: Path, options: list[str], error: str) -> None:
    result = run(tmp_path, *options)
    assert result.exit_code == 2
    assert error in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def test_a_question_needs_a_configuration_or_its_options() -> None:
    result = CliRunner().invoke(app, ["advise", "--gpus", "8"])
    assert result.exit_code == 2
    assert "CONFIG must be given, or else" in result.stderr


@pytest.mark.slow
def test_a_run_is_advised_by_its_own_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollweave_sim.command_advise.cores", lambda: 2)
    path = recorded_run(tmp_path / "run")
    result = CliRunner().invoke(app, ["advise", str(path), "--json"])
    advice = answer(result)
    own = [one for one in advice["best"] if one["this_run"]]
    assert [(one["mode"], one["engines"]) for one in own] == [("bounded", 1)]
    assert own[0]["step_s"] == pytest.approx(advice["measured_step_s"], rel=0.25)
    assert {one["engines"] for one in advice["best"]} == {1}
    assert "were measured" in result.stdout


def test_a_run_takes_no_other_options(tmp_path: Path) -> None:
    (tmp_path / "journal.bin").touch()
    result = CliRunner().invoke(app, ["advise", str(tmp_path), "--gpus", "8"])
    assert result.exit_code == 2
    assert "--json must be the only option beside RUN" in result.stderr
