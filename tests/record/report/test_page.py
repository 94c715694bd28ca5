"""The report is complete, self-contained, and agrees with the files of the run."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from rollweave.record.report.data import read_run
from rollweave.record.report.page import render, write_report
from rollweave.record.rundir import RunDir
from rollweave.schema.errors import ConfigError
from tests.support.synthetic_run import write_run

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Balance(HTMLParser):
    """Raises if a closed tag is not open; records references to the network."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.fetched += [
            f"{tag} {name}={value}"
            for name, value in attrs
            if name in ("src", "href") and value and value[0] != "#"
        ]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        return

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def checked(page: str) -> str:
    """Return the page's text after a check of its structure."""
    parser = Balance()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    assert parser.fetched == []
    assert not re.search(r"url\(|@import|<script", page)
    assert "nan" not in re.findall(r'(?:points|x|y|width|height|cx|cy)="([^"]*)"', page)
    return " ".join("".join(parser.text).split())


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return write_run(tmp_path / "made-up")


def test_finished_run_is_reported_with_the_figures_of_its_files(run: RunDir) -> None:
    path = write_report(run)
    assert path == run.path / "report.html"
    text = checked(path.read_text())
    summary = json.loads(run.summary.read_text())
    assert "made-up" in text
    assert f"{summary['success_rate']['frozenlake']:.1%}" in text
    assert "200 held-out episodes, final evaluation" in text
    assert "best checkpoint: step 40" in text
    assert "every trajectory is accounted for" in text
    assert "engine e1" in text
    assert "lost; restarted as epoch 1" in text
    for title in (
        "Learning",
        "Where the time went",
        "Staleness and endings",
        "Timeline",
        "Training signals",
        "Steps",
    ):
        assert title in text
    assert 'env = "frozenlake"' in text


def test_killed_run_is_reported_up_to_its_end(tmp_path: Path) -> None:
    run = write_run(tmp_path / "killed", steps=15, finished=False)
    with run.metrics.open("a") as file:
        file.write('{"kind": "step", "step": 15, "succ')
    run.trace.write_bytes(run.trace.read_bytes()[:-40])
    text = checked(render(read_run(run)))
    assert "not finished" in text
    assert "evaluation at step 10" in text
    assert "Accounting" not in text


def test_failed_run_shows_its_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "failed", steps=2, error="NaN loss in <batch> 2")
    text = checked(render(read_run(run)))
    assert "failed" in text
    assert "NaN loss in <batch> 2" in text


def test_only_the_metrics_are_needed(run: RunDir) -> None:
    for file in (run.summary, run.trace, run.config):
        file.unlink()
    text = checked(render(read_run(run)))
    assert "Learning" in text
    assert "Timeline" not in text


@pytest.mark.parametrize(
    "lines", [[], ['{"kind": "started", "at": 0.0}'], ['{"kind": "news"}', "garbage"]]
)
def test_a_run_without_a_complete_step(tmp_path: Path, lines: list[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert "not finished" in checked(render(read_run(RunDir(tmp_path))))


def test_missing_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must hold metrics\.jsonl"):
        read_run(RunDir(tmp_path))


def test_steps_of_a_lost_lineage_are_not_counted_twice(run: RunDir) -> None:
    lines = run.metrics.read_text().splitlines()
    again = [
        line
        for line in lines
        if json.loads(line).get("step") == 5 and json.loads(line)["kind"] == "step"
    ]
    with run.metrics.open("a") as file:
        file.write("\n".join([*again, '{"kind": "resumed", "at": 99}']) + "\n")
    data = read_run(run)
    assert [line["step"] for line in data.steps] == list(range(6))
    assert data.generations == 2


def test_domains_without_success_are_measured_by_reward(run: RunDir) -> None:
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for line in lines:
        if "success" in line:
            line["reward"] = {name: 3 * value - 1 for name, value in line["reward"].items()}
            line["success"].pop("calculator")
    run.metrics.write_text("\n".join(map(json.dumps, lines)) + "\n")
    final = [line for line in lines if line["kind"] == "evaluation"][-1]
    text = checked(render(read_run(run)))
    assert f"{final['success']['frozenlake']:.1%}" in text
    assert "frozenlake: success" in text
    assert f"{final['reward']['calculator']:.3f}" in text
    assert "calculator: mean reward" in text
    for line in lines:
        line.pop("success", None)
        line |= {"success": {}} if line["kind"] in ("step", "evaluation") else {}
    run.metrics.write_text("\n".join(map(json.dumps, lines)) + "\n")
    text = checked(render(read_run(run)))
    assert "success by task" not in text
    assert "frozenlake: mean reward" in text
    assert ": success" not in text


def test_cut_turns_are_reported(run: RunDir) -> None:
    summary = json.loads(run.summary.read_text()) | {"turns": 50, "cut_turns": {"frozenlake": 5}}
    assert "cut at max_turn_tokens" not in checked(render(read_run(run)))
    run.summary.write_text(json.dumps(summary))
    assert "5 of 50 turns (10.0%) cut at max_turn_tokens: frozenlake" in checked(
        render(read_run(run))
    )


def test_early_end_is_reported(run: RunDir) -> None:
    summary = json.loads(run.summary.read_text()) | {
        "ended_by": "eval.stop_at was reached at step 30"
    }
    run.summary.write_text(json.dumps(summary))
    assert "best checkpoint: step 40; eval.stop_at was reached at step 30" in checked(
        render(read_run(run))
    )


def test_user_supplied_names_are_escaped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "odd", steps=3)
    run.metrics.write_text(run.metrics.read_text().replace("frozenlake", "<b>&'"))
    text = checked(render(read_run(run)))
    assert "<b>&': success" in text
