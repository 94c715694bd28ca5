"""The documents are true as far as code can tell: what they refer to exists, and the
settings and commands that they show are accepted.
"""

import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import typer
import yaml
from typer.testing import CliRunner

from rollweave.cli.main import app
from rollweave.envs.registry import ENTRY_POINTS
from rollweave.sandbox.references import Recipe
from rollweave.schema.config.loading import settings_of, validated
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.simulation import HostsFile, ServingFile
from tests.support.pages import inline_code

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("examples/**/*.md"),
    *ROOT.glob("packages/*/*.md"),
]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_papers_name_modules_that_exist() -> None:
    text = (ROOT / "docs/papers.md").read_text()
    modules = set(re.findall(r"`([\w/]+\.py)`", text))
    assert len(modules) > 40
    sources = (ROOT / "src/rollweave", *ROOT.glob("packages/*/src"))
    assert [
        name for name in sorted(modules) if not any((source / name).exists() for source in sources)
    ] == []


def test_every_cited_paper_is_listed() -> None:
    """A name that is followed by a section, figure, table or algorithm is a
    citation.
    """
    listed = (ROOT / "docs/papers.md").read_text()
    cited = set()
    for path in (*ROOT.glob("src/**/*.py"), *ROOT.glob("packages/*/src/**/*.py")):
        text = path.read_text()
        cited |= set(re.findall(r"\b([A-Z][A-Za-z]+)(?: Agent)?\s+(?:§|Alg\.|Fig\.|App\.)", text))
    assert cited >= {"RollArt", "Heddle", "Laminar", "ROSE"}
    assert [name for name in sorted(cited) if name not in listed] == []


def test_the_number_of_settings_is_the_decided_one() -> None:
    """One more is a decision, to be defended in this record."""
    text = (ROOT / "docs/decisions/0011-settings.md").read_text()
    assert f"there are {len(settings_of(RunConfig))}" in text


def test_the_glossary_is_short_and_in_order() -> None:
    rows = re.findall(r"^\*\*(.+?)\*\*", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    assert 20 <= len(rows) <= 40
    assert rows == sorted(rows, key=str.lower)


def ray_job() -> Any:
    return yaml.safe_load((ROOT / "examples/kuberay.yaml").read_text())


def ray_job_problems(manifest: Any) -> list[str]:
    """Compare a manifest with KubeRay's definition of a RayJob."""
    schema = yaml.safe_load((ROOT / "tests/rayjob.yaml").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(manifest)]


def test_the_ray_job_is_one_that_kuberay_accepts() -> None:
    manifest = ray_job()
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    assert ray_job_problems(manifest) == []
    cluster = manifest["spec"]["rayClusterSpec"]
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"ray=={cluster['rayVersion']}" in pins
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    options = re.findall(r"--[a-z]+", manifest["spec"]["entrypoint"])
    assert options == ["--cluster"]
    assert (
        "--cluster" in CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200"}).output
    )


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("spec.entryPoint", "sh", "'entryPoint' was unexpected"),
        ("spec.rayClusterSpec.rayVersion", 2.6, "2.6 is not of type 'string'"),
        ("spec.rayClusterSpec.headGroupSpec.rayStartParams.num-cpus", 0, "0 is not of type"),
        ("spec.rayClusterSpec.headGroupSpec.replicas", 1, "'replicas' was unexpected"),
        ("spec.rayClusterSpec.workerGroupSpecs.0.replicas", "2", "'2' is not of type 'integer'"),
        ("spec.rayClusterSpec.workerGroupSpecs.0.template.spec.volume", [], "'volume' was"),
    ],
)
def test_a_mistake_in_a_ray_job_is_noticed(field: str, value: Any, problem: str) -> None:
    manifest = ray_job()
    place = manifest
    *path, name = field.split(".")
    for step in path:
        place = place[int(step) if step.isdigit() else step]
    place[name] = value
    (message,) = ray_job_problems(manifest)
    assert problem in message


