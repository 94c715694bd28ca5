"""The settings of engines of kind vllm."""

import pytest

from rollweave.schema.config.loading import dumps, loads
from rollweave.schema.errors import ConfigError

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


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["engines.0.deterministic=true"], "engines.0.deterministic must be false with kind vllm"),
        (
            ["trainer.colocated=true", "rollout.mode=sync"],
            "engines.0.kind must be embedded with trainer.colocated",
        ),
        (["model.scratch.hidden=32"], "model.scratch.hidden must be a multiple of 64 with engines"),
        (
            ["rollout.temperature=0.7", "rollout.top_p=0.9"],
            "rollout.top_p must be 1 on engines of kind vllm unless all temperatures are 0 or 1",
        ),
        (
            ["engines.0.kind='embedded'"],
            "engines.0.python must be left out unless kind is vllm or sglang",
        ),
        (["engines.0.kind='tgi'"], "engines.0.kind must be "),
        (
            ["algorithm.routing_replay=true"],
            "algorithm.routing_replay must be false for a model from scratch, which has no",
        ),
    ],
)
def test_what_vllm_cannot_do_is_refused(overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        loads(CONFIG, overrides, name="my.toml")
    (line,) = str(error.value).splitlines()
    assert problem in line


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


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["engines.0.address=['tcp://a:1']"], "address must be http://host:port"),
        (
            ["engines.0.kind='embedded'"],
            "engines.0.address must be left out unless kind is vllm or",
        ),
        (["engines.0.python='python3.9'"], "engines.0.python must be left out with engines.0.addr"),
        (["engines.0.degree=2"], "engines.0.degree must be left out with engines.0.address"),
        (["allocation.budget=2"], "allocation must be left out with engines.address, whose serv"),
        (["engines.0.count=3"], "engines.0.count must be the number of addresses (2)"),
        (["engines.0.token_file='/t'"], "engines.0 must have one of token_env and token_file"),
        (
            ["engines.0.address=['http://a:1', 'http://a:1/']"],
            "engines.0.address must name each server once in all [[engines]], got http://a:1 2 times",
        ),
        (
            ["engines.0.address=[]"],
            "engines.0.token_env must be left out without engines.0.address",
        ),
    ],
)
def test_settings_of_attached_servers_are_checked(overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        loads(ATTACHED, overrides)
    (line,) = str(error.value).splitlines()
    assert problem in line


def test_an_attached_server_has_a_checkpoint() -> None:
    with pytest.raises(ConfigError, match=r"model\.path must be given with engines\.0\.address"):
        loads(ATTACHED.replace('path = "/models/tiny"', "[model.scratch]\nhidden = 64"))


EXPERTS = CONFIG.replace("[model.scratch]\nhidden = 64", '[model]\npath = "moe"')


def test_routing_replay_needs_engines_that_return_the_experts() -> None:
    assert loads(EXPERTS, ["algorithm.routing_replay=true"]).algorithm.routing_replay
    problem = "algorithm.routing_replay must be false unless all engines are of kind vllm, .* got "
    for kind in ("embedded", "sglang"):
        both = f'{EXPERTS}\n[[engines]]\nkind = "{kind}"'
        loads(both)
        with pytest.raises(ConfigError, match=problem + kind):
            loads(both, ["algorithm.routing_replay=true"])
    with pytest.raises(ConfigError, match=r"must be false with engines\.address"):
        loads(ATTACHED, ["algorithm.routing_replay=true"])
    with pytest.raises(ConfigError, match="must be false without prefix"):
        loads(EXPERTS, ["algorithm.routing_replay=true", "ablation.without=['prefix_cache']"])
