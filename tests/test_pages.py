"""The examples of docs/ENVIRONMENTS.md, docs/DATASETS.md and docs/SERVICE.md work as
printed: their files are written, and their commands and programs run.
"""

import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rollweave
import rollweave_service
from rollweave import Split
from rollweave.cli.main import app
from rollweave.envs.base import Episode, Score
from rollweave.envs.jsonl import Jsonl
from rollweave.schema.chat import Message
from rollweave.schema.config.loading import load
from rollweave.schema.errors import ConfigError

ROOT = Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory; modules that are imported from it are forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and Path(file).is_relative_to(tmp_path):
            del sys.modules[name]


def write_files(page: str, folder: Path) -> list[str]:
    """Write the code blocks that follow a line which begins with a file's name, and
    return the names.
    """
    text = (ROOT / "docs" / page).read_text()
    named = r"^`(\w+\.\w+)`(?:[^`]|`\w+`)*?:\n\n```\w+\n(.*?)^```"
    blocks = re.findall(named, text, re.MULTILINE | re.DOTALL)
    for name, block in blocks:
        (folder / name).write_text(block)
    return [name for name, _ in blocks]


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a page in this language; "" stands for terminals."""
    text = (ROOT / "docs" / page).read_text()
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [block for of, block in found if of == language]


def dry_run(page: str) -> str:
    """Run the first command of a page, a dry run."""
    command = blocks(page, "")[0].splitlines()[0]
    assert command.endswith("--dry-run")
    result = CliRunner().invoke(app, shlex.split(command)[1:], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "all checks passed" in result.output
    return result.output


def test_the_environment_of_the_page_works(folder: Path) -> None:
    assert write_files("ENVIRONMENTS.md", folder) == ["guess.py", "guess.toml"]
    output = dry_run("ENVIRONMENTS.md")
    assert "Two guesses at random: the format, not the strategy." in output
    programs = blocks("ENVIRONMENTS.md", "python")
    assert programs[0] == (folder / "guess.py").read_text()
    exec(programs[1], {})


def test_a_guess_in_the_middle_finds_every_number(folder: Path) -> None:
    """So `max_turns = 2` suffices, as the configuration says."""
    write_files("ENVIRONMENTS.md", folder)
    module = __import__("guess")
    secrets = set()
    for index in range(20):
        env = module.Guess()
        env.reset(module.Guess.make_task(index=index, seed=0, split=Split.TEST, options={}))
        secrets.add(env.secret)
        answer = env.step("<2>")
        if not answer.done:
            answer = env.step({" higher": "<3>", " lower": "<1>"}[answer.messages[0].content])
        assert (answer.done, answer.success, answer.reward) == (True, True, 1.0)
    assert secrets == {1, 2, 3}


def test_the_dataset_of_the_page_works(folder: Path) -> None:
    assert write_files("DATASETS.md", folder) == ["sums.jsonl", "sums.py", "sums.toml"]
    dry_run("DATASETS.md")
    options = {"path": "sums.jsonl", "held_out": "sums.jsonl", "reward": "sums:reward"}
    rewards = []
    for index in range(4):
        task = Jsonl.make_task(index=index, seed=0, split=Split.TRAIN, options=options)
        messages = (*Jsonl(**options).reset(task).messages, Message(role="assistant", content="42"))
        rewards.append(Jsonl.score(Episode(task=task, messages=messages), options))
    assert sorted(rewards) == [0.0, 0.0, 1.0, 1.0]


def test_the_graded_reward_of_the_page_works() -> None:
    namespace: dict[str, object] = {}
    exec(blocks("DATASETS.md", "python")[1], namespace)
    graded = namespace["graded"]
    assert callable(graded)
    assert graded({"answer": "5"}, "2 + 3 = 5") == Score(reward=1.0, success=True)
    assert graded({"answer": "5"}, "2 + 3 = 6") == Score(reward=0.5, success=False)


def test_a_line_without_a_prompt_is_named(folder: Path) -> None:
    write_files("DATASETS.md", folder)
    broken = (folder / "sums.jsonl").read_text() + '{"question": "What is 1 + 1?"}\n'
    (folder / "broken.jsonl").write_text(broken)
    config = (folder / "sums.toml").read_text()
    (folder / "broken.toml").write_text(config.replace('path = "sums', 'path = "broken'))
    result = CliRunner().invoke(app, ["train", "broken.toml", "--dry-run"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "broken.jsonl:5 has no field 'prompt' (its fields: question)" in result.output


def test_the_configuration_of_a_service_is_complete(folder: Path) -> None:
    assert write_files("SERVICE.md", folder) == ["service.toml"]
    (task,) = load(folder / "service.toml", []).tasks
    assert task.name == "lake"
    needed = {"run": 'name = "service"', "model": 'path = "model"', "[tasks]": 'env = "frozenlake"'}
    short = folder / "short.toml"
    short.write_text("\n".join(f"[{name}]\n{line}" for name, line in needed.items()))
    assert load(short, []).tasks[0].name == "frozenlake"
    for left_out in needed:
        kept = {name: line for name, line in needed.items() if name != left_out}
        short.write_text("\n".join(f"[{name}]\n{line}" for name, line in kept.items()))
        with pytest.raises(ConfigError, match=left_out.strip("[]")):
            load(short, [])


def test_every_page_and_public_name_is_in_the_site() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = set(re.findall(r"(\S+\.md)$", navigation, re.MULTILINE))
    docs = ROOT / "docs"
    assert {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")} <= listed
    subjects = runpy.run_path(str(docs / "site/hooks.py"))["SUBJECTS"]
    public = {*rollweave.__all__, *rollweave_service.__all__}
    assert {name for names in subjects.values() for name in names} == public
