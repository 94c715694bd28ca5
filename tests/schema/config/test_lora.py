"""The settings of adapters."""

import pytest

from rollweave.schema.config.loading import dumps, loads
from rollweave.schema.errors import ConfigError
from rollweave.sim.ignored import ignored

CONFIG = """
[run]
name = "lake"
[model.scratch]
hidden = 64
[[tasks]]
env = "frozenlake"
"""


def test_a_section_gives_the_model_adapters() -> None:
    assert loads(CONFIG).lora is None
    config = loads(CONFIG, ["lora.rank=8"])
    assert config.lora is not None
    assert (config.lora.scale, config.lora.targets) == (4.0, ("all-linear",))
    assert loads(dumps(config)) == config
    assert "lora" in ignored(config)


@pytest.mark.parametrize("given", ["q_proj", "['q_proj']"])
def test_one_target_may_stand_alone(given: str) -> None:
    lora = loads(CONFIG, [f"lora.targets={given}"]).lora
    assert lora is not None
    assert lora.targets == ("q_proj",)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["lora.rank=0"], "lora.rank must be at least 1, got 0"),
        (["lora.alpha=0"], "lora.alpha must be above 0, got 0"),
        (["lora.targets=[]"], "lora.targets must "),
        (["lora.targets=[3]"], "lora.targets.0 must "),
        (["lora.path=a"], "lora.path must be left out with [model.scratch], got 'a'"),
        (["lora.dropout=0.1"], "unknown key lora.dropout"),
        (
            ["lora.rank=4", "algorithm.advantage=gae"],
            "lora must be left out with the estimators gae",
        ),
        (
            ["lora.rank=4", "tasks.0.algorithm.advantage=gae_turn"],
            "lora must be left out with the estimators gae",
        ),
    ],
)
def test_what_cannot_be_is_refused(overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        loads(CONFIG, overrides, name="my.toml")
    (line,) = str(error.value).splitlines()
    assert problem in line


def test_a_run_keeps_its_adapters() -> None:
    plain, small, large = (
        loads(CONFIG),
        loads(CONFIG, ["lora.rank=8"]),
        loads(CONFIG, ["lora.rank=9"]),
    )
    assert small.strays_from(small) == []
    for former, now in ((plain, small), (small, plain), (small, large)):
        (line,) = now.strays_from(former)
        assert line.startswith("lora must stay as the run began, ")
