"""`rollweave engines`: valid combinations of options, and runs that can answer."""

import socket
from pathlib import Path

import pytest

from tests.support.commands import invoke
from tests.support.synthetic_run import write_run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none"], "RUN must be a run directory or a name in runs/, got 'none'"),
        (["lake"], "RUN must be the directory of a living run, and none is in"),
        (["lake", "--add", "1"], "RUN must be the directory of a living run, and none is in"),
        (["lake", "--add", "1", "--remove", "e0"], "--add and --remove must not be given together"),
        (["lake", "--remove", "e0", "--group", "1"], "--group must be used with --add"),
        (["lake", "--now"], "--now must be used with --remove"),
    ],
)
@pytest.mark.parametrize("killed", [False, True])
def test_wrong_input_prints_one_line_and_exits_with_2(
    arguments: list[str], words: str, killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "runs" / "lake", steps=1)
    if killed:  # it leaves its socket behind
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(run.control))
    code, text, errors = invoke("engines", *arguments)
    assert (code, text, len(errors)) == (2, "", 1)
    assert words in errors[0]


@pytest.mark.parametrize("count", ["0", "65", "many"])
def test_bounds_the_number_of_added_engines(count: str) -> None:
    assert invoke("engines", "lake", "--add", count)[0] == 2
