"""Builds the site from the repository's own pages, for mkdocs: no page exists twice.

The README is the front page. Pages and files outside docs/ to which pages link become
part of the site, and links to them are changed accordingly. Three pages are generated:
the programming interface, from `__all__` of two packages; the examples, from the table
of examples/README.md and the files themselves; and the list of decisions.
"""

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

PLACES = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "docs/decisions/": "decisions/index.md",
    "examples/README.md": "examples/index.md",
}
"""Places in the site of pages of the repository; those in docs/ keep their names."""

FILES = ("examples/**/*.toml", "examples/**/*.py", "examples/**/*.yaml", "examples/*/README.md")
"""Files outside docs/ that the site has, too, under their own names."""

SUBJECTS = {
    "Training": ("train", "RunConfig", "ConfigError", "RollweaveError"),
    "Environments": (
        "Env",
        "Observation",
        "Step",
        "Episode",
        "Score",
        "Options",
        "Split",
        "Task",
        "new_task",
        "payload_of",
        "mix",
        "Message",
    ),
    "Handlers": (
        "AgentHandler",
        "Agent",
        "Job",
        "Tool",
        "converse",
        "toolbox",
        "SandboxSpec",
        "Bash",
        "IPython",
    ),
    "Rollouts as a service": (
        "Rollouts",
        "RolloutClient",
        "RolloutRequest",
        "EngineRequest",
        "MemberStatus",
        "Decoding",
    ),
    "What is recorded": ("Trajectory", "TokenSequence", "SegmentKind", "StopReason"),
    "Roles of your own": (
        "role",
        "Cluster",
        "Worker",
        "WorkerError",
        "register",
    ),
}
"""The public names by subject, in the order of the page."""

LANGUAGES = {".toml": "toml", ".py": "python", ".yaml": "yaml"}


def modules_of_names() -> dict[str, str]:
    """Return the module of each public name."""
    modules = {"train": "rollweave"}
    for package in ("src/rollweave", "packages/service/src/rollweave_service"):
        for node in ast.walk(ast.parse((ROOT / package / "__init__.py").read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rollweave"):
                modules |= {alias.name: str(node.module) for alias in node.names}
    del modules["VERSION"], modules["train_quietly"]
    return modules


def interface_page() -> str:
    """Return the page of the programming interface, in the syntax of mkdocstrings."""
    modules = modules_of_names()
    parts = [
        "# Programming interface",
        "All of these names are imported from the package itself, `from rollweave import Env, "
        "train`, and those of a service's client from `rollweave_service`. Every other name may "
        "change between versions, except those that these pages import from its modules.",
    ]
    for subject, names in SUBJECTS.items():
        parts.append(f"## {subject}")
        parts += [f"::: {modules[name]}.{name}" for name in names]
    return "\n\n".join(parts) + "\n"


def examples_page() -> str:
    """Return the page of the examples: their table, and the files that it names."""
    text = (ROOT / "examples/README.md").read_text()
    shown = [
        name
        for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
        for name in re.findall(r"`([\w./]+)`", row)
        if Path(name).suffix in LANGUAGES
    ]
    parts = [text]
    for name in shown:
        path = ROOT / "examples" / name
        parts += [
            f"## {name}",
            f"```{LANGUAGES[path.suffix]}\n{path.read_text()}```",
        ]
    return "\n\n".join(parts) + "\n"


def decisions_page() -> str:
    lines = ["# Decisions", ""]
    for path in sorted((ROOT / "docs/decisions").glob("*.md")):
        title = path.read_text().partition("\n")[0].removeprefix("# ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines) + "\n"


def place_of(path: str) -> str:
    """Return the place in the site of a file of the repository."""
    return PLACES.get(path, path.removeprefix("docs/"))


def pages() -> dict[str, str]:
    """Return the content of every page that is not in docs/, by its place."""
    read = {
        place: (ROOT / path).read_text()
        for path, place in PLACES.items()
        if path.endswith(".md") and path != "examples/README.md"
    }
    return read | {
        "api.md": interface_page(),
        "examples/index.md": examples_page(),
        "decisions/index.md": decisions_page(),
    }


def source_of(place: str) -> str:
    """Return the path in the repository of what is at a place of the site."""
    for path, own in PLACES.items():
        if own == place:
            return path
    return place if place.startswith("examples/") else f"docs/{place}"


def linked(markdown: str, place: str) -> str:
    """Change the links of a page, which are those of the repository, to those of the
    site.
    """
    folder = posixpath.dirname(source_of(place).rstrip("/"))

    def changed(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        if "://" in target or target.startswith("mailto:") or not target:
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        path += "/" * target.endswith("/")
        link = posixpath.relpath(place_of(path), posixpath.dirname(place) or ".")
        return f"]({link}{anchor})"

    return re.sub(r"\]\(([^)#\s]*)(#[^)]*)?\)", changed, markdown)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and files that are not in docs/ (called by mkdocs)."""
    from mkdocs.structure.files import File

    for place, content in pages().items():
        files.append(File.generated(config, place, content=content))
    for pattern in FILES:
        for path in sorted(ROOT.glob(pattern)):
            place = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Change the links of a page (called by mkdocs)."""
    if page.file.src_uri in ("api.md", "decisions/index.md"):
        return markdown
    return linked(markdown, page.file.src_uri)
