"""The rows that the code makes are those of docs/results/papers.md, in name, unit,
order and conditions. Values stand for the runs, so nothing is simulated.
"""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollweave_papers import (
    heddle,
    heddle_prediction,
    laminar,
    laminar_weights,
    prorl,
    rollart,
    rollart_costs,
    rollart_parts,
    rose,
    rose_elastic,
    rose_serving,
)
from rollweave_papers.cluster import Pace
from rollweave_papers.command import BEGIN
from rollweave_papers.heddle_prediction import Quality
from rollweave_papers.heddle_runs import Rollout
from rollweave_papers.laminar_runs import Point, Recovery, Repacking
from rollweave_papers.results import Experiment, Row
from rollweave_papers.rollart_parts import Updates
from rollweave_papers.rose_elastic import Elastic
from rollweave_papers.rose_serving import Seen
from rollweave_papers.running import EXPERIMENTS
from rollweave_papers.tables import cells_in, sections_of

PAGE = (Path(__file__).parents[3] / "docs/results/papers.md").read_text()
SECTIONS = sections_of(PAGE.partition(BEGIN)[2], quick=False) or {}

COMPUTED = ("laminar-fig19", "rose-fig14")
"""Experiments that inspect a run while it goes on, for which no value can stand."""


def outcome(**_: Any) -> Any:
    """What the experiments read of a finished run."""
    account = SimpleNamespace(dropped={}, started=1)
    return SimpleNamespace(
        idle=lambda what: {"busy": 0.5},
        summary=SimpleNamespace(account=account, wall_s=1.0),
        pools_busy={"h800": 0.5, "h20": 0.5},
        steps=[{"at": 1.0}],
        rewards_used=0.5,
    )


def a_pace(*_: Any, **__: Any) -> Pace:
    return Pace(step_s=1.0, tokens_per_s=1.0, outcome=outcome())


def some_rollouts(*_: Any, steps: int, **__: Any) -> list[float]:
    return [1.0 + seed for seed in range(steps)]


def a_point(task: str, name: str, system: str, gpus: int, **_: Any) -> Point:
    return Point(
        gpus=gpus, tokens_per_s=1.0, step_s=1.0, share=1, engines_busy=0.5, trainer_busy=0.5
    )


def a_value(value: object) -> Callable[..., object]:
    return lambda *_, **__: value


FAKES: dict[tuple[object, str], object] = {
    **{(module, "pace"): a_pace for module in (rollart, rollart_parts, rollart_costs, prorl)},
    (rose_elastic, "pace"): a_pace,
    **{(module, "rollouts"): some_rollouts for module in (rollart, rollart_parts, rose)},
    (rollart_parts, "first_step"): lambda *_, **__: outcome(),
    (rollart_costs, "_reward_calls"): a_value([1.0]),
    **{
        (module, "updates"): a_value(Updates(push_s=1.0, pull_s=1.0, stopped_s=1.0))
        for module in (rollart_parts, rollart_costs)
    },
    (laminar, "measure"): a_point,
    (laminar, "staleness_shares"): a_value({1: 1.0}),
    (laminar, "repacking"): a_value(Repacking(tokens_per_s=1.0, kv_used=0.5, released=27)),
    (laminar, "recover"): a_value(Recovery(seconds=60.0, slowdown=1.0)),
    (laminar_weights, "_part"): a_value(SimpleNamespace(waits_s=[1.0], stall_s=[1.0])),
    (heddle, "rollout"): a_value(
        Rollout(seconds=1.0, tokens_per_s=1.0, longest_queued_s=1.0, fleet="2×8")
    ),
    (heddle_prediction, "quality"): a_value(
        dict.fromkeys(heddle_prediction.LABELS, Quality(recall=0.5, pearson=0.5))
    ),
    (rose, "transfer_s"): a_value(1.0),
    (rose_serving, "seen"): a_value(
        Seen(rollout_s=1.0, ttft_ms=(1.0, 1.0), tpot_ms=(1.0, 1.0), late=0.0)
    ),
    (rose_elastic, "elastic"): a_value(Elastic(rollout_s=1.0, not_ready=0.0, loans=16)),
}


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for (module, name), fake in FAKES.items():
        monkeypatch.setattr(module, name, fake)


def conditions(note: str) -> list[str]:
    """Return the words of a note, without numbers, fleets, and where a maximum is."""
    return re.sub(r"\d+×\d+(, \d+×\d+)*|(?<=maximum at )\w+ [\w.-]+|[\d.,]+", "#", note).split()


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name not in COMPUTED])
def test_rows_of_the_code_are_those_of_the_page(name: str) -> None:
    experiment: Experiment = EXPERIMENTS[name]
    rows: list[Row] = experiment.rows(False)
    cells = cells_in(SECTIONS[name])
    assert [f"*{row.row}*" if row.own else row.row for row in rows] == [c["row"] for c in cells]
    for row, one in zip(rows, cells, strict=True):
        assert (row.ours is None) == (one["ours"] == "missing"), row.row
        ours = re.sub(r" \([\d.,-]+\)$", "", one["ours"])  # without the range over seeds
        assert row.ours is None or re.split(r"[\d.,-]+ ?", ours)[-1] == row.unit, row.row
        assert conditions(row.note) == conditions(one["note"]), row.row
