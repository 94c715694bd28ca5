"""The user's modules and files that every host of a run gets: the controller packs
them, and each agent unpacks them into a folder that is removed when it leaves the run.

Of what lies below the controller's working directory, rollout workers and a trainer
that warms up need the modules, files and folders that the tasks name; a worker of a
role needs its module or script.
`cluster.files` adds to them.
"""

import contextlib
import gzip
import hashlib
import importlib.util
import io
import os
import re
import sys
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from rollweave.envs.registry import reference_of
from rollweave.io import unpacking
from rollweave.sandbox.references import Reference, parse_reference
from rollweave.schema.config.rollout import TaskConfig
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError, FieldError, HostError
from rollweave.schema.hosts import UserModule

BYTES = 64 << 20
"""Maximum bytes of all files: enough for code and prompts, not for data sets."""

FILES = 10_000
"""Maximum number of files and folders."""

DEPTH = 32
"""Maximum number of names in a path."""

UNPACK_S = 60.0
"""Maximum seconds to unpack the files."""

REFERENCE = re.compile(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*")
"""Pattern of an option that may name one of the user's functions."""

OURS = ("rollweave", "rollweave_envs")
"""Modules of this repository's packages, which a host's operator installed."""

PATH = re.compile(r"[^/\n][^\n]{0,1000}[./][^\n]*")
"""Pattern of an option that may name a file."""


@dataclass(frozen=True, kw_only=True)
class UserFiles:
    """The modules that processes on the hosts need, and the files and folders, whose
    `paths` are relative to the working directory.
    """

    modules: tuple[UserModule, ...] = ()
    paths: tuple[str, ...] = ()


def of_run(config: RunConfig, images: Iterable[str] = ()) -> UserFiles:
    """Return the modules and files that processes on the hosts of a run need; `images`
    are those of its sandboxes.

    Only rollout workers, and a trainer that warms up, import what the tasks name, and
    only the workers of a role its class.
    """
    roles = [
        module
        for name, role in config.roles.items()
        if role.cls
        for module in _module(f"roles.{name}.cls", role.cls, role.cls)
    ]
    if not config.workers.maximum and not config.warmup.steps:
        return UserFiles(modules=tuple(roles))
    return UserFiles(
        modules=(
            *roles,
            *(
                module
                for setting, value, reference in [
                    *(
                        named
                        for number, task in enumerate(config.tasks)
                        for named in _references(f"tasks.{number}", task)
                    ),
                    *_functions(config),
                ]
                for module in _module(setting, value, reference)
            ),
        ),
        paths=(
            *(path for task in config.tasks for path in _named(task)),
            *(_of_images(images) if config.workers.maximum else ()),
            *_rubrics(config),
        ),
    )


def of_rewards(config: RunConfig) -> UserFiles:
    """Return the modules of the functions that a run deploys."""
    return UserFiles(
        modules=tuple(
            module
            for number, reward in enumerate(config.rewards)
            if reward.deployed and reward.function is not None
            for module in _module(f"rewards.{number}.function", reward.function, reward.function)
        )
    )


def of_worker(reference: str) -> UserFiles:
    """Return the module or script that a worker of a role needs."""
    path = reference.rpartition(":")[0]
    if "/" in path:
        return UserFiles(paths=(path,) if _is_below(path) else ())
    return UserFiles(modules=tuple(_module("worker", reference, reference)))


def check_image(image: str, reference: Reference) -> None:
    """Raise ConfigError for an image with files that do not reach the hosts."""
    recipe = reference.recipe
    if image.startswith("/"):
        return
    relative = [name for name in reference.names() if not name.startswith("/")]
    for path in (Path(image), *(reference.place / name for name in relative)):
        path = Path(os.path.normpath(Path.cwd() / path))
        if not path.is_relative_to(Path.cwd()):
            raise ConfigError(
                f"image {image} must have its files below the working directory with [cluster], "
                f"or be an absolute path, got {path}"
            )
    if (
        recipe is not None
        and not recipe.base.startswith("/")
        and (reference.place / recipe.base).is_dir()
    ):
        raise ConfigError(
            f"image {image}: base must be an archive, sha256:DIGEST or an absolute path with "
            f"[cluster], got the folder {recipe.base}"
        )


def variables(names: Iterable[str]) -> dict[str, str]:
    """Return the variables that `cluster.env` names. Raises FieldError for one that is
    not set.
    """
    for name in names:
        if name not in os.environ:
            raise FieldError("cluster.env", "name variables that are set", name)
    return {name: os.environ[name] for name in names}


def pack(user: UserFiles, listed: Iterable[str]) -> bytes:
    """Return an archive of the files of `user` and of those `listed` in
    `cluster.files`; b"" if there are none.

    Raises FieldError.
    """
    here = Path.cwd()
    named = [Path(os.path.normpath(here / name)) for name in user.paths]
    paths = [*_own(user.modules, here), *named, *_chosen(listed, here)]
    if not paths:
        return b""
    archive = io.BytesIO()
    size = 0
    try:
        with tarfile.open(fileobj=archive, mode="w", dereference=True) as opened:
            files = sorted({file for path in paths for file in _files(path)})
            for count, path in enumerate(files, start=1):
                size += path.stat().st_size
                if size > BYTES or count > FILES:
                    raise FieldError(
                        "cluster.files",
                        f"have at most {FILES} files and {BYTES >> 20} MiB, with the modules and "
                        "files that the tasks name",
                        f"more, among them {path}",
                    )
                opened.add(path, arcname=str(path.relative_to(here)), recursive=False)
    except OSError as error:
        raise FieldError("cluster.files", "be readable", error) from error
    return gzip.compress(archive.getvalue(), 1)


def unpack(archive: bytes, digest: bytes, folder: Path) -> None:
    """Unpack an archive of `pack` into an empty folder. Raises HostError."""
    if not archive:
        return
    if hashlib.sha256(archive).digest() != digest:
        raise HostError("the user's files must have the digest that was announced, got another")
    top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    bounds = unpacking.Bounds(bytes=2 * BYTES, members=2 * FILES, depth=DEPTH, seconds=UNPACK_S)
    try:
        unpacking.unpack(io.BytesIO(archive), top, bounds)
    except Exception as error:  # each decompressor raises other exceptions
        raise HostError(f"the user's files must be unpacked, got {error}") from error
    finally:
        os.close(top)


def check(modules: Iterable[UserModule], folder: Path) -> None:
    """Raise HostError if a module can be imported neither from `folder` nor from this
    host's packages.
    """
    for needed in modules:
        if PathFinder.find_spec(needed.module, [str(folder), *sys.path]) is None:
            raise HostError(
                f"{needed.setting} must be importable on every host, got {needed.value}: there is "
                f"no module {needed.module}"
            )


def _references(section: str, task: TaskConfig) -> Iterator[tuple[str, str, str]]:
    yield f"{section}.env", task.env, reference_of(task.env)
    for name, value in task.options.items():
        if isinstance(value, str) and REFERENCE.fullmatch(value):
            yield f"{section}.options.{name}", value, value


def _functions(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield the user's functions that compute rewards in rollout workers."""
    for number, reward in enumerate(config.rewards if config.workers.maximum else ()):
        if reward.function is not None and not reward.deployed:
            yield f"rewards.{number}.function", reward.function, reward.function


def _rubrics(config: RunConfig) -> Iterator[str]:
    """Yield the files of judges."""
    for reward in config.rewards if config.workers.maximum else ():
        if reward.judge is not None and reward.judge.has_file:
            yield from filter(_is_below, [reward.judge.rubric])


def _module(setting: str, value: str, reference: str) -> Iterator[UserModule]:
    module = re.split(r"[.:]", reference)[0]
    if module not in OURS and _found(module) is not None:
        yield UserModule(setting=setting, value=value, module=module)


def is_there(reference: str) -> bool:
    """Return whether there is a top-level module of this name in the reference."""
    return _found(re.split(r"[.:]", reference)[0]) is not None


def _found(module: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(module)
    except ValueError:  # a module that was made by hand
        return None


def _own(modules: Iterable[UserModule], here: Path) -> Iterator[Path]:
    """Return the files and folders of the modules that lie in the directory `here`."""
    for needed in modules:
        spec = _found(needed.module)
        if spec is None:
            continue
        places = list(spec.submodule_search_locations or []) or [spec.origin or ""]
        yield from (path for path in map(Path, places) if path.parent == here)


def _named(task: TaskConfig) -> Iterator[str]:
    """Return the relative paths of files and folders among a task's options.

    An option without a slash or a dot is not taken for a path.
    """
    for value in task.options.values():
        for name in value if isinstance(value, list) else [value]:
            if isinstance(name, str) and PATH.fullmatch(name) and _is_below(name):
                yield name


def _of_images(images: Iterable[str]) -> Iterator[str]:
    """Return the files below the working directory from which images are made."""
    for image in images:
        if not image.startswith("/"):
            with contextlib.suppress(Exception):  # a wrong name fails its own check
                paths = parse_reference(image, Path.cwd()).paths()
                yield from filter(_is_below, map(str, paths))


def _is_below(name: str) -> bool:
    """Return whether there is a file or folder of this name below the working
    directory.
    """
    here = Path.cwd()
    path = Path(os.path.normpath(here / name))
    return path != here and path.is_relative_to(here) and path.exists()


def _chosen(files: Iterable[str], here: Path) -> Iterator[Path]:
    for name in files:
        if not _is_below(name):
            raise FieldError("cluster.files", f"be files and folders below {here}", name)
        yield Path(os.path.normpath(here / name))


def _files(path: Path) -> Iterator[Path]:
    """Return the regular files at or below a path, except hidden and compiled ones."""
    if not path.is_dir():
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if name[0] != "." and name != "__pycache__"]
        yield from (
            file
            for name in names
            if name[0] != "."
            for file in [Path(folder, name)]
            if file.is_file()
        )
