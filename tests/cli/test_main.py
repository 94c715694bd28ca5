"""Exit codes and error lines, and a small run from `train` to `report`."""

import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollweave.cli.bench import BENCHES, NAMES
from tests.cli.conftest import PATHS, Shell
from tests.support.commands import CONFIG, invoke

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.toml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which the small run was trained."""
    directory = tmp_path_factory.mktemp("finished")
    with contextlib.chdir(directory):
        Path("small.toml").write_text(CONFIG)
        assert invoke("train", "small.toml", "--inproc")[0] == 0
    return directory


@pytest.fixture
def trained(finished: Path, config: Path) -> Path:
    """A copy of the run of `finished` in the working directory."""
    shutil.copytree(finished / "runs", "runs", symlinks=True)
    return config.parent / "runs" / "small"


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["train", "none.toml"], ["config must be a readable text file"]),
        (["train", "small.toml", "--set", "rollout.alpha"], ["must be key=value"]),
        (["train", "small.toml", "--mode", "wild"], ["rollout.mode must be"]),
        (
            ["train", "small.toml", "--set", "run.steps=-1", "--set", "engines.cuont=2"],
            ["run.steps must be at least 0", "unknown key engines.cuont (did you mean count?)"],
        ),
        (
            ["train", "small.toml", "--set", "tasks.0.env=lake"],
            ["tasks.0: environment must be one of"],
        ),
        (
            ["train", "small.toml", "--resume", "--fresh"],
            ["--resume and --fresh must not be given together"],
        ),
        (["train", "small.toml", "--resume"], ["must hold a run to resume"]),
        (
            ["train", "small.toml", "--set", f"run.dir={'d' * 300}"],
            ["run.dir: must be a readable directory"],
        ),
        (
            ["train", "small.toml", "--set", r'run.dir="a\u0000b"'],
            ["run.dir must be a path, without a null byte"],
        ),
        (
            ["train", "small.toml", "--set", "run.dir=/proc/x"],
            ["run.dir: must be a directory to write to, got /proc/x"],
        ),
        (
            ["train", "small.toml", "--set", "tasks.0.env=./envs.py:Fine"],
            ["(did you mean envs:Fine, run in the directory of"],
        ),
        (["eval", "nothing"], ["RUN must be a run directory"]),
        (["eval", "n" * 300], ["RUN must be a run directory"]),
        (["eval", "small.toml"], ["model.path must name a checkpoint to be evaluated"]),
        (["eval", "nothing.toml"], ["nothing.toml: config must be a readable text file"]),
        (["eval", ".", "--env", "fine"], ["CHECKPOINT must be a folder with a config.json"]),
        (["report", "nothing"], ["RUN must be a run directory"]),
        (["trace", "nothing"], ["RUN must be a run directory"]),
        (["bench", "nothing"], [f"NAME must be one of {', '.join(NAMES)}, got 'nothing'"]),
        (["bench", "engine", "--seeds", "3"], ["--seeds must be left out for bench engine"]),
    ],
)
@pytest.mark.usefixtures("config")
def test_wrong_input_prints_a_line_for_each_problem_and_exits_with_2(
    arguments: list[str], lines: list[str]
) -> None:
    code, _, errors = invoke(*arguments)
    assert code == 2
    assert len(errors) == len(lines)
    assert all(error.startswith("error: ") for error in errors)
    assert all(any(line in error for error in errors) for line in lines)


def test_a_shell_sees_the_exit_code_and_no_traceback(config: Path, shell: Shell) -> None:
    process = shell("train", str(config), "--set", "run.steps=none")
    text, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "run.steps must be" in errors
    assert "Traceback" not in errors
    assert text == ""


def odd(command: str, directory: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command, in which `$R` stands for rollweave; its exit code is that of
    the first program.
    """
    settings = os.environ | {
        "PYTHONPATH": PATHS,
        "OMP_NUM_THREADS": "1",
        "R": f"{sys.executable} -m rollweave.cli.main",
        **env,
    }
    arguments = ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"]
    return subprocess.run(
        arguments, capture_output=True, text=True, env=settings, cwd=directory, timeout=100
    )


@pytest.mark.extended
def test_replaces_characters_that_the_terminal_lacks(tmp_path: Path) -> None:
    done = odd("$R doctor", tmp_path, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "?  python" in done.stdout


@pytest.mark.extended
def test_runs_with_closed_outputs(config: Path, tmp_path: Path) -> None:
    assert odd(f"$R train {config} --set run.steps=-1 >&- 2>&-", tmp_path).returncode == 2


@pytest.mark.slow
def test_a_run_outlives_the_reader_of_its_output(config: Path, tmp_path: Path) -> None:
    done = odd(f"$R train {config} --inproc 2>&1 | head -1", tmp_path)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 1)
    assert json.loads((tmp_path / "runs" / "small" / "summary.json").read_text())["steps"] == 2


@pytest.mark.usefixtures("config")
def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    code, text, _ = invoke("train", "small.toml", "--dry-run")
    assert code == 0
    assert "ready: all checks passed" in text
    assert not (tmp_path / "runs").exists()


