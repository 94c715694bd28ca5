"""The public interface: its names, its laziness, `train`, and an installation without
extras.
"""

import ast
import importlib.metadata
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import rollweave
import rollweave_service
from rollweave import RollweaveError, RunConfig, train
from rollweave.io.extras import EXTRAS
from rollweave.record.summary import Summary
from rollweave.schema.config.loading import load
from rollweave.schema.errors import ConfigError
from tests.support.commands import CONFIG

ROOT = Path(__file__).parents[1]
PUBLIC = (
    "rollweave.engine.embedded.",
    "rollweave.envs.handlers.tools.",
    "rollweave.io.http.fields.",
    "rollweave.rollout.chat.codec.",
    "rollweave.rollout.gateway.",
    "rollweave.runtime.roles.",
    "rollweave.sandbox.",
    "rollweave.schema.serving.",
    "rollweave.weights.delta",
    "rollweave_sandbox.",
    "rollweave_service.adapters.",
)
"""Prefixes of the names that pages in docs/ and examples may import from modules."""

PROMISED = {"Env", "Observation", "Step", "Message", "Task", "AgentHandler", "train"}


def python(code: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=280, check=False
    )


def parsed(source: str) -> ast.Module:
    """Parse a program, which may wait at its top level."""
    tree = compile(source, "block", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert isinstance(tree, ast.Module)
    return tree


def public_imports(source: str, package: str = "rollweave") -> set[str]:
    """Names that `source` imports from the package itself."""
    nodes = [
        node
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.ImportFrom) and node.module == package
    ]
    return {alias.name for node in nodes for alias in node.names}


@pytest.mark.parametrize("name", rollweave.__all__)
def test_every_public_name_is_there(name: str) -> None:
    namespace: dict[str, object] = {}
    exec(f"from rollweave import {name}", namespace)
    # `Options` is an alias
    assert callable(namespace[name]) or namespace[name].__module__ == "typing"


