"""Every metric that docs/TUNING.md names is one that docs/METRICS.md explains."""

import re
from pathlib import Path

from rollweave.schema.config.reference import parts
from rollweave.schema.work import StopReason
from tests.support.pages import documented_metrics, inline_code, table_rows

PAGE = (Path(__file__).parents[1] / "docs/TUNING.md").read_text()
NO_METRICS = {"evaluation", "idle", "engines", "trainer", "init", "eval"}
"""Sections and kinds of lines, which are named as such, and the keys of the table that
`rollout.max_running` may be.
"""


def metrics() -> set[str]:
    """Return the keys of a step's line, with `/` between them."""
    sections = documented_metrics()
    evaluation = sections.pop("evaluation")
    names = sections.pop("step") | evaluation
    return names | {
        f"{section.replace('.', '/')}/{key}" for section, keys in sections.items() for key in keys
    }


def words_of_settings() -> set[str]:
    """Return the settings and the values that they may have by name."""
    settings = [setting for part in parts() for setting in part.settings]
    values = {value for one in settings for value in re.findall(r'"(\w+)"', one.type)}
    return values | {one.key for one in settings}


def test_every_metric_that_is_looked_at_is_documented() -> None:
    looked_at = [first.strip("`") for first, *_ in table_rows(PAGE)]
    assert len(looked_at) > 25
    assert [name for name in looked_at if name not in metrics()] == []


def test_every_other_name_is_a_setting_or_a_stop_reason() -> None:
    known = metrics() | words_of_settings() | set(StopReason) | NO_METRICS
    names = [
        span
        for span in inline_code(PAGE)
        if re.fullmatch(r"[a-z_]+(?:[./](?!jsonl|log)[a-z_<>]+)*", span)
    ]
    assert [name for name in names if name not in known] == []
