"""Buffer functions of the user, in a module beside the configuration: they select the
training data, and an invalid one gives one clear error line.
"""

import itertools
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Shell
from tests.support.commands import CONFIG, invoke

Written = Callable[[str], str]
NUMBERS = itertools.count()


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    """Return a function that writes a user's module beside the configuration,
    small.toml, and returns its name.
    """
    monkeypatch.chdir(tmp_path)
    # children are of `tests`, too
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2])])
    (tmp_path / "small.toml").write_text(CONFIG)

    def write(code: str) -> str:
        name = f"rules_of_mine_{next(NUMBERS)}"  # a module is imported once
        (tmp_path / f"{name}.py").write_text(code)
        return name

    return write


def train(*arguments: str, sample: str = "fifo") -> tuple[int, str, list[str]]:
    decoupled = ("--mode", "decoupled", "--set", "run.steps=3", "--set", "run.checkpoint_every=1")
    return invoke("train", "small.toml", *decoupled, "--set", f"buffer.sample={sample}", *arguments)


RIGHT = """
import json

def newest(experiences, version):
    with open("seen.jsonl", "a") as file:
        for one in experiences:
            print(json.dumps([version, one.id, one.arrived, one.initiated, one.rewards, one.tokens, one.measures.ratio]), file=file)
    return [one.id for one in reversed(experiences)]
"""


@pytest.mark.variants
@pytest.mark.parametrize("processes", [False, True])
def test_a_buffer_function_selects_experiences(
    written: Written, tmp_path: Path, processes: bool
) -> None:
    name = written(RIGHT)
    code, text, errors = train(*([] if processes else ["--inproc"]), sample=f"{name}:newest")
    assert code == 0, (text, errors)
    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    assert {version for version, *_ in seen} == {0, 1, 2}
    for version, _, arrived, initiated, rewards, tokens, ratio in seen:
        assert 0 <= initiated <= version
        assert arrived >= 0
        assert len(rewards) == 2
        assert tokens > 0
        assert ratio is None
    summary = json.loads((tmp_path / "runs/small/summary.json").read_text())
    assert (summary["steps"], summary["error"]) == (3, "")


MEASURED = """
import json

def surest(experiences, version):
    with open("seen.jsonl", "a") as file:
        for one in experiences:
            print(json.dumps([one.measures.ratio, one.measures.entropy, one.measures.td_error]), file=file)
    return [one.id for one in sorted(experiences, key=lambda one: one.measures.entropy or 0.0)]

surest.measures = True
"""


def test_a_function_that_asks_for_measures_sees_them(written: Written, tmp_path: Path) -> None:
    """Of a real trainer, once the buffer holds more than a step needs."""
    more = ("--set", "rollout.groups_per_step=1", "--set", "run.steps=6")
    code, text, errors = train("--inproc", *more, sample=f"{written(MEASURED)}:surest")
    assert code == 0, (text, errors)
    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    measured = [values for values in seen if values != [None] * 3]
    assert measured
    for ratio, entropy, td_error in measured:
        assert ratio > 0
        assert entropy >= 0
        assert td_error is None, "there is no critic"


def test_the_functions_of_the_documentation_work(written: Written) -> None:
    manual = (Path(__file__).parents[2] / "docs" / "DECOUPLED.md").read_text()
    examples = [text.split("```")[0] for text in manual.split("```python\n")[1:]]
    for example, name in zip(examples, ("hardest", "undecided"), strict=True):
        code, text, errors = train("--inproc", sample=f"{written(example)}:{name}")
        assert code == 0, (text, errors)
        shutil.rmtree("runs")


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize(
    ("code", "function", "words"),
    [
        (None, "no_such_module:pick", "cannot import no_such_module: ModuleNotFoundError"),
        ("raise RuntimeError('not today')", "pick", "RuntimeError: not today"),
        ("raise SystemExit(3)", "pick", "SystemExit: 3"),
        ("def picks(experiences, version): ...", "pick", "has no pick (did you mean picks?)"),
        ("pick = 7", "pick", "must be a function, got int"),
        (
            "async def pick(experiences, version): ...",
            "pick",
            "must be a function, got a coroutine function",
        ),
        (
            "def pick(experiences): ...",
            "pick",
            "must take the experiences and the version: too many positional arguments",
        ),
    ],
)
def test_refuses_invalid_functions_before_the_run(
    written: Written,
    tmp_path: Path,
    code: str | None,
    function: str,
    words: str,
    dry: bool,
) -> None:
    name = function if code is None else f"{written(code)}:{function}"
    exit_code, _, errors = train(*(["--dry-run"] if dry else []), sample=name)
    assert exit_code == 2
    (error,) = errors
    assert error.startswith(f"error: buffer.sample: function '{name}'")
    assert words in error
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_names_the_functions(written: Written) -> None:
    name = written(RIGHT)
    code, text, _ = train("--dry-run", sample=f"{name}:newest")
    assert code == 0
    assert f"function {name}:newest" in text


