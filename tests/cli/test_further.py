"""Commands without the distributions that have them."""

import pytest
from typer.testing import CliRunner

from rollweave.cli.main import app


@pytest.mark.parametrize(
    ("command", "folder"),
    [
        ("reproduce --quick", "papers"),
        ("serve a.toml", "service"),
        ("simulate a.toml", "sim"),
        ("advise a.toml", "sim"),
        ("ui", "ui"),
    ],
)
def test_they_say_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, command: str, folder: str
) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: ())
    result = CliRunner().invoke(app, command.split())
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert f"needs the package rollweave-{folder}, which is not installed (pip install" in line
    assert folder in line.partition("pip install")[2]
