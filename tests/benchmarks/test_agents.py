"""Bench `agents`: what each API of the gateway honors and refuses, as the table of
`docs/GATEWAY.md` says.
"""

import json
from pathlib import Path

from benchmarks.agents import bench
from benchmarks.agents.feature_table import FEATURES
from benchmarks.agents.features import Feature, Outcome, never, try_feature
from benchmarks.agents.installed import PROGRAMS as INSTALLED
from benchmarks.agents.real import bench_real
from benchmarks.agents.silent import silent_fields
from benchmarks.agents.standing import Seen
from benchmarks.agents.wire import BODIES

PAGE = Path(__file__).parents[2] / "docs" / "GATEWAY.md"


async def test_the_page_says_what_works_through_each_api() -> None:
    columns = await bench.ask_apis()
    cells = {(api, name): cell for api, column in columns.items() for name, cell in column.items()}
    wrong = {
        place: cell
        for place, cell in cells.items()
        if cell.outcome in (Outcome.IGNORED, Outcome.FAILED)
    }
    assert not wrong
    assert bench.table(columns) in PAGE.read_text()


async def test_a_field_that_is_ignored_would_be_seen() -> None:
    """Metadata is ignored by design: a feature that asked for more would be found."""
    ignored = Feature(name="x", asks={"chat": {"metadata": {"a": "b"}}}, check=never)
    assert (await try_feature(ignored, "chat")).outcome is Outcome.IGNORED
    unnamed = Feature(name="x", asks={"chat": {"n": 2}}, check=never, named="surprise")
    assert (await try_feature(unnamed, "chat")).outcome is Outcome.FAILED


def test_the_bench_finds_nothing_that_is_ignored_silently() -> None:
    result = bench.bench_agents(quick=True, progress=lambda _: None)
    assert result.figures["silently_ignored"] == result.figures["failed"] == 0
    assert not result.broken
    assert {feature.name for feature in FEATURES} <= result.conditions.keys()


def test_the_bench_of_installed_programs_says_why_it_runs_none(tmp_path: Path) -> None:
    result = bench_real(tmp_path, quick=False, install=False, progress=lambda _: None)
    assert result.figures["programs"] == result.figures["runs"] == 0
    assert result.figures["programs_not_run"] == len(INSTALLED)
    assert "is not installed in" in result.conditions["codex, sandbox"]
    quick = bench_real(tmp_path, quick=True, install=False, progress=lambda _: None)
    assert quick.figures.keys() == result.figures.keys()
    assert not result.broken


def test_a_field_that_a_program_sends_in_vain_is_found() -> None:
    """The server names what it ignores; anything else without effect is silent."""
    body = {**BODIES["chat"], "n": 1, "user": "u", "surprise": {"a": 5}, "stream": True}
    seen = Seen()
    seen.requests.append(("/s/s/v1/chat/completions", json.dumps(body).encode(), 200, ""))
    expected = ["/chat/completions: surprise", "/chat/completions: surprise.a"]
    assert [field.partition(" = ")[0] for field in silent_fields(seen)] == expected
    seen.ignored.add("surprise")
    assert silent_fields(seen) == []
