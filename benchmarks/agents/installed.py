"""Agent programs as their package indexes have them: how each is installed, started,
and copied into a sandbox.

A program gets a base URL, a key and a model's name, and the flags with which it runs
without a terminal. Nothing else is set, except where `env` says so.
"""

import fcntl
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

INSTALL_S: Final = 1200.0
"""Maximum seconds to install one program."""

MODEL: Final = "any"
"""Name of the model that programs ask for."""

NODE: Final = "node@22"
"""Package with the interpreter of the programs in JavaScript."""


@dataclass(frozen=True)
class Installed:
    """An agent program. `{url}`, `{root}` (without `/v1`), `{key}`, `{model}` and
    `{task}` in its variables and its arguments, which are words of a shell, are
    replaced.

    `npm` programs are installed with npm, others with pip in an environment of their
    own. `binary` is the native program of a package, below the folder of npm's
    packages. `python` is the least version of an interpreter that it needs. A program
    that `rewrites` its history puts messages about files behind each answer, so that a
    new sequence begins with every request.
    """

    name: str
    package: str
    program: str
    arguments: str
    env: Mapping[str, str] = field(default_factory=dict)
    npm: bool = False
    binary: str = ""
    python: tuple[int, int] = (3, 10)
    rewrites: bool = False
    says: tuple[str, ...] = ()
    """The model's answers in turn, of a program that declares no tool."""

    def path(self, folder: Path) -> Path:
        """Return where its command is if it is installed in `folder`."""
        if self.npm:
            return folder / "npm" / "node_modules" / ".bin" / self.program
        return folder / self.name / "bin" / self.program

    def missing(self, folder: Path) -> str:
        """Return why it cannot be run, "" if it can."""
        if self.path(folder).exists():
            return ""
        return f"{self.package} is not installed in {folder}"

    def command(self, folder: Path, values: Mapping[str, str]) -> list[str]:
        """Return the command on the host."""
        return [str(self.path(folder)), *self.words(values)]

    def words(self, values: Mapping[str, str]) -> list[str]:
        """Return its arguments."""
        return filled(shlex.split(self.arguments), values)

    def variables(self, values: Mapping[str, str]) -> dict[str, str]:
        """Return its environment variables, beside those of every program."""
        return dict(zip(self.env, filled(self.env.values(), values), strict=True))


def filled(texts: Iterable[str], values: Mapping[str, str]) -> list[str]:
    """Return texts with values in place of their names in braces."""
    found = []
    for text in texts:
        for name, value in values.items():
            text = text.replace(f"{{{name}}}", value)
        found.append(text)
    return found


CODE: Final = "Thought: I compute.\n<code>\n{}\n</code>"

FILE: Final = "five.py\n```\n{}\n```"

PROGRAMS: Final = (
    Installed(
        name="claude-code",
        package="@anthropic-ai/claude-code",
        program="claude",
        arguments="-p {task} --model {model} --allowedTools Bash",
        npm=True,
        binary="@anthropic-ai/claude-code/bin/claude.exe",
    ),
    Installed(
        name="codex",
        package="@openai/codex",
        program="codex",
        arguments="exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "
        "-c 'openai_base_url=\"{url}\"' --model {model} {task}",
        npm=True,
        binary="@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex",
    ),
    Installed(
        name="qwen-code",
        package="@qwen-code/qwen-code",
        program="qwen",
        arguments="-p {task} --yolo --auth-type openai --model {model}",
        npm=True,
    ),
    Installed(
        name="opencode",
        package="opencode-ai",
        program="opencode",
        arguments="run {task} --model mine/{model}",
        env={
            "OPENCODE_CONFIG_CONTENT": '{"provider": {"mine": {"npm": '
            '"@ai-sdk/openai-compatible", "options": {"baseURL": "{url}", "apiKey": "{key}"}, '
            '"models": {"{model}": {}}}}}'
        },
        npm=True,
        binary="opencode-ai/bin/opencode.exe",
    ),
    Installed(
        name="openhands",
        package="openhands",
        program="openhands",
        arguments="--headless --override-with-envs -t {task}",
        env={"LLM_MODEL": "openai/{model}", "LLM_API_KEY": "{key}", "LLM_BASE_URL": "{url}"},
        python=(3, 12),
    ),
    Installed(
        name="aider",
        package="aider-chat",
        program="aider",
        arguments="--model openai/{model} --yes-always --message {task}",
        python=(3, 10),
        rewrites=True,
        says=(FILE.format("print("), FILE.format("print(5)")),
    ),
    Installed(
        name="mini-swe-agent",
        package="mini-swe-agent",
        program="mini",
        arguments="-m openai/{model} -t {task} -y --exit-immediately",
        env={"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors"},
    ),
    Installed(
        name="smolagents",
        package="smolagents[openai,toolkit]",
        program="smolagent",
        arguments="{task} --model-type OpenAIModel --model-id {model} --api-base {url} "
        "--api-key {key}",
        says=(CODE.format("print(2 + 3)"), CODE.format("final_answer(5)")),
    ),
)


