"""The settings of adapters."""

import pytest

from rollweave.schema.config.loading import dumps, loads
from rollweave.sim.run import ignored

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
