"""The user's modules, files and variables reach every host."""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rollweave.runtime.hosts import user_files
from rollweave.runtime.hosts.user_files import UserFiles, of_run, of_worker, pack
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError
from rollweave.schema.hosts import UserModule
from tests.runtime.hosts.joined import agent, listening
from tests.runtime.hosts.started import Started, on

PROGRAM = """
import os, pathlib
from helpers.words import WORD
from rollweave.io.parent import Parent

parent = Parent.from_arguments()
parent.receive()
words = [WORD, os.environ["COLOR"], pathlib.Path("prompts/first.txt").read_text()]
parent.send(" ".join(words).encode())
parent.receive()
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the user's files."""
    here = tmp_path / "work"
    for name, text in {
        "program.py": PROGRAM,
        "helpers/__init__.py": "",
        "helpers/words.py": "WORD = 'hello'",
        "prompts/first.txt": "world",
        "prompts/.hidden": "no",
        "large.bin": "",
    }.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(text)
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(str(here))
    return here


def config(
    files: tuple[str, ...] = (),
    env: str = "program:Game",
    options: Mapping[str, Any] | None = None,
    workers: int = 1,
    warmup: int = 0,
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "r", "steps": 1},
            "model": {"path": "m"},
            "tasks": [{"env": env, "options": dict(options or {})}],
            "cluster": {"launcher": "local", "hosts": 2, "files": files},
            "workers": {"count": workers},
            "warmup": {"steps": warmup},
        }
    )


async def test_files_and_variables_reach_a_host_and_are_removed_from_it(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.delenv("COLOR", raising=False)
    run = config(files=("./helpers/",), options={"path": "prompts/first.txt", "name": "helpers"})
    assert run.cluster is not None
    modules = of_run(run).modules
    archive = pack(of_run(run), run.cluster.files)
    async with (
        listening(tmp_path, archive=archive, modules=modules, env={"COLOR": "blue"}) as here,
        agent(here.address, "--user-code", "--env", "COLOR", role="program") as process,
    ):
        one = Started(on(await asyncio.wait_for(here.joined.get(), 60)), tmp_path / "one.log")
        assert await one.ask(b"go") == b"hello blue world"
        (folder,) = temporary.glob("rollweave-host-*")
        assert not (folder / "prompts" / ".hidden").exists()
        await here.listener.close()
        assert await process.wait() == 0
        assert list(temporary.iterdir()) == []


def test_modules_are_those_that_the_tasks_name(directory: Path) -> None:
    run = config(options={"reward": "helpers.words:WORD", "image": "ubuntu:latest", "size": 4})
    assert of_run(run).modules == (
        UserModule(setting="tasks.0.env", value="program:Game", module="program"),
        UserModule(setting="tasks.0.options.reward", value="helpers.words:WORD", module="helpers"),
    )
    assert of_run(config(env="frozenlake")) == UserFiles()
    assert pack(UserFiles(), ()) == b""
    assert of_run(config(workers=0, options={"path": "prompts/first.txt"})) == UserFiles()


def test_a_trainer_that_warms_up_needs_the_modules_without_workers(directory: Path) -> None:
    warm = config(workers=0, warmup=1, options={"path": "prompts/first.txt"})
    (module,) = of_run(warm).modules
    assert module == UserModule(setting="tasks.0.env", value="program:Game", module="program")
    assert of_run(warm).paths == ("prompts/first.txt",)
    assert of_run(config(workers=0, warmup=1, env="frozenlake")) == UserFiles()


def test_a_recipe_of_an_image_brings_its_files(directory: Path) -> None:
    recipe = directory / "images" / "small.toml"
    recipe.parent.mkdir()
    (recipe.parent / "base.tar").write_bytes(bytes(10240))
    (recipe.parent / "lock").touch()
    steps = [("../prompts", "/p"), ("/etc/hostname", "/h"), ("lock", "/l")]
    copied = "".join(f'[[copy]]\nsource = "{here}"\ntarget = "{there}"\n' for here, there in steps)
    recipe.write_text(f'name = "a"\nbase = "base.tar"\nlock = "lock"\n{copied}')
    named = of_run(config(env="program"), ["images/small.toml"]).paths
    there = {Path(path).relative_to(directory) for path in named if path.startswith("/")}
    expected = {"images/small.toml", "images/base.tar", "images/lock", "prompts"}
    assert {str(path) for path in there} == expected
    assert pack(UserFiles(paths=named), ())


def test_a_worker_of_the_users_needs_its_module_or_script(directory: Path) -> None:
    (module,) = of_worker("helpers.words:Words").modules
    assert module.module == "helpers"
    assert of_worker("./program.py:Program") == UserFiles(paths=("./program.py",))
    assert of_worker("/elsewhere/program.py:Program") == UserFiles()


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "nowhere"])
def test_files_elsewhere_are_refused(directory: Path, name: str) -> None:
    (directory.parent / "other").touch()
    with pytest.raises(ConfigError, match=rf"cluster\.files must be .* below .*, got {name}"):
        pack(UserFiles(), (name,))


def test_too_many_bytes_are_refused(directory: Path) -> None:
    os.truncate("large.bin", user_files.BYTES + 1)
    with pytest.raises(ConfigError, match=r"at most 10000 files and 64 MiB.*large\.bin"):
        pack(UserFiles(), ("large.bin",))


async def test_a_host_without_a_module_is_refused_in_one_line(tmp_path: Path) -> None:
    needed = UserModule(setting="tasks.0.env", value="nim_pro:Nim", module="nim_pro")
    async with (
        listening(tmp_path, modules=(needed,)) as here,
        agent(here.address, "--user-code") as process,
    ):
        _, errors = await process.communicate()
        line = (
            "host b: tasks.0.env must be importable on every host, got nim_pro:Nim: there is no "
            "module nim_pro"
        )
        assert process.returncode == 2
        assert errors.decode().strip().endswith(line)
        assert await here.refused.get() == line


async def test_a_torn_archive_is_refused(tmp_path: Path, directory: Path) -> None:
    archive = pack(of_run(config()), ())[:-20]
    async with (
        listening(tmp_path, archive=archive) as here,
        agent(here.address, "--user-code") as process,
    ):
        assert await process.wait() == 2
        assert "the user's files must be unpacked" in await here.refused.get()
