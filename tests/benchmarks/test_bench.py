"""Results of benches: one line of JSON, correct figures, and a reason for every missing
one.
"""

import json
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from benchmarks import variants
from benchmarks.contract import Result, json_line
from benchmarks.harness import in_turn, ratio
from benchmarks.learning import GOALS, Goal
from benchmarks.learning import figures_of as learning_figures
from benchmarks.runs import MeasuredRun, example
from rollweave.cli.bench import format_figure
from rollweave.record.report.data import read_run
from rollweave.record.rundir import RunDir
from rollweave.record.summary import Summary
from rollweave.record.trace import TRAINER, Trace
from rollweave.schema.config.loading import load
from rollweave.schema.config.rollout import ModeName
from rollweave.schema.config.training import PUBLISHED_LOSSES, Correction
from tests.support.synthetic_run import STEP_S, write_run


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> MeasuredRun:
    run = write_run(tmp_path_factory.mktemp("bench") / "run")
    summary = msgspec.json.decode(run.summary.read_bytes(), type=Summary)
    return MeasuredRun(summary=summary, data=read_run(run), ready_s=2.0)


def test_the_line_of_json_has_the_four_parts() -> None:
    result = Result(
        bench="demo", figures={"a": 1.5, "b": None, "c": [1.0]}, conditions={"b": "not measured"}
    )
    line = json_line(result, {"cores": 2})
    assert "\n" not in line
    assert json.loads(line) == {
        "bench": "demo",
        "machine": {"cores": 2},
        "figures": {"a": 1.5, "b": None, "c": [1.0]},
        "conditions": {"b": "not measured"},
    }


def test_time_to_a_success_is_counted_from_readiness(measured: MeasuredRun) -> None:
    """Evaluations are every 10 steps; the slower task has 0.93 after 30 of them, and
    0.26 after 10.
    """
    assert measured.reached_s(0.9) == pytest.approx(30 * STEP_S)
    assert measured.reached_s(0.2) == pytest.approx(10 * STEP_S)
    assert measured.reached_s(0.99) is None
    assert measured.trained_s == pytest.approx(2.0 + 40 * STEP_S)


def test_figures_of_a_mode(measured: MeasuredRun) -> None:
    conditions: dict[str, object] = {}
    figures = variants.figures_of_mode(
        "sync", [measured, measured, measured], conditions, quick=False
    )
    assert figures["wall_s_sync"] == pytest.approx(30 * STEP_S)
    assert figures["step_s_sync"] == pytest.approx(STEP_S)
    assert figures["staleness_max_sync"] == 1
    assert 0.3 < figures["staleness_mean_sync"] < 0.8  # type: ignore[operator]
    engines = {name: value for name, value in figures.items() if name.startswith("engines_")}
    assert sum(value for value in engines.values() if isinstance(value, float)) == pytest.approx(
        1.0, abs=1e-3
    )
    assert conditions == {}


def test_a_mode_that_missed_the_target_has_no_time_but_a_reason(
    measured: MeasuredRun, tmp_path: Path
) -> None:
    short = MeasuredRun(
        summary=measured.summary,
        data=read_run(write_run(tmp_path / "short", steps=10)),
        ready_s=2.0,
    )
    conditions: dict[str, object] = {}
    figures = variants.figures_of_mode("sync", [measured, short], conditions, quick=False)
    assert figures["wall_s_sync"] is None
    assert conditions["wall_s_sync"] == "not measured: 1 of 2 seeds did not reach the target"


