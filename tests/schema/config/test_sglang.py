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


def test_log_probs_are_at_any_temperature_with_top_p() -> None:
    assert loads(CONFIG, ["rollout.temperature=0.7", "rollout.top_p=0.9"]).rollout.top_p == 0.9


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["trainer.colocated=true", "rollout.mode=sync"],
            "engines.0.kind must be embedded with trainer.colocated, for which engines give back "
            "their memory, got sglang",
        ),
        (["engines.0.kind='sgl'"], "engines.0.kind must be "),
    ],
)
def test_what_sglang_cannot_do_is_refused(overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        loads(CONFIG, overrides, name="my.toml")
    (line,) = str(error.value).splitlines()
    assert problem in line
