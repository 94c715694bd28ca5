"""`rollweave reproduce` without the distribution that has the experiments."""

import pytest
from typer.testing import CliRunner

from rollweave.cli.main import app


def test_it_says_how_to_install_the_experiments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollweave.cli.bench.entry_points", lambda group: ())
    result = CliRunner().invoke(app, ["reproduce", "--quick"])
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert "needs the package rollweave-papers, which is not installed (pip install" in line
    assert "papers" in line.partition("pip install")[2]
