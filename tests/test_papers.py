"""docs/papers.md is true as far as code can tell: every mechanism of a paper names
files that exist, and settings or commands that are accepted.
"""

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel, ValidationError

import rollweave
import rollweave_service
from rollweave.cli.bench import NAMES
from rollweave.cli.main import app
from rollweave.schema.config.loading import model_in, settings_of
from rollweave.schema.config.root import RunConfig
from rollweave_papers.running import select
from tests.support.pages import inline_code, table_rows

ROOT = Path(__file__).parents[1]
SOURCES = (ROOT / "src/rollweave", *ROOT.glob("packages/*/src"))
PAPERS = ("RollArt", "Heddle", "ROSE", "Laminar", "ProRL Agent")


def mechanisms() -> Iterator[list[str]]:
    """Rows of the papers' tables, each after the name of its paper."""
    page = (ROOT / "docs/papers.md").read_text()
    for paper in PAPERS:
        section = page.split(f"\n## {paper}\n")[1].split("\n## ")[0]
        yield from ([paper, *cells] for cells in table_rows(section))


ROWS = list(mechanisms())


def accept(setting: str) -> None:
    """Raise if there is no such setting, or if it refuses the value given for it."""
    key, _, value = setting.replace(".NAME.", ".").partition(" = ")
    assert key in settings_of(RunConfig), setting
    *path, name = key.split(".")
    section: type[BaseModel] = RunConfig
    for part in path:
        section = model_in(section.model_fields[part].annotation) or section
    problems: list[Any] = []
    if value:
        try:
            section.model_validate({name: tomllib.loads(f"value = {value}")["value"]})
        except ValidationError as error:
            problems += error.errors()
    # other settings of the section may have to be set
    assert [problem for problem in problems if problem["type"] != "missing"] == [], setting


def check_start(span: str) -> None:
    """Raise unless the span is a setting, a section, a command or a public name."""
    if not span.startswith("rollweave "):
        if (section := re.fullmatch(r"\[(\w+)\]", span)) is not None:
            assert section[1] in RunConfig.model_fields
        elif span not in (*rollweave.__all__, *rollweave_service.__all__):
            accept(span)
        return
    name, *arguments = shlex.split(span)[1:]
    commands: Any = typer.main.get_command(app)
    assert name in commands.commands, span
    assert name != "bench" or arguments[0] in NAMES, span
    assert name != "reproduce" or select(arguments), span


@pytest.mark.parametrize("paper", PAPERS)
def test_each_paper_has_its_mechanisms(paper: str) -> None:
    rows = [cells for of, *cells in ROWS if of == paper]
    assert len(rows) > 20
    assert all(len(cells) == 6 and all(cells) for cells in rows)
    assert len({cells[0] for cells in rows}) == len(rows), "each has a name of its own"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}: {row[1]}")
def test_a_mechanism_is_where_the_page_says(row: list[str]) -> None:
    _, _, _, started_by, files, printed, where = row
    assert where in ("live", "simulated", "live and simulated")
    assert inline_code(files)
    assert all(any((source / name).is_file() for source in SOURCES) for name in inline_code(files))
    assert inline_code(started_by) or started_by in ("always", "none")
    for span in inline_code(started_by):
        check_start(span)
    assert started_by != "none" or where == "simulated" or not printed.startswith("yes")