def test_refuses_to_train_a_simulation(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[run]\nname = "x"\n[sim]\nmodel = "qwen3-8b"\n[[tasks]]\nenv = "frozenlake"\n')
    code, _, lines = invoke("train", str(file), "--dry-run")
    assert code == 2
    assert len(lines) == 1
    assert lines[0].startswith("error: model must be given for training, got only [sim]")


def test_prints_the_version_of_the_package() -> None:
    code, text, _ = invoke("--version")
    assert (code, text) == (0, f"rollweave {importlib.metadata.version('rollweave')}\n")


def test_help_and_readme_name_every_bench_and_every_bench_is_a_function() -> None:
    _, text, _ = invoke("bench", "--help")
    words = re.findall(r"[a-z_]+", text)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (row,) = (line for line in readme.splitlines() if "`rollweave bench NAME`" in line)
    for name, place in BENCHES.items():
        assert name in words
        assert f"`{name}`" in row
        module, _, function = place.partition(":")
        source = ROOT / f"{module.replace('.', '/')}.py"
        assert f"\ndef {function}(" in source.read_text(encoding="utf-8")  # to import all is slow


@pytest.mark.usefixtures("config")
def test_a_setting_that_others_exclude_is_refused_with_a_line() -> None:
    unused = ["--mode", "sync", "--set", "rollout.alpha=2", "--set", "algorithm.gamma=0.5"]
    lines = [
        "rollout.alpha must be left out unless rollout.mode is partial, bounded or decoupled (it "
        "is sync), got 2",
        "algorithm.gamma must be left out unless algorithm.advantage is gae, gae_turn, gigpo or "
        "gigpo_no_std (it is grpo), got 0.5",
    ]
    for more in (["--dry-run"], ["--inproc"]):
        code, _, errors = invoke("train", "small.toml", *more, *unused)
        assert code == 2
        assert [line.partition("small.toml: ")[2] for line in errors] == lines


@pytest.mark.parametrize("named", ["runs/small", "small"])
def test_resumes_a_run_directory_without_an_option(trained: Path, named: str) -> None:
    code, _, errors = invoke("train", named, "--inproc", "--set", "run.steps=3")
    assert code == 0, errors
    assert errors[0] == "resuming at step 2 if its checkpoint is intact; nothing is lost"
    assert json.loads((trained / "summary.json").read_text())["steps"] == 3


def test_a_run_directory_may_be_copied_or_moved(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its configuration may name another directory: it may have been copied or moved,
    or be given relative to another directory.
    """
    original, copy = trained, tmp_path / "elsewhere/copy"
    shutil.copytree(original, copy)
    before = {file: file.read_bytes() for file in original.rglob("*") if file.is_file()}
    (tmp_path / "another place").mkdir()
    monkeypatch.chdir(tmp_path / "another place")
    code, _, errors = invoke("train", str(copy), "--inproc", "--set", "run.steps=3")
    assert code == 0, errors
    assert json.loads((copy / "summary.json").read_text())["steps"] == 3
    assert (
        invoke("train", "../elsewhere/copy", "--fresh", "--inproc", "--set", "run.steps=1")[0] == 0
    )
    assert json.loads((copy / "summary.json").read_text())["steps"] == 1
    assert {file: file.read_bytes() for file in original.rglob("*") if file.is_file()} == before
    code, _, (error,) = invoke("train", str(copy), "--set", "run.name=other")
    assert (code, "run.name must be left out if a run directory is given" in error) == (2, True)


def test_help_names_every_command() -> None:
    _, text, _ = invoke("--help")
    for command in ("train", "eval", "doctor", "trace", "report", "bench"):
        assert f"  {command} " in text


@pytest.mark.usefixtures("config")
def test_trains_evaluates_and_reports(tmp_path: Path) -> None:
    code, text, errors = invoke("train", "small.toml", "--inproc")
    assert code == 0, (text, errors)
    summary = json.loads((tmp_path / "runs" / "small" / "summary.json").read_text())
    account = summary["account"]
    assert f"{account['started']} started = {account['trained']} trained" in text
    assert summary["steps"] == 2
    assert "held-out episodes" in text
    (model,) = re.findall(r"^model +(runs/small/\S+/hf) *$", text, re.MULTILINE)
    assert (tmp_path / model / "config.json").exists()

    assert invoke("train", "small.toml", "--inproc")[0] == 2  # it does not write over a run

    page = tmp_path / "runs" / "small" / "report.html"
    assert "runs/small/report.html" in text
    assert "every trajectory is accounted for" in page.read_text()

    code, text, errors = invoke("eval", "small", "--episodes", "5", "--inproc")
    assert code == 0, (text, errors)
    assert "small at step 2" in text
    assert "evaluating" in errors
    assert "training" not in errors
    assert any(line.startswith("evaluation of small at step 2: ") for line in errors), errors
    for text in ("saving the last checkpoint", "ending", "final evaluation"):
        assert not any(line.startswith(text) for line in errors), errors
    assert any(line.endswith("finished: evaluated episodes: 5 of fine") for line in errors), errors
    evaluated = json.loads(
        (tmp_path / "runs/small/evaluations/step-2-t0-n5/summary.json").read_text()
    )
    assert evaluated["eval_episodes"] == {"fine": 5}
    assert evaluated["steps"] == 0
    assert evaluated["account"]["started"] == 0

    export = "runs/small/checkpoints/step-000002/hf"
    code, _, errors = invoke("eval", export)
    assert code == 2
    assert errors == [
        f"error: --env must name an environment for the checkpoint {export}, got none"
    ]
    few = ("--episodes", "5", "--inproc")
    code, text, errors = invoke(
        "eval", export, "--env", "tests.cli.envs:Fine", "--set", "tasks.0.max_tokens=64", *few
    )
    assert code == 0, (text, errors)
    counted = json.loads((tmp_path / "runs/hf-tests.cli.envs-Fine-t0-n5/summary.json").read_text())
    assert counted["eval_episodes"] == {"tests.cli.envs:Fine": 5}
    replaced = ("--set", f'model={{path="{export}"}}')
    code, text, errors = invoke("eval", "small.toml", *replaced, *few)
    assert code == 0, (text, errors)
    again = json.loads((tmp_path / "runs/small-base-t0-n5/summary.json").read_text())
    assert again["eval_episodes"] == {"fine": 5}

    assert "fine" in invoke("trace", "small")[1]
    page.unlink()
    assert invoke("report", "small")[0] == 0
    assert "every trajectory is accounted for" in page.read_text()

    weights = tmp_path / "runs/small/checkpoints/step-000002/hf/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    code, _, errors = invoke("eval", "small", "--inproc")
    assert code == 2
    (line,) = errors
    assert "model.safetensors must be a complete safetensors file" in line


@pytest.mark.parametrize(
    ("env", "exit_code", "last"), [("Interrupts", 130, "interrupted"), ("Raises", 1, "error: ")]
)
def test_an_evaluation_without_a_result_reports_the_reason(
    trained: Path, env: str, exit_code: int, last: str
) -> None:
    of_run = trained / "config.toml"
    of_run.write_text(of_run.read_text().replace("envs:Fine", f"envs:{env}"))
    code, _, errors = invoke("eval", "small", "--episodes", "2", "--inproc")
    assert (code, errors[-1].startswith(last)) == (exit_code, True), errors


def test_ctrl_c_before_a_command_begins_is_silent(tmp_path: Path) -> None:
    """The signal arrives during the imports, which take most of the startup."""
    program = """
import os, signal, sys
class Interrupts:
    def find_spec(self, name, *_):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
from rollweave.cli.entry import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_ends_a_run_in_order_with_130(config: Path, shell: Shell) -> None:
    process = shell("train", str(config), "--inproc", "--set", "run.steps=100000")
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step "):
            break
    process.send_signal(signal.SIGINT)
    text, errors = process.communicate(timeout=100)
    assert process.returncode == 130, errors
    assert "stopped in order" in errors
    summary = json.loads(Path("runs/small/summary.json").read_text())
    assert summary["interrupted"]
    assert summary["account"]["in_flight"] == 0
    assert f"{summary['account']['started']} started = " in text


@pytest.mark.usefixtures("config")
def test_a_failed_run_reports_the_reason_and_exits_with_1() -> None:
    code, text, errors = invoke(
        "train", "small.toml", "--inproc", "--set", "tasks.0.env=tests.cli.envs:Raises"
    )
    assert code == 1, errors
    assert errors[-1].startswith("error: ")
    assert "out of cheese" in errors[-1]
    assert " started = 0 trained" in text


@pytest.mark.usefixtures("config")
@pytest.mark.parametrize(
    "name",
    [
        *("journal.bin", "metrics.jsonl", "trace.json", "trajectories/000000.bin", "lock"),
        "logs/e0.log",
    ],
)
def test_refuses_a_directory_in_place_of_a_file(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "runs" / "small"
    (directory / name).mkdir(parents=True)
    (directory / "config.toml").write_text(CONFIG)
    for command in (
        ("train", "--resume"),
        ("train", "--dry-run"),
        ("report",),
        ("eval",),
        ("trace",),
    ):
        code, text, errors = invoke(command[0], "runs/small", *command[1:])
        assert code == 2, (command, text, errors)
        printed = " ".join("".join([text, *errors]).split())
        assert f"{name} must be a file, got a directory; move it away" in printed.replace(
            "- ", "-"
        ), command


@pytest.mark.usefixtures("config")
def test_refuses_a_read_only_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "runs" / "small"
    directory.mkdir(parents=True)
    (directory / "config.toml").write_text(CONFIG)
    (directory / "metrics.jsonl").touch()
    access = os.access

    def read_only(path: Path, mode: int) -> bool:
        return access(path, mode) and not (mode & os.W_OK and Path(path).absolute() == directory)

    monkeypatch.setattr(os, "access", read_only)
    for command in (("train", "runs/small"), ("report", "runs/small")):
        code, _, errors = invoke(*command)
        assert (code, len(errors)) == (2, 1), (command, errors)
        assert "runs/small must be a directory to write to, got one that is read-only" in errors[0]
