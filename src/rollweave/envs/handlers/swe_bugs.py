"""The repositories and bugs of the handler `swe`: written by us, one folder each in
`assets/swe_repos/`.

A repository's folder has its right files, and `bugs.toml`: exact edits that each break
something, with the issue that a user would write. Invariants: an edit fits exactly one
place; all tests of a repository pass without a bug, and with it exactly those fail that
`fails.json` lists for it (FAIL_TO_PASS; the rest is PASS_TO_PASS): a test of ours runs
them all. A bug belongs to one split by its own content.
"""

import functools
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path

from rollweave.envs.base import Split, mix, split_of
from rollweave.envs.handlers.probes import names_in, without
from rollweave.package import DIRECTORY
from rollweave.schema.base import Struct

FOLDER = (
    next(path for path in (DIRECTORY / "assets", DIRECTORY.parents[1] / "assets") if path.is_dir())
    / "swe_repos"
)
"""The repositories: in an installed package they lie in it, in a checkout beside
`src/`.
"""

TESTS = "tests/"
"""Where a repository has its tests: what an agent writes there is not taken over."""


class Edit(Struct, frozen=True, kw_only=True):
    """`old`, which is in the file at `path` exactly once, becomes `new`."""

    path: str
    old: str
    new: str


class Bug(Struct, frozen=True, kw_only=True):
    """One way to break a repository.

    `fails`: the tests that then fail, `module.Class.method`.
    """

    id: str
    repo: str
    kind: str
    issue: str
    edits: tuple[Edit, ...]
    fails: tuple[str, ...]

    @property
    def split(self) -> Split:
        return split_of(_content(self.repo, self.edits))


@functools.cache
def repos() -> tuple[str, ...]:
    """Their names."""
    return tuple(sorted(path.parent.name for path in FOLDER.glob("*/bugs.toml")))


@functools.cache
def files_of(repo: str) -> Mapping[str, str]:
    """The right files, by path."""
    folder = FOLDER / repo
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix in (".py", ".md")
    }


@functools.cache
def bugs() -> Mapping[str, Bug]:
    """All of them, by id."""
    fails = json.loads((FOLDER / "fails.json").read_text())
    found: dict[str, Bug] = {}
    for repo in repos():
        for entry in tomllib.loads((FOLDER / repo / "bugs.toml").read_text())["bug"]:
            places = [entry, *entry.get("also", [])]
            edits = tuple(
                Edit(path=place["path"], old=place["old"], new=place["new"]) for place in places
            )
            name = f"{repo}-{mix(_content(repo, edits)) % 16**6:06x}"
            found[name] = Bug(
                id=name,
                repo=repo,
                kind=entry["kind"],
                issue=entry["issue"],
                edits=edits,
                fails=tuple(fails.get(name, ())),
            )
    return found


@functools.cache
def bugs_of(split: Split) -> tuple[Bug, ...]:
    """Those of a split, by id."""
    return tuple(bug for _, bug in sorted(bugs().items()) if bug.split is split)


def broken(bug: Bug) -> dict[str, str]:
    """The repository's files with the bug.

    Raises ValueError where an edit does not fit.
    """
    files = dict(files_of(bug.repo))
    for edit in bug.edits:
        count = files[edit.path].count(edit.old)
        if count != 1:
            raise ValueError(
                f"bug {bug.id}: old must be in {edit.path} exactly once, is there {count} times"
            )
        files[edit.path] = files[edit.path].replace(edit.old, edit.new)
    return files


def shown(bug: Bug) -> dict[str, str]:
    """What the agent is given: the broken files, and only tests that pass."""
    found: dict[str, str] = {}
    for path, text in broken(bug).items():
        left = without(text, module_of(path), frozenset(bug.fails)) if _is_test(path) else text
        if left or not text:
            found[path] = left
    return found


def sources_of_tests(repo: str) -> dict[str, str]:
    """Sources of all test files, by module."""
    return {module_of(path): text for path, text in files_of(repo).items() if _is_test(path)}


def names_of_tests(repo: str) -> list[str]:
    """`module.Class.method` of all tests."""
    return [
        name
        for module, source in sources_of_tests(repo).items()
        for name in names_in(module, source)
    ]


def module_of(path: str) -> str:
    """`tests/test_money.py` is `test_money`: names of tests have no folder."""
    return Path(path).stem


def _is_test(path: str) -> bool:
    return path.startswith(TESTS) and Path(path).name.startswith("test_")


def _content(repo: str, edits: tuple[Edit, ...]) -> str:
    return json.dumps([repo, *([edit.path, edit.old, edit.new] for edit in edits)])
