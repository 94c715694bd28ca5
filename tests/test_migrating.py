"""Our side of docs/MIGRATING.md: its settings exist, and may have its values."""

import json
import re
from pathlib import Path

import pytest

from rollweave.schema.config.loading import FORMER
from rollweave.schema.config.reference import parts
from tests.support.pages import inline_code, table_rows

PAGE = (Path(__file__).parents[1] / "docs/MIGRATING.md").read_text()
SETTINGS = {setting.key: setting for part in parts() for setting in part.settings}
SECTIONS = {part.key for part in parts()}
OURS = [
    span
    for heading in ("TRL", "verl", "prime-rl")
    for _, ours in table_rows(PAGE.partition(f"## From {heading}\n")[2].partition("\n## ")[0])
    for span in inline_code(ours)
]
VALUED = [span for span in OURS if " = " in span]


def test_the_page_is_read() -> None:
    assert len(OURS) > 100
    assert len(VALUED) > 30


@pytest.mark.parametrize("span", dict.fromkeys(OURS))
def test_what_is_named_exists(span: str) -> None:
    """A setting, a section, a command, or an option of the environment `jsonl`."""
    name = span.partition(" = ")[0].strip("[]")
    options = {"path", "held_out", "prompt", "reward", "overlong", "module:function"}
    known = SETTINGS.keys() | SECTIONS | options
    assert name in known or span.startswith("rollweave train ") or span[0] == span[-1] == '"'


@pytest.mark.parametrize("span", dict.fromkeys(VALUED))
def test_a_value_is_one_that_the_setting_may_have(span: str) -> None:
    name, _, text = span.partition(" = ")
    value = json.loads(text)
    allowed = re.findall(r'"(\w+)"', SETTINGS[name].type)
    assert allowed, f"{name} has no names as values"
    assert set(value if isinstance(value, list) else [value]) <= set(allowed)


def test_each_former_setting_has_a_row() -> None:
    tables = PAGE.partition("## From an earlier Rollweave\n")[2].partition("\n| what you used")[0]
    rows = {inline_code(former)[0]: now.replace("`", "") for former, now in table_rows(tables)}
    assert rows == {key: now.replace("`", "") for key, now in FORMER.items()}
    assert not FORMER.keys() & (SETTINGS.keys() | SECTIONS)