SLURM = {
    "scontrol": "echo node1; echo node2",
    "getent": 'echo "$2" >> asked; echo "10.0.0.2  STREAM $2"; echo "10.9.0.2  STREAM"',
    "ip": 'echo "$4 dev eth0 src 10.0.0.1 uid 0"',
    "srun": 'echo "$*" > agents; exec sleep 60',
    "rollweave": 'echo "$*" > trained; until [ -s agents ]; do sleep 0.01; done; exit 3',
}
"""Commands in place of those of the batch script: agents wait, and the run fails."""


def test_the_batch_script_ends_as_its_run_does_and_leaves_no_agent(tmp_path: Path) -> None:
    (script,) = (block for block in fenced(ROOT / "docs/CLUSTER.md", "") if "#SBATCH" in block)
    for name, command in SLURM.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{command}\n")
        (tmp_path / name).chmod(0o755)
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_CPUS_PER_TASK": "64",
    }
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, timeout=50, check=False
    )  # its output ends with the last of its processes
    assert (done.returncode, done.stderr) == (3, b"")
    assert (tmp_path / "asked").read_text() == "node2\n"
    agents = (tmp_path / "agents").read_text()
    assert agents == "--cpus-per-task=64 rollweave host --join 10.0.0.1:7400 --user-code\n"
    trained = (tmp_path / "trained").read_text()
    assert trained == "train run.toml --set cluster.address=10.0.0.1:7400\n"


def recipe(target: str) -> str:
    """Return the commands of a target of the Makefile."""
    makefile = (ROOT / "Makefile").read_text()
    (commands,) = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    return str(commands)


def test_make_test_names_what_it_leaves_out() -> None:
    (expression,) = re.findall(r'-m "(.*)"', recipe("test"))
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]
    markers = {marker.partition(":")[0] for marker in settings["ini_options"]["markers"]}
    assert set(re.findall(r"not (\w+)", expression)) == markers - {"variants"}
    named = dict(re.findall(r"(\w+) \(make ([\w-]+)", recipe("test")))
    assert named.keys() == markers - {"variants"}
    for marker, target in named.items():
        runs = re.findall(r'-m ("[^"]*"|[a-z]\w*)', recipe(target))
        assert any(f"not {marker}" not in run for run in runs)
    assert " -rs " in recipe("test"), "it shows the reasons of skipped tests"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_relative_links_have_targets(path: Path) -> None:
    for link, heading in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", path.read_text()):
        if "://" in link or link.startswith("mailto:"):
            continue
        target = path.parent / link if link else path
        assert target.exists(), link
        assert not heading or heading in anchors(target), f"{link}#{heading}"


def test_the_readme_names_every_command_and_extra() -> None:
    names = set(spans(ROOT / "README.md"))
    commands = typer.main.get_command(app)
    assert isinstance(commands, typer.core.TyperGroup)
    shown = {name.split()[1] for name in names if name.startswith("rollweave ")}
    assert commands.commands.keys() - shown == set()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extras["optional-dependencies"].keys() - names == {"docs", "fuzz", "test"}


