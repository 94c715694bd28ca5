"""The refusals of a configuration, with their exact texts (`refusals.toml`), and the
table of settings that exclude each other.
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollweave.schema.config import conflicts
from rollweave.schema.config.conflicts import CONFLICTS, Clause, Conflict, Place
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


def test_each_row_refuses_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    used = set[str]()

    def watched(settings: str, clause: Clause) -> Clause:
        def applies(place: Place) -> object:
            if found := clause.applies(place):
                used.add(f"{settings} {clause.text}")
            return found

        return clause._replace(applies=applies)

    table = tuple(
        Conflict(row.of, {key: watched(key, clause) for key, clause in row.settings.items()})
        for row in CONFLICTS
    )
    monkeypatch.setattr(conflicts, "CONFLICTS", table)
    for _, base, overrides, _ in cases():
        assert refused(base, overrides)
    known = [f"{key} {clause.text}" for row in CONFLICTS for key, clause in row.settings.items()]
    assert [case for case in known if case not in used] == []


def test_rows_are_of_settings() -> None:
    known = {*settings_of(RunConfig), *RunConfig.model_fields}
    assert {key for row in CONFLICTS for choices, _ in row.cases() for key in choices} <= known


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
