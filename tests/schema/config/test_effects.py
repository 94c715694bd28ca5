"""Changed settings without effect are refused, and no others."""

from collections.abc import Iterator

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rollweave.schema.config.effects import without_effect
from rollweave.schema.config.loading import dumps, loads, model_in, settings_of
from rollweave.schema.config.root import RunConfig

CONFIG = """
[run]
name = "lake"
[model.scratch]
hidden = 32
[[tasks]]
env = "frozenlake"
"""
DEFAULTS = ["rollout.mode=sync", "rollout.alpha=1", "eval.episodes=64", "tasks.0.weight=1"]


def test_defaults_are_accepted_even_where_they_are_written() -> None:
    assert without_effect(loads(CONFIG)) == []
    assert loads(CONFIG, DEFAULTS).rollout.alpha == 1


@pytest.mark.parametrize("mode", ["sync", "one_step", "stream", "partial", "bounded", "decoupled"])
def test_what_was_dumped_has_nothing_without_effect(mode: str) -> None:
    config = loads(CONFIG, [f"rollout.mode={mode}"])
    assert loads(dumps(config)) == config


def _fields(model: type[BaseModel]) -> Iterator[tuple[type[BaseModel], str, FieldInfo]]:
    """Yield the settings of `model` and of the sections in it."""
    for name, field in model.model_fields.items():
        inner = model_in(field.annotation)
        if inner is None:
            yield model, name, field
        else:
            yield from _fields(inner)


def test_there_are_few_settings_and_each_has_a_sentence() -> None:
    of_clusters = ("cluster.", "pools.", "sim.pools.", "workers.", "trainer.save_memory")
    of_clusters += ("trainer.tensor_parallel", "rollout.affinity", "tasks.pin")
    of_clusters += ("lora.", "critic.", "sandbox.cache_", "sandbox.mirror", "trainer.colocated")
    of_clusters += ("engines.kind", "engines.python", "engines.args", "engines.address")
    of_clusters += ("engines.token_", "engines.phase", "engines.borrowed", "sim.serving.")
    of_clusters += ("ablation.sharing",)
    of_clusters += ("model.implementation", "teacher.", "algorithm.reward_weight")
    of_clusters += ("algorithm.routing_replay", "rewards.", "tasks.env_weight")
    keys = [
        key
        for key in settings_of(RunConfig)
        if not key.startswith(of_clusters) and not key.endswith(".pool")
    ]
    # a domain's algorithm repeats settings of the run's
    keys = [key for key in keys if not key.startswith("tasks.algorithm.")]
    assert len(keys) <= 93, keys
    for model, name, field in _fields(RunConfig):
        assert (field.description or "").endswith("."), f"{model.__name__}.{name}"
