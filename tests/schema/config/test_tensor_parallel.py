"""Runs that may divide the trainer's layers among ranks are accepted; others are
refused.
"""

import pytest

from rollweave.schema.config.loading import dumps, loads
from rollweave.schema.errors import ConfigError

CONFIG = """
[run]
name = "lake"
[model]
implementation = "transformers"
[model.scratch]
[[tasks]]
env = "frozenlake"
[trainer]
ranks = 4
tensor_parallel = 2
"""


def test_tensor_groups_are_of_transformers_models() -> None:
    config = loads(CONFIG)
    assert config.trainer.tensor_parallel == 2
    assert loads(dumps(config)) == config


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["trainer.tensor_parallel=0"], "trainer.tensor_parallel must be at least 1, got 0"),
        (
            ["trainer.tensor_parallel=3"],
            "trainer.tensor_parallel must divide trainer.ranks (4), got 3",
        ),
        (
            ["model.implementation=native"],
            "trainer.tensor_parallel must be 1 unless model.implementation is transformers, whose "
            "models have the plan, got 2 with native",
        ),
        (
            ["algorithm.advantage=gae"],
            "trainer.tensor_parallel must be 1 with the estimators gae and gae_turn, whose critic",
        ),
    ],
)
def test_problems_are_named_in_one_line(overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        loads(CONFIG, overrides, name="my.toml")
    (line,) = str(error.value).splitlines()
    assert f": {problem}" in line
