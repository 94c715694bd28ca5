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
