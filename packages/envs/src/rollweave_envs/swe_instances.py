"""Instances in the format of SWE-bench: their records, the repositories of their bases,
and the files of their hidden tests.

Invariants: an invalid record is refused with its file, line and field; the host's git
reads only what the user names, never what an agent wrote.
"""

import functools
import io
import json
import os
import re
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollweave.envs.jsonl import numbered_records
from rollweave.sandbox.base import MIB
from rollweave.schema.base import Struct
from rollweave.schema.errors import ConfigError
from rollweave_envs.changes import is_below

ARCHIVE_BYTES = 64 * MIB
"""Maximum compressed bytes of a base that is copied into a sandbox: a larger one should
be an image.
"""

GIT_S = 120.0
"""Time limit in seconds of one git command on the host."""

_PATHS = re.compile(
    r'^(?:diff --git a/.* b/|--- (?:a/)?|\+\+\+ (?:b/)?|(?:rename|copy) (?:from|to) )"?([^\t\n"]+)',
    re.MULTILINE,
)
"""The lines of a patch that name a file."""


class Instance(Struct, frozen=True, kw_only=True):
    """One line of the file. `where` is its file and line, for messages."""

    where: str
    id: str
    repo: str
    base_commit: str
    problem: str
    test_patch: str
    fails: tuple[str, ...]
    """FAIL_TO_PASS: tests that fail at the base and pass when it is fixed."""
    passes: tuple[str, ...]
    """PASS_TO_PASS: tests that pass before and after."""
    image: str
    """The value of the field that names the instance's image; "" without one."""

    @property
    def tests(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.fails, *self.passes)))

    @property
    def files(self) -> tuple[str, ...]:
        """Files of the tests; of names without `::`, the names."""
        return tuple(dict.fromkeys(name.partition("::")[0] for name in self.tests))


@functools.lru_cache(16)
def instances(path: str, repositories: str, image_field: str) -> tuple[Instance, ...]:
    """Return all instances of a file, in its order.

    Raises ConfigError for the first invalid one, with file, line and field: also for a
    repository without a folder in `repositories`, unless that is "".
    """
    read = tuple(
        _instance(f"{path}:{line}", record, image_field)
        for line, record in numbered_records(path, "", "instances")
    )
    for instance in read if repositories else ():
        folder_of(repositories, instance)
    return read


def folder_of(repositories: str, instance: Instance) -> Path:
    """Return the folder with the repository of an instance: the one with its
    `instance_id`, with `owner/name`, `owner__name`, or `name`. Raises ConfigError.
    """
    names = (
        instance.id,
        instance.repo,
        instance.repo.replace("/", "__"),
        instance.repo.rpartition("/")[2],
    )
    for name in names:
        folder = Path(repositories, name)
        if ".." not in Path(name).parts and folder.is_dir():
            return folder
    raise ConfigError(
        f"{instance.where}: repo must be a folder in options.repositories, {repositories}, got "
        f"{instance.repo!r}"
    )


@functools.lru_cache(4)
def base_archive(folder: Path, instance: Instance) -> bytes:
    """Return a compressed tar of the repository's files at the base: those of the
    commit if the folder is a git repository, otherwise all of the folder.

    It has no history, in which an agent could find the solution. Raises ConfigError.
    """
    git = next((path for path in (folder / ".git", folder) if _is_git(path)), None)
    if git is None:
        return _packed(folder, instance)
    with tempfile.TemporaryDirectory(prefix="rollweave-base-") as scratch:
        files = Path(scratch, "files")
        files.mkdir()
        env = {"GIT_INDEX_FILE": f"{scratch}/index"}
        of_repository = [f"--git-dir={git}", f"--work-tree={files}"]
        commit = f"{instance.base_commit}^{{commit}}"
        for command in (["read-tree", commit], ["checkout-index", "--all"]):
            failure = _git([*of_repository, *command], cwd=files, env=env)
            if failure:
                raise ConfigError(
                    f"{instance.where}: base_commit must be a commit of {folder}, got "
                    f"{instance.base_commit!r}: {failure}"
                )
        return _packed(files, instance)


def touched(instance: Instance) -> tuple[str, ...]:
    """Return the paths of the files that the test patch creates, changes or removes."""
    paths = dict.fromkeys(_PATHS.findall(instance.test_patch))
    return tuple(path for path in paths if is_below(path))


