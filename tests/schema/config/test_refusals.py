"""The refusals of a configuration, with their exact texts (`refusals.toml`), and the
tables of settings that exclude each other and of settings without effect.
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollweave.schema.config import conflicts
from rollweave.schema.config.conflicts import (
    CONFLICTS,
    WITHOUT_EFFECT,
    Conflict,
    Place,
    without_effect,
)
from rollweave.schema.config.loading import dumps, loads, settings_of
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError

TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("refusals.toml").read_text())


def refused(base: str, overrides: list[str]) -> list[str]:
    """Return the lines with which a changed base is refused, without their source."""
    try:
        loads(TABLE["bases"][base], overrides, name="my.toml")
    except ConfigError as error:
        return [line.partition(": ")[2] for line in str(error).splitlines()]
    return []


def cases() -> Iterator[tuple[str, str, list[str], list[str]]]:
    """Yield the name, the base, the overrides and the lines of each refusal."""
    for row in TABLE["refusal"]:
        lines = row["error"] if isinstance(row["error"], list) else [row["error"]]
        yield row["name"], row.get("base", "scratch"), row["set"], lines
    for override, line in TABLE["values"].items():
        yield override, "whole", [override], [line]


def test_each_refusal_has_its_text() -> None:
    wrong = [
        f"{name}: expected {lines}, got {found}"
        for name, base, overrides, lines in cases()
        if (found := refused(base, overrides)) != lines
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("base", TABLE["bases"])
def test_the_bases_are_accepted(base: str) -> None:
    assert loads(TABLE["bases"][base])


def test_what_has_an_effect_is_accepted() -> None:
    for overrides in TABLE["accepted"]:
        config = loads(TABLE["bases"]["scratch"], overrides)
        assert loads(dumps(config)) == config, overrides


SCRATCH = TABLE["bases"]["scratch"]
DEFAULTS = ["rollout.mode=sync", "rollout.temperature=1", "eval.episodes=64", "tasks.0.weight=1"]


def test_settings_without_effect_are_said() -> None:
    for row in TABLE["without_effect"]:
        config = loads(TABLE["bases"][row.get("base", "scratch")], row["set"])
        assert list(without_effect(config).values()) == [row["says"]], row["name"]


@pytest.mark.parametrize("table", ["CONFLICTS", "WITHOUT_EFFECT"])
def test_each_row_applies_to_a_file(monkeypatch: pytest.MonkeyPatch, table: str) -> None:
    used = set[str]()

    def watched(row: Conflict) -> Conflict:
        def applies(place: Place) -> object:
            if found := row.clause.applies(place):
                used.add(f"{row.settings} {row.clause.text}")
            return found

        return Conflict(row.settings, row.clause._replace(applies=applies))

    rows = getattr(conflicts, table)
    monkeypatch.setattr(conflicts, table, tuple(map(watched, rows)))
    for _, base, overrides, _ in cases():
        assert refused(base, overrides)
    for row in TABLE["without_effect"]:
        assert without_effect(loads(TABLE["bases"][row.get("base", "scratch")], row["set"]))
    assert [row for row in rows if f"{row.settings} {row.clause.text}" not in used] == []


def test_rows_are_of_settings() -> None:
    known = {*settings_of(RunConfig), *RunConfig.model_fields}
    assert {key for row in (*CONFLICTS, *WITHOUT_EFFECT) for key in row.choices} <= known


def test_defaults_are_accepted_even_where_they_are_written() -> None:
    assert loads(SCRATCH, DEFAULTS).rollout.temperature == 1


@pytest.mark.parametrize("mode", ["sync", "one_step", "stream", "partial", "bounded", "decoupled"])
def test_what_was_dumped_loads_in_each_mode(mode: str) -> None:
    config = loads(SCRATCH, [f"rollout.mode={mode}"])
    assert loads(dumps(config)) == config


def test_a_configuration_that_is_made_in_python_has_the_same_rules() -> None:
    config = loads(SCRATCH)
    eval_ = config.eval.model_copy(update={"stop_at": 0.5})
    (error,) = config.model_copy(update={"eval": eval_}).broken_rules()
    assert (error.field, error.got) == ("eval.stop_at", "0.5")