def test_figures_of_a_loss(measured: MeasuredRun, tmp_path: Path) -> None:
    """Evaluations are every 10 steps; the slower task has 0.93 after 30 of them."""
    conditions: dict[str, object] = {}
    figures = variants.figures_of_loss("ppo", [measured, measured], conditions, quick=False)
    assert (figures["reached_ppo"], figures["steps_ppo"]) == (2, 30)
    assert figures["steps_ppo_seeds"] == [30, 30]
    assert figures["seconds_ppo"] == pytest.approx(30 * STEP_S)
    assert 0.02 < figures["clip_fraction_ppo"] < 0.03  # type: ignore[operator]
    assert conditions == {}
    short = MeasuredRun(
        summary=measured.summary,
        data=read_run(write_run(tmp_path / "short", steps=10)),
        ready_s=2.0,
    )
    figures = variants.figures_of_loss("ppo", [measured, short], conditions, quick=False)
    assert (figures["reached_ppo"], figures["steps_ppo"]) == (1, None)
    assert conditions["steps_ppo"] == "not measured: 1 of 2 seeds did not reach the target"


def test_variants_are_configurations() -> None:
    path = example(variants.CONFIG)
    chosen = {
        bench: [load(path, [*one.settings, *own]) for own in one.variants.values()]
        for bench, one in variants.COMPARISONS.items()
    }
    algorithms = [config.algorithm for config in chosen["losses"]]
    assert {each.loss for each in algorithms} == set(PUBLISHED_LOSSES)
    assert {each.correction for each in algorithms} == set(get_args(Correction))
    scales = [config.lora and config.lora.scale for config in chosen["lora"]]
    assert scales == [None, 2.0, 2.0, 2.0], "the same scale with adapters of every rank"
    assert {config.rollout.mode for config in chosen["modes"]} == set(ModeName)


def test_contenders_take_turns_and_a_warm_up_does_not_count() -> None:
    called: list[tuple[str, int]] = []
    found = in_turn(
        {name: lambda number, name=name: called.append((name, number)) or name for name in "ab"},  # type: ignore[misc]
        2,
        warm_up=1,
    )
    assert called == [("a", -1), ("b", -1), ("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert found == {"a": ["a"] * 2, "b": ["b"] * 2}


def test_the_trace_has_the_bytes_of_each_version(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    trace = Trace(run.trace)
    for version in (0, 1):
        trace.span(TRAINER, "trainer", f"publish v{version}", 0.0, 1.0, nbytes=40 + version)
    trace.close()
    assert variants.published_bytes(run) == [40, 41]


def test_a_learning_bench_counts_seeds_that_reach_every_target_in_time(
    measured: MeasuredRun,
) -> None:
    rates = measured.summary.success_rate
    low = min(rates, key=lambda task: rates[task])
    goal = Goal(config="x.toml", targets=dict(rates), limit_s=measured.trained_s, seeds=2)
    figures = learning_figures(goal, [measured, measured], quick=False)
    assert figures["seeds_ok"] == 2
    assert figures[f"success_{low}"] == [rates[low]] * 2
    assert figures["wall_s"] == [round(measured.trained_s, 1)] * 2
    late = Goal(config="x.toml", targets=dict(rates), limit_s=measured.trained_s - 1, seeds=2)
    assert learning_figures(late, [measured], quick=False)["seeds_ok"] == 0
    missed = Goal(
        config="x.toml", targets=dict(rates) | {low: rates[low] + 0.01}, limit_s=1e9, seeds=2
    )
    figures = learning_figures(missed, [measured], quick=False)
    assert (figures["seeds_ok"], figures["success"]) == (0, [rates[low]])


def test_goals_are_those_of_the_examples() -> None:
    for goal in GOALS.values():
        config = load(example(goal.config), [])
        assert {task.name for task in config.tasks} == set(goal.targets)


@pytest.mark.parametrize(
    ("above", "below", "expected"),
    [(2.0, 4.0, 0.5), (None, 4.0, None), (1.0, None, None), (1.0, 0.0, None)],
)
def test_a_ratio_needs_both(
    above: float | None, below: float | None, expected: float | None
) -> None:
    assert ratio(above, below) == expected


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((None, "-"), (1234567, "1,234,567"), (0.12345, "0.123"), ([0.5, 1.0], "0.5, 1")),
        *((1.2e-7, "1.2e-07"), ([], "-")),
    ],
)
def test_figures_are_formatted_for_people(value: float | list[float] | None, text: str) -> None:
    assert format_figure(value) == text
