"""Trials show the pace that a run keeps, not that of its beginning."""

import json
from pathlib import Path

import pytest

from rollweave.schema.config.loading import loads
from rollweave.schema.config.root import RunConfig
from rollweave_sim.candidates import Prediction
from rollweave_sim.trial import Length, ahead, try_out
from tests.support.variants import mostly_slow

CONFIG = """
[run]
name = "trial"
[sim]
model = "qwen3-8b"
[trainer]
ranks = 8
[[tasks]]
env = "gem-game"
max_turns = 1
max_tokens = 32768
max_turn_tokens = 16384
[rollout]
groups_per_step = 2
group_size = 2
max_running = 64
mode = "{mode}"
[engines]
count = 2
[watchdog]
turn_s = 3600.0
"""


def config(mode: str) -> RunConfig:
    return loads(CONFIG.format(mode=mode))


@pytest.mark.variants
@pytest.mark.parametrize(
    "mode", mostly_slow(["sync", "one_step", "bounded", "decoupled"], {"bounded", "decoupled"})
)
def test_a_short_trial_has_the_pace_of_a_long_one(mode: str) -> None:
    short = try_out(config(mode), Length(warm=0, steps=2))
    long = try_out(config(mode), Length(warm=20, steps=60))
    assert short.step_s == pytest.approx(long.step_s, rel=0.5)


def test_a_wave_is_what_runs_at_once() -> None:
    waves = {mode: ahead(config(mode)) for mode in ("sync", "one_step", "bounded", "decoupled")}
    assert waves == {"sync": 0, "one_step": 1, "bounded": 1, "decoupled": 1 + 64 // 4}


@pytest.mark.parametrize("mode", ["sync", "one_step", "stream", "partial", "bounded", "decoupled"])
def test_tokens_per_second_are_the_tokens_of_a_step_over_its_seconds(
    mode: str, tmp_path: Path
) -> None:
    """Every trajectory has 200 tokens, and a step trains four."""
    prediction = traced(tmp_path, mode, [[[50, 20, 0.1], [30, 0, 0.1]]])
    assert prediction.step_tokens == 4 * 200
    steps = {"sync": 1.3284666667, "one_step": 1.3605, "stream": 1.3605}
    steps |= {"partial": 1.111, "bounded": 1.111, "decoupled": 0.29505}
    assert prediction.step_s == pytest.approx(steps[mode], rel=1e-6)
    assert prediction.tokens_per_s * prediction.step_s == pytest.approx(4 * 200)


def test_long_trajectories_that_are_thrown_away_are_not_counted(tmp_path: Path) -> None:
    """Of four tasks one takes many steps: it is trained on without a bound alone."""
    turns = [[[50, 0, 0.1]], [[50, 0, 0.1]], [[50, 0, 0.1]], [[6000, 0, 0.1]]]
    all_of_them = traced(tmp_path, "decoupled", turns, steps=40)
    bounded = traced(tmp_path, "bounded", turns, steps=40)
    mean = 4 * (100 + (3 * 50 + 6000) / 4)
    assert all_of_them.dropped == 0
    assert all_of_them.step_tokens == pytest.approx(mean, rel=0.25)  # 40 steps of two groups
    assert bounded.dropped > 0.1
    assert bounded.step_tokens < 0.5 * mean
    assert bounded.tokens_per_s * bounded.step_s == pytest.approx(bounded.step_tokens)


def traced(
    tmp_path: Path, mode: str, turns: list[list[list[float]]], *, steps: int = 3
) -> Prediction:
    """Try out a trace of tasks with these turns, two groups of two a step."""
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"prompt_tokens": 100, "init_s": 0.0, "turns": each, "reward_s": 0.0, "reward": 1.0}
        for each in turns
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = CONFIG.format(mode=mode).replace('"gem-game"', json.dumps(str(trace)))
    sets = ["trainer.minibatches=2", "tasks.0.max_turns=2", "rollout.max_running=16"]
    return try_out(loads(text, sets), Length(warm=1, steps=steps))
