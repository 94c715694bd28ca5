"""The examples of simulated runs can be simulated unchanged from the root of the
repository.
"""

from pathlib import Path

import pytest

from rollweave.schema.config.loading import load, load_serving
from rollweave_sim.run import simulate
from rollweave_sim.workload import Recorded, workload

ROOT = Path(__file__).parents[3]


@pytest.mark.variants
@pytest.mark.parametrize("name", ["simulate.toml", "simulate_trace.toml"])
def test_an_example_is_simulated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load(Path("examples") / name, ["run.steps=1"])
    outcome = simulate(config)
    assert (outcome.summary.steps, outcome.summary.error) == (1, "")
    assert outcome.summary.tokens > 0


def test_a_burst_cuts_memory_gives_turns_back_and_stalls_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    file = load_serving(Path("examples/serving_bursty.toml"))
    outcome = simulate(load(Path("examples/simulate_loans.toml"), []), serving=file)
    assert (outcome.summary.steps, outcome.summary.error) == (3, "")
    assert outcome.serving is not None
    assert outcome.serving.cuts > 0
    assert outcome.serving.stalls > 0
    assert outcome.serving.returned > outcome.serving.stalls
    assert outcome.serving.late_first < 0.01


def test_the_example_of_two_nodes_is_simulated_with_a_model_shape_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    overrides = ["sim.model=qwen3-8b", "run.steps=1", "eval.every=0", "eval.final_episodes=0"]
    outcome = simulate(load(Path("examples") / "two_nodes.toml", overrides))
    assert (outcome.summary.steps, outcome.summary.error) == (1, "")
    assert (outcome.engine_gpus, [*outcome.pools_busy]) == (8, ["rollouts"])


def test_the_trace_has_two_tasks_with_their_members() -> None:
    trace = workload(str(ROOT / "examples" / "trace.jsonl"))
    assert isinstance(trace, Recorded)
    assert [len(members) for members in trace.groups] == [2, 3]
    assert {
        plan.fails_in for members in trace.groups for attempts in members for plan in attempts
    } == {"", "run"}
