"""The settings of engines of kind vllm."""

from rollweave.schema.config.loading import dumps, loads

CONFIG = """
[run]
name = "lake"
[model.scratch]
hidden = 64
[[tasks]]
env = "frozenlake"
[[engines]]
kind = "vllm"
python = "/opt/vllm/bin/python"
args = ["--max-num-batched-tokens", "8192"]
count = 2
degree = 2
"""


def test_groups_of_both_kinds_may_be_in_one_run() -> None:
    config = loads(CONFIG + "[[engines]]\n")
    assert [group.kind for group in config.engines] == ["vllm", "embedded"]
    assert loads(dumps(config)) == config


def test_a_model_from_scratch_has_heads_that_vllm_computes() -> None:
    assert loads(CONFIG).head_dim == 32
    assert loads(CONFIG.partition("[[engines]]")[0]).head_dim == 16


def test_vllm_on_gpus_may_have_several() -> None:
    """An embedded engine has one."""
    assert loads(CONFIG, ["model.device=cuda"]).engines[0].degree == 2


def test_other_log_probs_are_asked_for_only_if_a_temperature_needs_them() -> None:
    assert not loads(CONFIG, ["eval.temperature=1"]).scales_logprobs
    assert loads(CONFIG, ["eval.temperature=0.5"]).scales_logprobs
    assert loads(CONFIG, ["rollout.temperature=0.5"]).scales_logprobs


def test_a_model_from_scratch_cannot_change_its_heads() -> None:
    embedded = loads(CONFIG.partition("[[engines]]")[0])
    (line,) = loads(CONFIG).strays_from(embedded)
    assert line.startswith("engines.kind must stay as the run began, ")
    assert "heads of 16" in line
    assert "heads of 32" in line
    assert loads(CONFIG).strays_from(loads(CONFIG)) == []


ATTACHED = """
[run]
name = "lake"
[model]
path = "/models/tiny"
[[tasks]]
env = "frozenlake"
[[engines]]
kind = "vllm"
address = ["http://10.0.0.7:8000", "http://10.0.0.8:8000"]
token_env = "VLLM_TOKEN"
"""


def test_there_is_one_engine_for_each_address() -> None:
    config = loads(ATTACHED)
    assert config.engines[0].count == 2
    assert loads(dumps(config)) == config
    one = loads(ATTACHED, ["engines.0.address='http://10.0.0.7:8000/'"]).engines[0]
    assert (one.address, one.count) == (("http://10.0.0.7:8000",), 1)


EXPERTS = CONFIG.replace("[model.scratch]\nhidden = 64", '[model]\npath = "moe"')


def test_engines_may_return_the_experts() -> None:
    assert loads(EXPERTS, ["algorithm.routing_replay=true"]).algorithm.routing_replay
