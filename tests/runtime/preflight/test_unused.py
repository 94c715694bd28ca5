"""Changed settings without effect are reported, and no others."""

import random

import pytest

from rollweave.runtime.preflight.unused import without_effect
from rollweave.schema.config.loading import loads

CONFIG = """
[run]
name = "lake"
[model.scratch]
hidden = 32
[[tasks]]
env = "frozenlake"
"""

CASES = [
    (["rollout.mode=sync", "rollout.alpha=2"], "rollout.alpha has no effect in mode sync, got 2"),
    (
        ["rollout.predictor=boosted"],
        "rollout.predictor has no effect where no priority or placement predicts",
    ),
    (
        ["algorithm.kl_direction=forward"],
        "algorithm.kl_direction has no effect while algorithm.kl is 0, got forward",
    ),
    (
        ["algorithm.is_cap=5"],
        "algorithm.is_cap has no effect with algorithm.correction bypass, got 5.0",
    ),
    (
        ["algorithm.gamma=0.9"],
        "algorithm.gamma has no effect with algorithm.advantage grpo, got 0.9",
    ),
    (["warmup.batch=3"], "warmup.batch has no effect while warmup.steps is 0, got 3"),
    (
        ["weights.transport=nixl"],
        "weights.transport has no effect while weights.relays is 0, got nixl",
    ),
    (["eval.episodes=3"], "eval.episodes has no effect while eval.every is 0"),
    (["eval.stop_at=0.5"], "eval.stop_at has no effect while eval.every is 0"),
    (
        ["faults.latency_sigma=3"],
        "faults.latency_sigma has no effect while faults.latency_s is 0, got 3.0",
    ),
    (["tasks.0.weight=3"], "tasks.0.weight has no effect with one task domain, got 3.0"),
    (
        ["engines.degree=16"],
        "engines.degree has no effect beyond the 8 cores of this machine, got 16",
    ),
]
USED = [
    ["rollout.mode=partial", "rollout.alpha=2"],
    ["ablation.policies=['longest_first']", "rollout.predictor=boosted"],
    ["algorithm.kl=0.1", "algorithm.kl_direction=forward"],
    ["algorithm.correction=tis", "algorithm.is_cap=5"],
    ["algorithm.advantage=gigpo", "algorithm.gamma=0.9"],
    ["warmup.steps=1", "warmup.batch=3"],
    ["weights.relays=1", "weights.transport=nixl"],
    ["eval.every=2", "eval.episodes=3", "eval.stop_at=0.5"],
    ["faults.latency_s=1", "faults.latency_sigma=3"],
    ["engines.degree=8"],
    ["eval.final_episodes=0", "eval.episodes=3"],
]


def test_defaults_are_not_reported() -> None:
    assert without_effect(loads(CONFIG), cores=8) == []


@pytest.mark.parametrize(("overrides", "line"), CASES, ids=[case[1].split()[0] for case in CASES])
def test_each_change_without_effect_is_reported_in_one_line(
    overrides: list[str], line: str
) -> None:
    (text,) = without_effect(loads(CONFIG, overrides), cores=8)
    assert text.startswith(line)


@pytest.mark.parametrize("overrides", USED, ids=["+".join(each) for each in USED])
def test_changes_with_an_effect_are_not_reported(overrides: list[str]) -> None:
    assert without_effect(loads(CONFIG, overrides), cores=8) == []


def test_several_changes_are_all_reported() -> None:
    overrides = [override for case, _ in CASES for override in case]
    random.Random(0).shuffle(overrides)
    lines = without_effect(loads(CONFIG, overrides), cores=8)
    assert sorted(line.split()[0] for line in lines) == sorted(case[1].split()[0] for case in CASES)