def files_of_tests(instance: Instance, before: Mapping[str, bytes]) -> dict[str, bytes | None]:
    """Return the files of the test patch as they are with it, None for a removed one.
    `before` has those that exist at the base.

    Raises ConfigError if the patch does not apply.
    """
    if not instance.test_patch.strip():
        return {}
    with tempfile.TemporaryDirectory(prefix="rollweave-tests-") as scratch:
        root = Path(scratch, "files")
        root.mkdir()
        for path, data in before.items():
            file = root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        text = instance.test_patch
        patch = Path(scratch, "patch")
        patch.write_text(text if text.endswith("\n") else f"{text}\n")
        failure = _git(["apply", "--whitespace=nowarn", str(patch)], cwd=root, env={})
        if failure:
            raise ConfigError(
                f"{instance.where}: test_patch must apply at the base, got an error of git: "
                f"{failure}"
            )
        after = {
            str(file.relative_to(root)): file.read_bytes()
            for file in root.rglob("*")
            if file.is_file() and not file.is_symlink()
        }
    return {**dict.fromkeys(before), **after}


def _instance(where: str, record: Mapping[str, Any], image_field: str) -> Instance:
    fails = _names(where, record, "FAIL_TO_PASS")
    if not fails:
        raise ConfigError(f"{where}: FAIL_TO_PASS must have at least one test, got []")
    image = _text(where, record, image_field) if image_field in record else ""
    return Instance(
        where=where,
        id=_text(where, record, "instance_id"),
        repo=_text(where, record, "repo"),
        base_commit=_text(where, record, "base_commit"),
        problem=_text(where, record, "problem_statement"),
        test_patch=_text(where, record, "test_patch", empty=True),
        fails=fails,
        passes=_names(where, record, "PASS_TO_PASS"),
        image=image,
    )


def _field(where: str, record: Mapping[str, Any], field: str) -> Any:
    if field not in record:
        raise ConfigError(f"{where}: must have {field}, got {', '.join(sorted(record)):.200}")
    return record[field]


def _text(where: str, record: Mapping[str, Any], field: str, *, empty: bool = False) -> str:
    value = _field(where, record, field)
    if not isinstance(value, str) or not (empty or value.strip()) or "\0" in value:
        raise ConfigError(f"{where}: {field} must be text, got {value!r:.100}")
    return value


def _names(where: str, record: Mapping[str, Any], field: str) -> tuple[str, ...]:
    """Return the names of tests in a list, or in the JSON text of one, as in the
    published data sets.
    """
    value = _field(where, record, field)
    names = value
    if isinstance(value, str):
        try:
            names = json.loads(value)
        except ValueError:
            names = None
    if not isinstance(names, list) or not all(_is_name(name) for name in names):
        raise ConfigError(
            f"{where}: {field} must be a list of names of tests, or the JSON text of one, got "
            f"{value!r:.100}"
        )
    return tuple(dict.fromkeys(names))


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name.strip() == name != "" and not name.startswith("-")


def _is_git(path: Path) -> bool:
    return path.is_file() or ((path / "HEAD").is_file() and (path / "objects").is_dir())


def _packed(folder: Path, instance: Instance) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as tar:
        for file in sorted(folder.rglob("*")):
            mode = file.lstat().st_mode
            name = str(file.relative_to(folder))
            if name.partition("/")[0] != ".git" and (
                stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)
            ):
                tar.add(file, name, recursive=False, filter=_anonymous)
    data = packed.getvalue()
    if len(data) > ARCHIVE_BYTES:
        raise ConfigError(
            f"{instance.where}: repo must have at most {ARCHIVE_BYTES} compressed bytes, "
            f"{instance.repo} has {len(data)}: make an image of it"
        )
    return data


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _git(arguments: list[str], *, cwd: Path, env: Mapping[str, str]) -> str:
    """Run git without the machine's settings; return "", or the last line of its error.

    Raises ConfigError if there is no git, or it does not end.
    """
    clean = {
        "PATH": os.environ.get("PATH", os.defpath),
        "LC_ALL": "C",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CEILING_DIRECTORIES": str(cwd.parent),
    }
    command = ["git", "-c", "safe.directory=*", *arguments]
    try:
        done = subprocess.run(
            command, cwd=cwd, env={**clean, **env}, capture_output=True, timeout=GIT_S, check=False
        )
    except FileNotFoundError as error:
        raise ConfigError("options.instances requires git on this host, found none") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"git {arguments[-1]} must end within {GIT_S:g} s") from error
    if not done.returncode:
        return ""
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[0] if lines else f"status {done.returncode}"