def fenced(path: Path, language: str) -> list[str]:
    """Return the code blocks of a page in this language; "" stands for terminals."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
    return [block for of, block in blocks if of == language]


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def spans(path: Path) -> list[str]:
    """Return the inline code of a page."""
    return inline_code(path.read_text())


def completed(snippet: dict[str, Any]) -> dict[str, Any]:
    """Add what a configuration needs beside this part of one."""
    config = {"run": {"name": "example"}, "tasks": [{"env": "frozenlake"}], **snippet}
    config["model"] = {"scratch": {}} | config.get("model", {})
    if "path" in config["model"]:
        del config["model"]["scratch"]
    groups = config.get("engines", [])
    roles = [config.get("workers", {}), config.get("trainer", {}), *config["tasks"]]
    roles += [groups] if isinstance(groups, dict) else groups
    named = {role["pool"] for role in roles if "pool" in role} - config.get("pools", {}).keys()
    if named:
        config["pools"] = config.get("pools", {}) | {name: {"resource": name} for name in named}
    if "cluster" in config or ("pools" in config and "sim" not in config):
        cluster = {"address": "10.0.0.1:7400", "hosts": 2}
        config["cluster"] = cluster | config.get("cluster", {})
    return config


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_settings_that_are_shown_are_accepted(path: Path) -> None:
    for block in fenced(path, "toml"):
        snippet = tomllib.loads(block)
        if "hosts" in snippet:
            validated(HostsFile, snippet, path.name)
        elif isinstance(snippet.get("engines"), int):
            validated(ServingFile, snippet, path.name)
        elif "base" in snippet:
            msgspec.convert(snippet, Recipe)
        elif "project" in snippet:
            assert snippet["project"]["entry-points"].keys() <= set(ENTRY_POINTS)
        else:
            assert validated(RunConfig, completed(snippet), path.name)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_modules_that_are_named_exist(path: Path) -> None:
    """Attributes of modules exist, too, as in `core/policy/relay.join_at`."""
    source = ROOT / "src/rollweave"
    packages = "|".join(folder.parent.name for folder in source.glob("*/__init__.py"))
    named = re.compile(rf"((?:{packages})/[\w/]+?)/?(?:\.(?!py$)(\w+)[\w.]*|\.py)?")
    for span in spans(path):
        if (match := named.fullmatch(span)) is None or (source / span).exists():
            continue
        module, attribute = source / f"{match[1]}.py", match[2]
        assert module.exists(), span
        assert attribute is None or re.search(rf"\b{attribute}\b", module.read_text()), span


def test_defaults_that_are_shown_are_those_of_the_schema() -> None:
    section = (ROOT / "docs/MIGRATING.md").read_text().split("## Defaults that differ\n")[1]
    rows = re.findall(r"^\| `([\w.]+)` \| ([^|]+?) \|", section.split("\n## ")[0], re.MULTILINE)
    assert len(rows) > 15
    config = validated(RunConfig, completed({}), "MIGRATING.md")
    loss = config.algorithm.loss_values
    for key, shown in rows:
        name, field = key.split(".")
        section_of = config.tasks[0] if name == "tasks" else getattr(config, name)
        value = getattr(section_of, field)
        value = getattr(loss, field, "unset") if value is None else value
        text = shown.partition(":")[0]
        assert (float(text) if text[0].isdigit() else text) == value, key


NO_SETTINGS = ("run.checkpoint_s", "sandbox.ended")
"""Inline code that looks like a setting: one of an earlier version, and an
attribute.
"""


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_settings_that_are_named_exist(path: Path) -> None:
    known = set(NO_SETTINGS)
    for key in settings_of(RunConfig):
        parts = key.split(".")
        known |= {".".join(parts[:count]) for count in range(2, len(parts) + 1)}
    sections = "|".join(RunConfig.model_fields)
    files = r"toml|json|jsonl|md|html|py|bin"
    named = re.compile(rf"((?:{sections})\.(?!(?:{files})\b)[a-z_.A-Z0-9]+)(?: ?=.*)?")
    text = path.read_text()
    if path.name == "MIGRATING.md":
        text = re.sub(r"^\|.*?(?<!\\)\|", "|", text, flags=re.MULTILINE)  # names of others
    keys = [match[1] for span in inline_code(text) if (match := named.fullmatch(span))]
    assert [key for key in keys if re.sub(r"\.(NAME|\d+)\b", "", key) not in known] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_commands_that_are_shown_are_accepted(path: Path) -> None:
    """All arguments of commands in code blocks; of inline code, which may leave some
    out, the options.
    """
    commands = typer.main.get_command(app)
    assert isinstance(commands, typer.core.TyperGroup)
    lines = [line for block in fenced(path, "") for line in block.splitlines()]
    for text in (*lines, *spans(path)):
        shown = re.fullmatch(
            r"(?:\$ )?(?:srun (?:--\S+ )*)?rollweave ([a-z].*?)(?: &| && wait)?", text
        )
        if shown is None:
            continue
        name, *arguments = shlex.split(shown[1], comments=True)
        command = commands.commands[name]
        if text in lines:
            command.make_context(name, [part for part in arguments if part != "…"])
        else:
            options = {option for parameter in command.params for option in parameter.opts}
            assert {part for part in arguments if part.startswith("--")} <= options, text