def test_the_lists_of_names_agree() -> None:
    checked = set()
    for node in ast.walk(ast.parse(Path(rollweave.__file__).read_text())):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module is not None
            and node.module.startswith("rollweave.")
        ):
            for alias in node.names:
                if alias.name not in ("train_quietly", "VERSION", "Summary"):
                    assert rollweave._MODULE_OF[alias.name] == node.module
                    checked.add(alias.name)
    assert checked == set(rollweave._MODULE_OF)
    assert set(rollweave.__all__) == checked | {"train"}
    assert set(rollweave.__all__) >= PROMISED
    assert set(dir(rollweave)) >= set(rollweave.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nonesuch'"):
        _ = rollweave.Nonesuch


def test_the_readme_imports_names_of_the_package_itself() -> None:
    sources = python_blocks(ROOT / "README.md")
    assert any(public_imports(source) for source in sources.values())
    for path, source in sources.items():
        assert public_imports(source) <= set(rollweave.__all__), path
        assert names_in_modules(source) == set(), path


def test_documents_and_examples_import_public_names_only() -> None:
    # examples/one_step.py shows how the core works, to those who read its code.
    users = [path for path in ROOT.glob("examples/**/*.py") if path.name != "one_step.py"]
    sources = {path: path.read_text() for path in users}
    for page in (ROOT / "docs").glob("**/*.md"):
        sources |= python_blocks(page)
    assert any(names_in_modules(source) for source in sources.values())
    for path, source in sources.items():
        for package in (rollweave, rollweave_service):
            assert public_imports(source, package.__name__) <= set(package.__all__), path
        assert all(name.startswith(PUBLIC) for name in names_in_modules(source)), path


def python_blocks(page: Path) -> dict[Path, str]:
    """The Python code of a page, each block by its number."""
    blocks = page.read_text().split("\n```python\n")[1:]
    return {page / str(number): block.partition("\n```")[0] for number, block in enumerate(blocks)}


def names_in_modules(source: str) -> set[str]:
    """Names that `source` imports from modules of the packages, with their modules."""
    nodes = [
        node
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith(
            ("rollweave.", "rollweave_sandbox.", "rollweave_service.")
        )
    ]
    return {f"{node.module}.{alias.name}" for node in nodes for alias in node.names}


def test_import_loads_nothing_heavy() -> None:
    code = """
        import sys, rollweave
        assert not {"torch", "numpy", "msgspec", "pydantic", "aiohttp", "asyncio"} & set(sys.modules), sorted(sys.modules)
        from rollweave import Env, Observation, Step, Message, Task, AgentHandler, RunConfig
        from rollweave_service import Rollouts
        assert "torch" not in sys.modules
    """
    done = python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.variants
@pytest.mark.parametrize(
    "first",
    ["import rollweave.io.disk", "from rollweave.train import needs", "import rollweave"],
)
def test_train_is_the_function_whatever_is_imported_first(first: str) -> None:
    done = python(
        f"{first}\nfrom rollweave import train\nimport rollweave.train.lengths\nassert "
        "rollweave.train is train\ntrain.__call__"
    )
    assert done.returncode == 0, done.stderr


def test_the_version_is_that_of_the_distribution() -> None:
    assert importlib.metadata.version("rollweave") == rollweave.__version__


def test_the_package_is_typed() -> None:
    assert (Path(rollweave.__file__).parent / "py.typed").exists()


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.toml"
    path.write_text(CONFIG)
    return path


def test_train_runs_and_resumes_and_refuses(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = train(config, inproc=True)
    assert isinstance(summary, Summary)
    assert summary.steps == 2
    assert Path("runs/small/report.html").exists()
    with pytest.raises(ConfigError, match="holds a run already"):
        train("small.toml", inproc=True)
    assert train("runs/small", ["run.steps=3"], inproc=True).steps == 3
    run_config = load(config, ["run.steps=1"])
    assert isinstance(run_config, RunConfig)
    assert train(run_config, fresh=True, inproc=True).steps == 1
    with pytest.raises(ConfigError, match="overrides must be empty"):
        train(run_config, ["run.steps=2"], fresh=True)
    with pytest.raises(ConfigError, match=r"run\.steps must be at least 0"):
        train(config, ["run.steps=-1"])
    assert capsys.readouterr().out == ""


def test_settings_without_effect_are_refused(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval\.stop_at must be left out without eval\.every"):
        train(config, ["run.steps=0", "eval.stop_at=0.5"], inproc=True)
    made = load(config)
    written = made.eval.model_copy(update={"stop_at": 0.5})
    with pytest.raises(ConfigError, match=r"eval\.stop_at: must be left out without eval\.every"):
        train(made.model_copy(update={"eval": written}), inproc=True)


def test_a_run_that_fails_raises(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollweave.runtime.launch.train", failed)
    with pytest.raises(RollweaveError, match="the engine is gone"):
        train(config)


def test_a_run_that_is_stopped_raises(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollweave.runtime.launch.train", stopped)
    with pytest.raises(KeyboardInterrupt):
        train(config)


def failed(*_: object, **__: object) -> object:
    return Outcome(error="the engine is gone")


def stopped(*_: object, **__: object) -> object:
    return Outcome(interrupted=True)


class Outcome:
    def __init__(self, *, error: str = "", interrupted: bool = False) -> None:
        self.error, self.interrupted = error, interrupted


BLOCKED = f"""
import sys
for name in {sorted({name for names in EXTRAS.values() for name in names})!r}:
    sys.modules[name] = None
"""


@pytest.mark.extended
def test_training_needs_no_extra(config: Path) -> None:
    done = python(
        f"{BLOCKED}\nimport rollweave\nassert rollweave.train('small.toml', "
        "inproc=True).steps == 2",
        config.parent,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("overrides", "line", "extra"),
    [
        (
            ("tasks.0.env=frozenlake",),
            "environment 'frozenlake': gymnasium is not installed (pip install",
            "envs",
        ),
        pytest.param(
            ("tasks.0.env=swe",),
            "environment 'swe': jsonschema is not installed (pip install",
            "tools",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("rollout.scheduling=trajectory",),
            "rollout.scheduling: must have sklearn installed (pip install",
            "predict",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_needs_an_extra_names_it(
    config: Path, overrides: tuple[str, ...], line: str, extra: str
) -> None:
    sets = [part for override in overrides for part in ("--set", override)]
    arguments = ["rollweave", "train", "small.toml", *sets]
    code = f"{BLOCKED}\nsys.argv = {arguments!r}\nfrom rollweave.cli.entry import main\nmain()"
    done = python(code, config.parent)
    assert done.returncode == 2, done.stderr
    assert line in done.stderr
    assert f"[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_simulations_that_predict_need_the_extra(tmp_path: Path) -> None:
    path = ROOT / "examples" / "simulate.toml"
    arguments = ["rollweave", "simulate", str(path), "--set", "rollout.scheduling=trajectory"]
    code = f"{BLOCKED}\nsys.argv = {arguments!r}\nfrom rollweave.cli.entry import main\nmain()"
    done = python(code, tmp_path)
    assert done.returncode == 2, done.stderr
    assert "rollout.scheduling must have sklearn installed (pip install" in done.stderr


def test_a_configuration_for_the_simulator_alone_is_refused() -> None:
    run_config = load(ROOT / "examples" / "simulate.toml", [])
    with pytest.raises(ConfigError, match=r"rollweave simulate CONFIG"):
        train(run_config)
