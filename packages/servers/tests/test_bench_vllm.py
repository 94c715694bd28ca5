"""The arithmetic of bench `vllm`, which needs no vLLM."""

import dataclasses
from pathlib import Path

import msgspec
import pytest

from benchmarks.engine import vllm_server
from benchmarks.runs import MeasuredRun
from packages.servers.benchmarks import bench
from packages.servers.benchmarks.bench import (
    MODES,
    Trained,
    backwards,
    bench_vllm,
    engines_of,
    figures_of,
    promises,
)
from rollweave.record.report.data import TraceSpan, read_run
from rollweave.record.summary import Summary
from rollweave.record.trace import ENGINES
from rollweave.schema.config.loading import load
from rollweave.schema.work import SegmentKind
from tests.support.sequences import one_token_each
from tests.support.synthetic_run import write_run


def test_versions_that_decrease_are_counted() -> None:
    output = SegmentKind.OUTPUT
    right = one_token_each((output, 1), (SegmentKind.OBSERVATION, -1), (output, 1), (output, 2))
    assert backwards([right, right]) == 0
    assert (
        backwards([right, one_token_each((output, 3), (SegmentKind.OBSERVATION, -1), (output, 2))])
        == 1
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> MeasuredRun:
    run = write_run(tmp_path_factory.mktemp("bench") / "run")
    summary = msgspec.json.decode(run.summary.read_bytes(), type=Summary)
    return MeasuredRun(summary=summary, data=read_run(run), ready_s=2.0)


def test_ratios_are_those_of_both_kinds_or_missing_with_a_reason(
    measured: MeasuredRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {"embedded": [measured], "vllm": [measured]}
    conditions: dict[str, object] = {}
    monkeypatch.setattr(bench, "TARGET", 0.9)
    figures = figures_of("bounded", runs, conditions, quick=False)
    assert figures["steps_to_target_ratio_bounded"] == figures["wall_ratio_bounded"] == 1.0
    assert figures["step_s_vllm_bounded"] == figures["step_s_embedded_bounded"]
    assert not conditions
    never = msgspec.structs.replace(measured.summary, success_rate={})
    data = dataclasses.replace(measured.data, evaluations=[])
    short = MeasuredRun(summary=never, data=data, ready_s=2.0)
    figures = figures_of("bounded", {**runs, "vllm": [short]}, conditions, quick=False)
    assert figures["wall_ratio_bounded"] is None
    assert conditions["wall_ratio_bounded"] == "not measured: 1 of 1 seeds did not reach the target"


def test_a_run_begins_when_the_last_of_its_first_engines_is_ready(measured: MeasuredRun) -> None:
    starts = [
        TraceSpan(ENGINES, lane, "start", 0.0, end) for lane, end in enumerate((3.0, 5.0, 90.0))
    ]
    data = dataclasses.replace(measured.data, spans=[*starts, *measured.data.spans])
    assert measured.with_engines_ready(2).ready_s == 2.0
    assert dataclasses.replace(measured, data=data).with_engines_ready(2).ready_s == 5.0


def test_everything_that_is_wrong_breaks_a_promise(measured: MeasuredRun) -> None:
    run = Trained(run=measured, updates=[], span_errors=3, mixed_versions=1)
    figures = promises([run, run])
    assert (figures["version_span_errors"], figures["mixed_versions"]) == (6, 2)


def test_every_run_is_a_configuration(tmp_path: Path) -> None:
    path = bench.example(bench.CONFIG)
    for mode, settings in MODES.items():
        for kind in bench.KINDS:
            own = [*settings, *engines_of(kind, "/opt/python", tmp_path)]
            config = load(path, [*bench.COMMON, *own])
            assert config.rollout.mode == mode
            assert [(group.kind, group.count) for group in config.engines] == [(kind, 2)]
            load(path, [*bench.COMMON, *own, *bench.QUICK])


def test_without_vllm_every_figure_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(vllm_server.VARIABLE, raising=False)
    result = bench_vllm(seeds=None, quick=True, progress=print)
    assert set(result.figures.values()) == {None}
    assert "wall_ratio_partial" in result.figures
    for name in result.figures:
        assert result.conditions[name].startswith("not measured: vLLM is not installed here")
