"""`rollweave config`: the reference of all settings, and the schema for editors."""

import json
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from rollweave.cli.config import page
from rollweave.cli.main import app
from rollweave.schema.config.loading import loads, settings_of
from rollweave.schema.config.reference import Setting, json_schema, part_or_setting, parts
from rollweave.schema.config.root import RunConfig

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("**/*.toml"))

MINIMAL = """
[run]
name = "reference"
[model]
path = "model"
[[tasks]]
env = "frozenlake"
"""


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["config", *arguments])
    return result.exit_code, result.output


def test_every_setting_is_described_once() -> None:
    listed = [setting.key for part in parts() for setting in part.settings]
    assert sorted(listed) == sorted(settings_of(RunConfig))
    assert [
        setting.key
        for part in parts()
        for setting in part.settings
        if not setting.description.endswith(".")
    ] == []
    assert [part.key for part in parts() if not part.description] == []


def test_the_page_is_that_of_the_code() -> None:
    assert (ROOT / "docs/CONFIG.md").read_text() == "\n".join(page()), (
        "write it again: rollweave config --markdown > docs/CONFIG.md"
    )


def test_defaults_are_what_a_file_may_say() -> None:
    """A default that is written into a file loads, and changes nothing."""
    plain = loads(MINIMAL)
    for part in parts():
        if "[[" in part.header or "NAME" in part.header or part.key.count("."):
            continue
        if not isinstance(getattr(plain, part.key, None), BaseModel):
            continue  # absent by default, or failures, of which each is a choice
        lines = [
            f"{setting.key} = {setting.default}"
            for setting in part.settings
            if setting.default is not None
        ]
        data = tomllib.loads("\n".join(lines))
        overrides = [
            f"{part.key}.{name}={json.dumps(value)}"
            for name, value in data.get(part.key, {}).items()
        ]
        assert loads(MINIMAL, overrides) == plain, part.key


def test_a_setting_says_when_it_must_be_left_out() -> None:
    alpha = part_or_setting("rollout.alpha")
    assert isinstance(alpha, Setting)
    assert alpha.conflicts == (
        "Leave it out unless rollout.mode is partial, bounded or decoupled.",
    )


def whole(config: dict[str, Any]) -> bool:
    """Return whether a file is a configuration: others describe hosts or agents."""
    return "run" in config and "tasks" in config


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_satisfy_the_schema(path: Path) -> None:
    config = tomllib.loads(path.read_text())
    if whole(config):
        jsonschema.Draft202012Validator(json_schema()).validate(config)


def test_sections_and_settings_are_shown() -> None:
    code, text = run()
    assert code == 0
    assert "[[tasks]]" in text
    assert "[rollout]" in text
    code, text = run("rollout")
    assert code == 0
    assert "groups_per_step" in text
    code, text = run("tasks.max_turns")
    assert code == 0
    assert "--set tasks.0.max_turns=16" in text
    assert "--set tasks.0.algorithm.advantage=" in run("tasks.algorithm.advantage")[1]
    assert "--set engines.count=1" in run("engines.count")[1]
    assert "--set pools.NAME.site=" in run("pools.site")[1]
    code, text = run("--json-schema")
    assert code == 0
    assert json.loads(text)["properties"]["rollout"]
    assert run("rolout")[0] == 2
