"""Whatever has become of a file in a run's directory, each command that reads it ends
at once, names the file, and prints no traceback.
"""

import errno
import itertools
import json
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollweave.cli.main import app
from rollweave.io import reading
from rollweave.runtime.launch import train
from rollweave.runtime.metrics import Silent
from rollweave.runtime.world import World
from rollweave.schema.errors import RollweaveError
from rollweave_ui.attempts import Query
from rollweave_ui.runs import Runs
from tests.support.fake_runs import FAKES, make_config
from tests.support.fake_runs import run as run_fakes

# Damage.


def anew(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return what replaces a file."""

    def replace(path: Path) -> None:
        path.unlink(missing_ok=True)
        make(path)

    return replace


def listen(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x15
    path.write_bytes(content)


def device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero, which never ends
    except PermissionError:
        pytest.skip("only root makes devices")


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _half(path: Path) -> int:
    """Return half of the size or a little more: a TOML file then ends within a line."""
    data = path.read_bytes()
    half = len(data) // 2
    return max(half, data.find(b"=", half) + 1)


REPLACED: dict[str, Callable[[Path], None]] = {
    "directory": anew(Path.mkdir),
    "named pipe": anew(os.mkfifo),
    "socket": anew(listen),
    "device": anew(device),
    "loop of links": anew(lambda path: path.symlink_to(path.name)),
    "link to nothing": anew(lambda path: path.symlink_to("nowhere")),
    "sparse": sparse,
    "unreadable": lambda _: None,  # `Reading` refuses it
}
"""Damage that readers always notice."""

CHANGED: dict[str, Callable[[Path], None]] = {
    "flipped": flip,
    "truncated": lambda path: os.truncate(path, _half(path)),
    "empty": lambda path: os.truncate(path, 0),
    "missing": Path.unlink,
}
"""Damage that may look like a run that was killed or edited."""


# Commands.


class Reached(RollweaveError):
    """The world of a resumed run would begin."""


class Recorder(Silent):
    """Records what a run shows."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, line: Mapping[str, Any]) -> None:
        self.lines.append(str(line.get("message", "")))


def shell(*arguments: str) -> tuple[bool, str]:
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert bool(errors) == (result.exit_code != 0), result.output
    assert "Errno" not in result.output
    return result.exit_code == 0, result.output + result.stderr


def resume(run: Path) -> tuple[bool, str]:
    shown = Recorder()
    config = make_config(run.parent, steps=3, rewards=REWARDS)
    try:
        train(config, resume=True, programs=FAKES, progress=shown)
    except Reached:
        return True, "\n".join(shown.lines)
    except RollweaveError as error:
        return False, str(error)
    except OSError as error:
        return False, reading.named(error)
    raise AssertionError("the world must begin")


def ui(run: Path) -> tuple[bool, str]:
    runs = Runs(run.parent)
    (row,) = [row for row in runs.overview()["runs"] if row["name"] == run.name]
    view = runs.get(run.name)
    answers = [
        view.overview(),
        view.lanes(None, None, 10),
        view.attempts(Query(), order="newest", offset=0),
    ]
    view.figures()
    return row["state"] != "damaged", json.dumps(answers, default=str)


COMMANDS: dict[str, tuple[Callable[[Path], tuple[bool, str]], set[str]]] = {
    "ui": (
        ui,
        {"config.toml", "metrics.jsonl", "summary.json", "status.json", "trace.json", "bin"},
    ),
    "report": (
        lambda run: shell("report", str(run)),
        {"config.toml", "metrics.jsonl", "summary.json", "trace.json"},
    ),
    "trace": (lambda run: shell("trace", str(run)), {"bin"}),
    "export": (
        lambda run: shell("export", str(run), "--output", str(run.parent / "all.jsonl")),
        {"config.toml", "bin"},
    ),
    "rescore": (lambda run: shell("rescore", str(run)), {"config.toml", "run.json", "bin", "lock"}),
    "eval": (lambda run: shell("eval", str(run)), {"config.toml"}),
    "resume": (
        resume,
        {"config.toml", "run.json", "journal.bin", "metrics.jsonl", "trace.json", "bin", "lock"},
    ),
}
"""Each command with the files that it reads; "bin" is a segment of trajectories."""

FILES = {
    "config.toml": "config.toml",
    "run.json": "run.json",
    "journal.bin": "journal.bin",
    "bin": "trajectories/000000.bin",
    "metrics.jsonl": "metrics.jsonl",
    "trace.json": "trace.json",
    "summary.json": "summary.json",
    "status.json": "status.json",
    "lock": "lock",
}

# What a command may take for the end of a run that was killed, for a file that the user
# has edited or removed, or for one that it writes anew.
UNNOTICED = {
    *((name, damage) for name in ("bin", "trace.json", "metrics.jsonl") for damage in CHANGED),
    *((name, "missing") for name in ("summary.json", "status.json", "run.json", "config.toml")),
    *(("lock", damage) for damage in CHANGED),
    *(("config.toml", damage) for damage in ("flipped", "empty")),
    *((name, "flipped") for name in ("summary.json", "status.json")),
    ("lock", "sparse"),
    ("lock", "unreadable"),
    ("journal.bin", "truncated"),
}

REWARDS = [{"name": "half", "function": "tests.cli.test_damage:half"}]


def half(*_: object) -> float:
    return 0.5


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has trained, with an export in its last checkpoint."""
    directory = tmp_path_factory.mktemp("recorded")
    assert run_fakes(make_config(directory, steps=3, rewards=REWARDS)).error == ""
    export = directory / "run" / "checkpoints" / "step-000003" / "hf"
    export.mkdir()
    (export / "config.json").write_text("{}")
    shutil.copytree(directory / "run", directory / "saved", symlinks=True)
    return directory / "run"


@pytest.fixture
def run(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    async def begin(*_: object, **__: object) -> None:
        raise Reached

    monkeypatch.setattr(World, "run", begin)
    yield recorded
    restore(recorded)


def restore(run: Path) -> None:
    shutil.rmtree(run)
    shutil.copytree(run.with_name("saved"), run, symlinks=True)


def check(run: Path, name: str, damage: str, command: str, patch: pytest.MonkeyPatch) -> None:
    """Damage a file, and check what a command does."""
    restore(run)
    path = run / FILES[name]
    (REPLACED | CHANGED)[damage](path)
    if damage == "unreadable":

        def refuse(opened: Any, *rest: Any) -> int:
            if Path(opened) == path:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return os.open(opened, *rest)

        patch.setattr(reading, "open_descriptor", refuse)
    ask, read = COMMANDS[command]
    ended, text = ask(run)
    what = f"{command} with {name} {damage}: {text[:500]}"
    if not ended:
        assert path.name in text or "config.json" in text, what
    elif name in read and (name, damage) not in UNNOTICED:
        assert path.name in text, what
    assert "Traceback" not in text, what


@pytest.mark.extended
@pytest.mark.parametrize("name", FILES)
def test_each_command_names_each_damage_and_waits_for_nothing(
    run: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for damage in REPLACED | CHANGED:
        for command in COMMANDS:
            with monkeypatch.context() as patch:
                check(run, name, damage, command, patch)


def test_damage_is_named_and_nothing_waits(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the table: each damage of each file, with the live page if it reads the
    file, and else with one command in turn.
    """
    commands = itertools.cycle(name for name in COMMANDS if name not in ("ui", "resume"))
    for name in FILES:
        for damage in REPLACED | CHANGED:
            command = "ui" if name in COMMANDS["ui"][1] else next(commands)
            with monkeypatch.context() as patch:
                check(run, name, damage, command, patch)
