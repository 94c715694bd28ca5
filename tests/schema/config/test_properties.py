"""Rules of values, differences of configurations, and the reference of settings."""

from typing import Annotated

import pytest
from pydantic import TypeAdapter, ValidationError

from rollweave.schema.config.engines import EngineConfig
from rollweave.schema.config.loading import differences, loads, model_in
from rollweave.schema.config.reference import json_schema, parts
from rollweave.schema.config.rollout import TaskConfig
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.values import WARM, matching
from rollweave.schema.errors import FieldErrors

BASE = (
    "[run]\nname = 'lake'\n[model.scratch]\n[[tasks]]\nenv = 'a'\n[[tasks]]\nenv = 'b'\ntag = 'c'\n"
)


def test_rules_of_values() -> None:
    text = TypeAdapter(Annotated[str, matching("a+", "be some a")])
    warm = TypeAdapter(Annotated[float, WARM])
    assert text.validate_python("aa") == "aa"
    assert [warm.validate_python(value) for value in (0.0, 1e-30, -1.0)] == [0.0, 1e-30, -1.0]
    with pytest.raises(ValidationError, match="be some a"):
        text.validate_python("aab")
    with pytest.raises(ValidationError, match="be at least 1e-30, or 0 where that is allowed"):
        warm.validate_python(1e-31)


def test_rewards_belong_to_domains_and_engines_to_gpus() -> None:
    rewards = "rewards=[{name='x', function='m:f', tasks='c'}, {name='y', function='m:f'}]"
    engines = "engines=[{}, {degree=2}, {kind='sglang', degree=2}]"
    config = loads(BASE, [rewards, engines])
    names = {task.name: [one.name for one in config.rewards_of(task.name)] for task in config.tasks}
    assert names == {"a": ["y"], "c": ["x", "y"]}
    config.check_on_gpus([0, 2])
    with pytest.raises(FieldErrors, match=r"engines\.degree must be 1 on auto"):
        config.check_on_gpus([1])


def test_a_run_that_is_only_simulated_needs_no_model() -> None:
    data = {"run": {"name": "a"}, "tasks": [{"env": "b"}], "sim": {"model": "c"}}
    config = RunConfig.model_validate(data)
    assert (config.model.path, config.model.device) == ("sim.model", "cuda")
    assert RunConfig.model_validate(data | {"model": {"path": "d"}}).model.path == "d"
    for wrong in (3, {**data, "sim": None}):
        with pytest.raises(ValidationError):
            RunConfig.model_validate(wrong)
    assert RunConfig.checked(config.model_dump_json()) == config
    assert RunConfig.model_validate({**data, "engines": EngineConfig()}).engines[0].count == 1


def test_differences_are_told_in_order() -> None:
    before = loads(BASE, ["run.sinks=['wandb']", "tasks.1.options={b=1, d={}, e=[1], f=[2]}"])
    options = f"tasks.1.options={{a='{'x' * 58}', c='{'y' * 59}', e=2, f=[3], g={{x=[2]}}, h=[4]}}"
    now = loads(BASE, ["run.steps=7", "run.sinks=[]", options, "lora={}"])
    assert differences(before, now) == [
        "run.steps: 100 → 7",
        "run.sinks: ['wandb'] → []",
        "tasks.1.options.b: 1 → unset",
        "tasks.1.options.d: {} → unset",
        "tasks.1.options.e: [1] → 2",
        "tasks.1.options.f.0: 2 → 3",
        f"tasks.1.options.a: unset → '{'x' * 58}'",
        f"tasks.1.options.c: unset → '{'y' * 58}…",
        "tasks.1.options.g: unset → {'x': [2]}",
        "tasks.1.options.h: unset → [4]",
        "lora: unset → {'rank': 16, 'alpha': 32.0, 'targets': ['all-linear'], 'pat…",
    ]
    assert differences(now, now) == []


def test_the_reference_is_that_of_the_sections() -> None:
    about = {part.key: part.description for part in parts()}
    assert list(about)[:3] == ["run", "model", "model.scratch"]
    assert about["engines"] == "A group of equal engines."
    assert about["lora"].endswith("trained instead of the model's weights (`docs/LORA.md`).")
    described = [setting.description for part in parts() for setting in part.settings]
    assert all(text == " ".join(text.split()) != "" for text in described)
    schema = json_schema()
    assert schema["required"] == ["run", "tasks"]
    group, groups = schema["properties"]["engines"]["anyOf"]
    assert group == groups["items"]
    assert model_in(tuple[TaskConfig, ...] | None) is TaskConfig
    assert model_in(dict[str, int] | None) is None
