"""The memory that a rank needs, number by number (`needs.toml`)."""

import tomllib
from pathlib import Path

import pytest

from rollweave.schema.config.loading import loads
from rollweave.train.needs import rank_needs
from rollweave.weights.checkpoint import ModelShape

TABLE = tomllib.loads(Path(__file__).with_name("needs.toml").read_text())
BASE = """
[run]
name = "m"
[model.scratch]
[[tasks]]
env = "nim"
[[tasks]]
env = "nim"
tag = "shorter"
max_tokens = 8
max_turns = 2
max_turn_tokens = 1
"""


@pytest.mark.parametrize("case", TABLE["case"], ids=lambda case: case["title"])
def test_a_rank_needs(case: dict[str, list[str]]) -> None:
    """A need is a line of its bytes, what they are for, what kind of memory it is, and
    the setting that changes it.
    """
    shape = ModelShape(**TABLE["shape"] | case.get("shape", {}))
    config = loads(BASE, [*TABLE["settings"], *case.get("settings", ())])
    kinds = ("on_device", "in_turn", "at_restart")
    assert case["needs"] == [
        " ".join(
            [f"{need.nbytes:_}", need.what]
            + [f"({kind})" for kind in kinds if getattr(need, kind)]
            + [need.setting]
        )
        for need in rank_needs(config, shape, rank=int(case.get("rank", 0)))
    ]
