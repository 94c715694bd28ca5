"""Each refusal of a configuration, and its exact text: `refusals.toml` is the table."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollweave.schema.config.loading import dumps, loads
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
