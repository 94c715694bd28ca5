"""The repositories and bugs of the handler `swe`: written for it, one folder each in
`swe_repos/`.

A repository's folder has its correct files, and `bugs.toml`: exact edits that each
break something, with the issue that a user would write. Invariants: an edit matches
exactly one location; all tests of a repository pass without a bug, and with it exactly
those fail that `fails.json` lists for it (FAIL_TO_PASS; the rest is PASS_TO_PASS): a
test of Rollweave runs them all. A bug belongs to one split by its content.
"""

import functools
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path

from rollweave.envs.base import Split, split_of
from rollweave.schema.base import Struct, mix
from rollweave_envs.probes import without_tests

FOLDER = Path(__file__).parent / "swe_repos"
"""The folder of the repositories."""

TESTS = "tests/"
"""The folder of a repository's tests: what an agent writes there is ignored."""


class Edit(Struct, frozen=True, kw_only=True):
    """`old`, which is in the file at `path` exactly once, becomes `new`."""

    path: str
    old: str
    new: str


class Bug(Struct, frozen=True, kw_only=True):
    """One way to break a repository.

    `fails` are the tests that then fail, as `module.Class.method`.
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
    """Return the names of the repositories."""
    return tuple(sorted(path.parent.name for path in FOLDER.glob("*/bugs.toml")))


@functools.cache
def files_of(repo: str) -> Mapping[str, str]:
    """Return the correct files, by path."""
    folder = FOLDER / repo
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix in (".py", ".md")
    }


@functools.cache
def bugs() -> Mapping[str, Bug]:
    """Return all bugs, by id."""
    fails = json.loads((FOLDER / "fails.json").read_text())
    by_id: dict[str, Bug] = {}
    for repo in repos():
        for entry in tomllib.loads((FOLDER / repo / "bugs.toml").read_text())["bug"]:
            places = [entry, *entry.get("also", [])]
            edits = tuple(
                Edit(path=place["path"], old=place["old"], new=place["new"]) for place in places
            )
            name = f"{repo}-{mix(_content(repo, edits)) % 16**6:06x}"
            by_id[name] = Bug(
                id=name,
                repo=repo,
                kind=entry["kind"],
                issue=entry["issue"],
                edits=edits,
                fails=tuple(fails.get(name, ())),
            )
    return by_id


@functools.cache
def bugs_of(split: Split) -> tuple[Bug, ...]:
    """Return the bugs of a split, in the order of their ids."""
    return tuple(bug for _, bug in sorted(bugs().items()) if bug.split is split)


def broken(bug: Bug) -> dict[str, str]:
    """Return the repository's files with the bug.

    Raises ValueError if an edit does not match.
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


def visible_files(bug: Bug) -> dict[str, str]:
    """Return the files that the agent sees: the broken ones, and only tests that
    pass.
    """
    visible: dict[str, str] = {}
    for path, text in broken(bug).items():
        left = (
            without_tests(text, module_of(path), frozenset(bug.fails)) if _is_test(path) else text
        )
        if left or not text:
            visible[path] = left
    return visible


def suite_sources(repo: str) -> dict[str, str]:
    """Return the sources of all test files, by module."""
    return {module_of(path): text for path, text in files_of(repo).items() if _is_test(path)}


def module_of(path: str) -> str:
    """Return `test_money` for `tests/test_money.py`: names of tests have no folder."""
    return Path(path).stem


def _is_test(path: str) -> bool:
    return path.startswith(TESTS) and Path(path).name.startswith("test_")


def _content(repo: str, edits: tuple[Edit, ...]) -> str:
    return json.dumps([repo, *([edit.path, edit.old, edit.new] for edit in edits)])