def default_folder() -> Path:
    """Return the folder in which programs are installed if none is named."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("ROLLWEAVE_AGENTS") or Path(cache) / "rollweave" / "agents")


def install(program: Installed, folder: Path) -> str:
    """Install a program unless it is there; return why that failed, "" if it did
    not.
    """
    if not program.missing(folder):
        return ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one installation at a time
            if program.npm:
                _install_npm(program, folder)
            elif program.missing(folder):
                _install_pip(program, folder)
    except (OSError, subprocess.SubprocessError) as error:
        last = str(getattr(error, "stderr", "") or error).strip().rpartition("\n")[2]
        return f"{program.package} cannot be installed: {last:.200}"
    return program.missing(folder)


def _install_npm(program: Installed, folder: Path) -> None:
    home = folder / "npm"
    home.mkdir(parents=True, exist_ok=True)
    npm = shutil.which("npm")
    if npm is None:
        raise OSError("npm is not installed")
    quiet = ["--no-fund", "--no-audit", "--loglevel=error"]
    _run([npm, "install", *quiet, "--prefix", str(home), program.package, NODE])


def _install_pip(program: Installed, folder: Path) -> None:
    home = folder / program.name
    _run([_python(program.python), "-m", "venv", "--clear", str(home)])
    _run([str(home / "bin" / "pip"), "install", "--quiet", "--no-input", program.package])


def _python(least: tuple[int, int]) -> str:
    """Return an interpreter of at least this version: Rollweave's, if it is one."""
    if sys.version_info[:2] >= least:
        return sys.executable
    names = [f"python3.{minor}" for minor in range(least[1], least[1] + 3)]
    homes = sorted(Path.home().glob(".pyenv/versions/*/bin"))
    found = [str(home / name) for home in homes for name in names if (home / name).exists()]
    found += [path for name in names if (path := shutil.which(name))]
    if not found:
        raise OSError(f"it needs Python {least[0]}.{least[1]}")
    return found[0]


def _run(command: list[str]) -> None:
    subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=INSTALL_S, stdin=None
    )


def stage(program: Installed, folder: Path, into: Path) -> list[str]:
    """Put an installed program into a folder for a sandbox; return its command there.
    Raises OSError for one that cannot run there.
    """
    into.mkdir(parents=True, exist_ok=True)
    if program.binary:
        _link(folder / "npm" / "node_modules" / program.binary, into / program.program)
        return [f"./{program.program}"]
    if program.npm:
        packages = folder / "npm" / "node_modules"
        _link(packages / "node" / "bin" / "node", into / "node")
        home = program.path(folder).resolve()
        root = packages / program.package
        shutil.copytree(root, into / "program", copy_function=_link, symlinks=False)
        return ["./node", f"program/{home.relative_to(root.resolve())}"]
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = folder / program.name / "lib" / version / "site-packages"
    if not packages.is_dir():
        raise OSError(f"it is installed for another Python than {version}, which sandboxes have")
    skipped = shutil.ignore_patterns("__pycache__", "pip", "setuptools")
    shutil.copytree(packages, into / "site", copy_function=_link, ignore=skipped)
    lines = program.path(folder).read_text().splitlines()[1:]
    paths = ["site = os.path.abspath('site')", "os.environ['PYTHONPATH'] = site"]
    start = ["import sys, os", *paths, "sys.path.insert(0, site)", *lines]
    (into / "start.py").write_text("\n".join(start))
    return ["python", "start.py"]


def _link(source: str | Path, target: str | Path) -> None:
    """Link a file, or copy it to another file system."""
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copy2(source, target)
