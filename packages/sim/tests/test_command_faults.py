"""`rollweave simulate --faults`: one line for each seed, and the exit code."""

import json
import re
from pathlib import Path

import pytest

from packages.sim.benchmarks import faults as bench
from rollweave.schema.config.root import RunConfig
from rollweave_sim import command_simulate as simulate
from rollweave_sim.command_simulate import replay_command
from rollweave_sim.faults import Report
from tests.support.commands import invoke

CONFIG = """
[run]
name = "mine"
steps = 2
[sim]
model = "qwen3-8b"
[trainer]
ranks = 8
[[tasks]]
env = "frozenlake"
[rollout]
groups_per_step = 2
group_size = 2
[engines]
count = 2
"""


@pytest.mark.extended
def test_seeds_without_violations_print_a_line_each_and_exit_with_0() -> None:
    code, text, errors = invoke("simulate", "--faults", "0-1", "--faults", "4")
    assert (code, errors) == (0, [])
    assert [line.split(":")[0] for line in text.splitlines()] == ["seed 0", "seed 1", "seed 4"]
    assert all(
        re.search(r"[\d,]+ events, [\d,]+ faults.*: all invariants held", line)
        for line in text.splitlines()
    )


def test_searches_the_users_configuration(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(CONFIG)
    code, text, errors = invoke(
        "simulate", str(path), "--set", "rollout.mode=sync", "--faults", "3"
    )
    assert (code, errors) == (0, [])
    assert text.startswith("seed 3: sync, ")
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def search(seed: int, config: RunConfig | None = None, serving: object = None) -> Report:
        return Report(
            seed=seed,
            mode="sync",
            violation="g1 [twice]" if seed == 1 else "",
            error="",
            events=1,
            faults={},
        )

    monkeypatch.setattr(simulate, "search", search)


@pytest.mark.usefixtures("broken")
def test_a_violation_exits_with_1_and_prints_the_replay_command() -> None:
    code, text, _ = invoke("simulate", "--faults", "0-2")
    assert code == 1
    assert text.splitlines()[1:3] == [
        "seed 1: sync, 1 events, 0 faults: violated: g1 [twice]",
        "  replay with: rollweave simulate --faults 1",
    ]


@pytest.mark.usefixtures("broken")
def test_the_search_names_settings_without_effect() -> None:
    example = str(Path(__file__).parents[3] / "examples" / "simulate.toml")
    _, _, errors = invoke("simulate", example, "--set", "workers.count=2", "--faults", "0")
    assert "without effect in a simulation: workers.count" in errors


@pytest.mark.parametrize(("violation", "expected"), [("", 0), ("g1 [twice]", 1)])
def test_the_bench_exits_with_1_on_a_violation(
    violation: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = Report(seed=0, mode="sync", violation=violation, error="", events=1, faults={})
    monkeypatch.setattr(bench, "searched", lambda seeds, workers: [report for _ in seeds])
    code, text, errors = invoke("bench", "faults", "--seeds", "1", "--json")
    assert code == expected
    assert json.loads(text.splitlines()[-1])["figures"]["violations"] == expected
    assert any("rollweave simulate --faults 0" in line for line in errors) == bool(violation)


def test_the_replay_command_is_quoted_for_a_shell() -> None:
    assert replay_command(7, Path("my runs/a.toml"), ["run.steps=3"]) == (
        "rollweave simulate 'my runs/a.toml' --set run.steps=3 --faults 7"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate"], "CONFIG must be given unless --faults is"),
        (["simulate", "--faults", "many"], "--faults must be a seed or a range"),
        (["simulate", "--faults", "3-1"], "--faults must be a seed or a range"),
        (["simulate", "--faults", "1", "--json"], "--json must be left out"),
        (["simulate", "--faults", "1", "--set", "run.steps=3"], "--set must be used with CONFIG"),
        (["simulate", "none.toml", "--faults", "1"], "config must be a readable text file"),
    ],
)
def test_wrong_input_exits_with_2(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, errors = invoke(*arguments)
    assert code == 2
    assert len(errors) == 1
    assert words in errors[0]
    assert list(tmp_path.iterdir()) == []