WRONG = """
def misbehave(experiences, version):
    {body}

def later(experiences, version):
    return misbehave(experiences, version) if version == 1 else [one.id for one in experiences]
"""


@pytest.mark.variants
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise LookupError('no idea')", "LookupError: no idea"),
        (
            "return ['g99', *[one.id for one in experiences]]",
            "a strategy must name groups of the buffer, got 'g99'",
        ),
        (
            "return [one.id for one in experiences] * 2",
            "a strategy must name each group once, got 'g",
        ),
        ("return 5", "a strategy must give a list of group ids, got 5"),
        ("return experiences", "a strategy must name groups of the buffer, got Experience("),
    ],
)
def test_a_failing_function_ends_the_run_and_is_named(
    written: Written, tmp_path: Path, body: str, words: str
) -> None:
    name = f"{written(WRONG.format(body=body))}:later"
    code, text, errors = train("--inproc", sample=name)
    assert code == 1, (text, errors)
    (error,) = [line for line in errors if line.startswith("error: ")]
    assert error.startswith(f"error: buffer function {name} failed: ")
    assert words in error
    run = tmp_path / "runs/small"
    summary = json.loads((run / "summary.json").read_text())
    assert error == f"error: {summary['error']}"
    assert summary["steps"] == 1
    assert (run / "checkpoints/step-000001").is_dir()
    account = summary["account"]
    assert account["in_flight"] == 0
    assert f"{account['started']} started = " in text


def test_a_run_resumes_once_the_function_is_fixed(written: Written, tmp_path: Path) -> None:
    name = written(WRONG.format(body="raise LookupError('no idea')"))
    assert train("--inproc", sample=f"{name}:later")[0] == 1
    code, text, errors = train("--inproc", "--resume", sample="newest")
    assert code == 0, (text, errors)
    assert json.loads((tmp_path / "runs/small/summary.json").read_text())["steps"] == 3


OBSERVER = """
from pathlib import Path

def looks(experiences, version):
    ids = [one.id for one in experiences]
    return ids if Path("order").read_text() == "first" else ids[::-1]
"""


def test_a_resumed_run_warns_if_its_function_decides_differently(
    written: Written, tmp_path: Path
) -> None:
    name = f"{written(OBSERVER)}:looks"
    (tmp_path / "order").write_text("first")
    code, text, errors = train("--inproc", sample=name)
    assert code == 0, (text, errors)
    (tmp_path / "order").write_text("last")
    code, text, errors = train("--inproc", "--resume", "--set", "run.steps=4", sample=name)
    assert code == 0, (text, errors)
    lines = [
        json.loads(line)
        for line in (tmp_path / "runs/small/metrics.jsonl").read_text().splitlines()
    ]
    (message,) = [
        line["message"]
        for line in lines
        if line["kind"] == "warning" and line["component"] == "journal"
    ]
    assert (
        "replayed events led to other commands: the code has changed since, or that of "
        "buffer.sample" in message
    )
    assert (
        f"buffer.sample ({name}), which must always return the same for the same arguments"
        in message
    )


STUCK = """
from pathlib import Path

def stuck(experiences, version):
    Path("stuck").touch()
    while True:
        pass
"""


@pytest.mark.slow
def test_ctrl_c_twice_ends_a_run_whose_function_never_ends(
    written: Written, tmp_path: Path, shell: Shell
) -> None:
    name = f"{written(STUCK)}:stuck"
    process = shell("train", "small.toml", "--mode", "decoupled", "--set", f"buffer.sample={name}")
    until((tmp_path / "stuck").exists)
    children = [
        int(pid)
        for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ]
    assert len(children) >= 2, "engine and trainer"
    process.send_signal(signal.SIGINT)
    # a second SIGINT would be one with the first, which is still pending
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors.splitlines()[-1]) == (130, "interrupted"), errors
    until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
    code, text, lines = train("--inproc", "--resume")
    assert code == 0, (text, lines)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
