"""`rollweave doctor` passes in the installation that runs the tests."""

from typer.testing import CliRunner

from rollweave.cli.main import app


def test_doctor_passes_all_checks() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    for name in (
        "python",
        "dependencies",
        "cores",
        "memory",
        "devices",
        "shared memory",
        "sockets",
        "disk",
        "run directories",
        "sandbox limits",
    ):
        assert name in result.stdout
    assert "torch 2." in result.stdout
    assert "✗" not in result.stdout
