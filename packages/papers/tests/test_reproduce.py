"""`rollweave reproduce`: tables, the JSON line and the page; wrong input gives one line
and writes nothing.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollweave.cli.main import app
from rollweave_papers.command import BEGIN, END
from rollweave_papers.results import Row
from rollweave_papers.running import Finished
from rollweave_papers.tables import between


def invoke(*arguments: str) -> tuple[int, str, list[str]]:
    result = CliRunner().invoke(app, ["reproduce", *arguments])
    return result.exit_code, result.stdout, result.stderr.splitlines()


@pytest.mark.extended
def test_prints_tables_and_json_and_writes_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    code, out, _ = invoke(
        "rollart-table5", "rollart-table4", "--quick", "--json", "--write", str(page)
    )
    assert code == 0
    lines = out.splitlines()
    assert any(line.startswith("rollart-table5: ") for line in lines)
    assert any(line.split()[:3] == ["8B", "push", "32.40"] for line in lines)
    rows = json.loads(lines[-1])["rows"]
    assert {row["experiment"] for row in rows} == {"rollart-table4", "rollart-table5"}
    assert {"experiment", "row", "published", "ours", "ratio", "note"} <= set(rows[0])
    text = page.read_text()
    assert text.index("`rollart-table4`") < text.index("`rollart-table5`"), (
        "in the registry's order"
    )
    assert text.count("| missing |") == sum(row["ours"] is None for row in rows)


def test_ends_with_a_summary_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(
        Row(experiment="rollart-table5", row=str(value), published=2.0, ours=value)
        for value in (2.1, 2.4, 0.5)
    )
    monkeypatch.setattr(
        "rollweave_papers.command.run",
        lambda experiments, **_: (
            Finished(experiment=one, rows=rows, seconds=0.0) for one in experiments
        ),
    )
    code, out, _ = invoke("rollart-table5", "--json")
    assert code == 0
    *_, sentence, values = out.splitlines()
    assert sentence.startswith("3 rows, 0 of them missing. 3 rows are comparable")
    assert "The sign agrees in 2 of 3 rows" in sentence
    summary = json.loads(values)["summary"]
    assert (summary["within_10"], summary["within_25"], summary["signs_agree"]) == (1, 2, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rollart-tabel4"], "did you mean rollart-table4"),
        (["rollart-table4", "--write", "."], "--write must name a file, got the directory"),
        (
            ["rollart-table4", "--write", "none/page.md"],
            "--write must name a file in a directory that can be written to",
        ),
    ],
)
def test_wrong_input_prints_one_line(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, errors = invoke(*arguments)
    assert (code, out, len(errors)) == (2, "", 1)
    assert errors[0].startswith("error: ")
    assert words in errors[0]
    assert list(tmp_path.iterdir()) == []


def test_refuses_a_binary_page_before_the_experiments(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_bytes(b"x\xff")
    code, _, lines = invoke("rollart-table5", "--quick", "--write", str(page))
    assert code == 2
    assert len(lines) == 1
    assert "--write must name a text file, or a new file" in lines[0]
    assert page.read_bytes() == b"x\xff"


def test_tables_replace_the_text_between_the_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Results\n\n{BEGIN}old\n{END}after\n")
    page.write_text(between("new\n", page, (BEGIN, END)))
    assert page.read_text() == f"# Results\n\n{BEGIN}\nnew\n{END}after\n"
    assert between("new\n", page, (BEGIN, END)) == page.read_text()


def test_a_page_without_marks_becomes_the_tables(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    assert between("new\n", page, (BEGIN, END)) == "new\n"
    page.write_text("# Old\n")
    assert between("new\n", page, (BEGIN, END)) == "new\n"


def test_named_experiments_join_the_tables_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page has an older table of one experiment, which is replaced, and of another
    one, which is kept.
    """

    def computed(value: float) -> Callable[..., Iterator[Finished]]:
        return lambda experiments, **_: (
            Finished(
                experiment=one,
                rows=(Row(experiment=one.name, row="x", published=None, ours=value),),
                seconds=0.0,
            )
            for one in experiments
        )

    page = tmp_path / "page.md"
    page.write_text(f"# Results\n{BEGIN}{END}after\n")
    monkeypatch.setattr("rollweave_papers.command.run", computed(1.5))
    assert invoke("rollart-table5", "rollart-table4", "--write", str(page))[0] == 0
    former = page.read_text()
    monkeypatch.setattr("rollweave_papers.command.run", computed(2.5))
    assert invoke("rollart-table4", "--write", str(page))[0] == 0
    replaced, kept = former.index("1.50×"), former.rindex("1.50×")
    assert former.index("`rollart-table4`") < replaced < former.index("`rollart-table5`") < kept
    assert page.read_text() == former[:replaced] + "2.50×" + former[replaced + 5 :]
    code, _, errors = invoke("rollart-table4", "--quick", "--write", str(page))
    assert (code, len(errors)) == (2, 1)
    assert "--write must name a file whose tables were computed with --quick" in errors[0]
    assert invoke("--write", str(page))[0] == 0
    assert "1.50×" not in page.read_text()
