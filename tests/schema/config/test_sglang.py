"""The settings of engines of kind sglang."""

import pytest

from rollweave.schema.config.loading import dumps, loads
from rollweave.schema.errors import ConfigError

CONFIG = """
[run]
name = "lake"
[model.scratch]
hidden = 32
[[tasks]]
env = "frozenlake"
[[engines]]
kind = "sglang"
python = "/opt/sglang/bin/python"
args = ["--attention-backend", "triton"]
degree = 2
"""


def test_groups_of_all_kinds_may_be_in_one_run() -> None:
    config = loads(
        CONFIG + '[[engines]]\n[[engines]]\nkind = "vllm"\n', ["model.scratch.hidden=64"]
    )
    assert [group.server for group in config.engines] == ["sglang", None, "vllm"]
    assert loads(dumps(config)) == config


def test_an_engine_may_be_deterministic_and_have_several_gpus() -> None:
    (group,) = loads(CONFIG, ["engines.0.deterministic=true", "model.device=cuda"]).engines
    assert (group.deterministic, group.degree) == (True, 2)


def test_the_run_may_decide_how_many_engines_of_each_degree_there_are() -> None:
    config = loads(CONFIG.replace("degree = 2\n", ""), ["allocation.budget=4", "model.device=cuda"])
    assert config.allocation is not None
    assert config.allocation.degrees == (1, 2, 4)


def test_a_fleet_of_several_hosts_is_planned_on_cpus_only() -> None:
    text = CONFIG.replace("degree = 2\n", "")
    cluster = ["allocation.budget=4", "cluster.address=10.0.0.1:7400", "cluster.hosts=2"]
    assert loads(text, cluster).allocation is not None
    with pytest.raises(ConfigError, match=r"allocation must be left out with \[cluster\] on cuda"):
        loads(text, [*cluster, "model.device=cuda"])


def test_log_probs_are_at_any_temperature_with_top_p() -> None:
    assert loads(CONFIG, ["rollout.temperature=0.7", "rollout.top_p=0.9"]).rollout.top_p == 0.9
