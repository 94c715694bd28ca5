"""What this distribution announces: the names that Rollweave knows of, each of which
resolves, and whose options are checked.
"""

import re
from importlib.metadata import entry_points

import pytest

from rollweave.envs import registry
from rollweave.envs.registry import DISTRIBUTED, DISTRIBUTION, ENTRY_POINTS, check_options, resolve
from rollweave.io.extras import USER_CODE_REFUSED, USER_CODE_VARIABLE
from rollweave.schema.errors import ConfigError


def announced() -> dict[str, str]:
    return {
        entry.name: entry.value
        for group in ENTRY_POINTS
        for entry in entry_points(group=group)
        if entry.dist is not None and entry.dist.name == DISTRIBUTION
    }


def test_rollweave_knows_every_name() -> None:
    assert sorted(announced()) == sorted(DISTRIBUTED)


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_every_name_resolves(name: str) -> None:
    if name == "textworld":
        pytest.importorskip("textworld", reason="needs the extra textworld")
    assert callable(resolve(name).run if registry.is_handler(name) else resolve(name).step)


def test_no_permission_is_needed_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(USER_CODE_VARIABLE, USER_CODE_REFUSED)
    assert registry.load(announced()["swe"], what="environment")
    with pytest.raises(ConfigError, match="whose agent runs without --user-code"):
        registry.load("rollweave_envs.swe_bugs:files_of", what="environment")


@pytest.mark.parametrize(
    ("env", "option", "value", "rule"),
    [
        ("swe", "partial", "no", "Expected `bool`, got `str`"),
        ("swe", "timeout_s", "30", "Expected `float`, got `str`"),
        ("code", "tools", "bash", "Expected `array`, got `str`"),
        ("swe", "calls", ["text"], "Expected `str`, got `array`"),
        ("code", "cases", True, "Expected `int`, got `bool`"),
        ("code", "families", [1], "Expected `str`, got `int`"),
        ("math_tool", "question", 3, "Expected `str`, got `int`"),
        ("stem", "web", ["tavily"], "Expected `object | null`, got `array`"),
    ],
)
def test_an_option_of_another_type_is_named_with_its_value(
    env: str, option: str, value: object, rule: str
) -> None:
    text = f"options.{option} of environment {env!r}: {rule}"
    with pytest.raises(ConfigError, match=re.escape(text)) as raised:
        check_options(env, {option: value})
    assert str(raised.value).endswith(f": {value!r}")
