"""`rollweave ui` prints an address with a token, answers there, and ends in order."""

import signal
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollweave.cli.main import app
from tests.cli.conftest import Shell
from tests.support.synthetic_run import write_run


def test_the_printed_address_shows_the_run(shell: Shell, tmp_path: Path) -> None:
    write_run(tmp_path / "made-up", steps=1)
    process = shell("ui", str(tmp_path), "--port", "0")
    assert process.stdout is not None
    address, token = process.stdout.readline().strip().split("/?token=")
    with urllib.request.urlopen(f"{address}/api/runs?token={token}", timeout=60) as answer:
        assert b'"made-up"' in answer.read()
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(f"{address}/api/runs?token=x{token}", timeout=60)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGINT, signal.SIGTERM]])
def test_signals_end_it_with_0(shell: Shell, tmp_path: Path, numbers: list[signal.Signals]) -> None:
    """Two signals that it receives before its loop runs again end it at once."""
    process = shell("ui", str(tmp_path), "--port", "0")
    assert process.stdout is not None
    assert "/?token=" in process.stdout.readline()
    process.send_signal(signal.SIGSTOP)
    for number in numbers:
        process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-directory"], "DIR must be a directory of runs or one run, got 'no-such-dir"),
        ([".", "--token-env", "NO_SUCH_VARIABLE"], "--token-env must name a variable"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["ui", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
