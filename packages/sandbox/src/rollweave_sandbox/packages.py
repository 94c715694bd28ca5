"""The files of the Python packages that a sandbox on the host's image may import: the
distributions that its specification names, and their requirements.

Invariants: no other files of a folder of packages are included; no file of Rollweave,
whose handlers contain the right answers of their tasks; no file of an editable install,
whose folder also has tests, history and notes; no `.pth` file that adds folders.
"""

import csv
import functools
import json
import os
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rollweave.schema.errors import ConfigError

OURS = "rollweave"

FOLDERS = ("site-packages", "dist-packages")
"""Names of the folders into which an interpreter's packages are installed."""

_CACHE = "__pycache__"


@functools.cache
def installed(*names: str) -> tuple[str, ...]:
    """Return the packages among `names` that are installed here, without editable
    installs.
    """
    found = ((name, _found(Requirement(name))) for name in names)
    return tuple(
        name
        for name, distribution in found
        if distribution is not None and not _is_editable(distribution)
    )


def distributions(names: Iterable[str]) -> dict[str, metadata.Distribution]:
    """Return the distributions with these names and all their requirements, by
    canonical name.

    Raises ConfigError for a package that is not installed, is an editable install, or
    is or requires Rollweave.
    """
    found: dict[str, metadata.Distribution] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = [(Requirement(name), name) for name in names]
    while todo:
        requirement, named = todo.pop()
        name = canonicalize_name(requirement.name)
        key = name, frozenset(requirement.extras)
        if key in seen:
            continue
        seen.add(key)
        is_named = requirement.name == Requirement(named).name
        required = "" if is_named else f", which {named} requires,"
        if name == OURS:
            raise ConfigError(
                f"packages must not have {OURS}{required or ','} whose handlers contain the right "
                f"answers of their tasks, got {named!r}"
            )
        distribution = _found(requirement)
        if distribution is None:
            if is_named:
                raise ConfigError(f"packages must be installed on this host, got {named!r}")
            continue  # the package works without this requirement here, too
        if _is_editable(distribution):
            raise ConfigError(
                "packages must not be editable installs, whose folders have more than the "
                f"package: {requirement.name}{required} is one; install its wheel"
            )
        found[name] = distribution
        for line in distribution.requires or ():
            needed = Requirement(line)
            extras = ("", *requirement.extras)
            if needed.marker is None or any(
                needed.marker.evaluate({"extra": extra}) for extra in extras
            ):
                todo.append((needed, named))
    return found


def folder_of(distribution: metadata.Distribution) -> str:
    """Return the folder from which the distribution is imported."""
    return os.path.normpath(str(distribution.locate_file("")))


def files_of(distribution: metadata.Distribution) -> Iterator[str]:
    """Yield the files of the distribution that exist, with their compiled forms, as
    paths relative to its folder.
    """
    folder = folder_of(distribution)
    caches: dict[str, list[str]] = {}
    paths: dict[str, None] = {}
    for path in _listed(distribution, folder):
        parent, _, name = path.rpartition("/")
        paths[path] = None
        if name.endswith(".py") and not path.startswith(".."):
            cache = f"{parent}/{_CACHE}".lstrip("/")
            if cache not in caches:
                caches[cache] = _names(f"{folder}/{cache}")
            prefix = name.removesuffix("py")
            compiled = (found for found in caches[cache] if found.startswith(prefix))
            paths |= dict.fromkeys(f"{cache}/{found}" for found in compiled)
    for path in paths:
        if not (path.endswith(".pth") and _adds_folders(f"{folder}/{path}")):
            yield path


def stamp_of(distribution: metadata.Distribution) -> list[object]:
    """Return values that change whenever the distribution is installed again."""
    metadata_folder = str(getattr(distribution, "_path", folder_of(distribution)))
    record = f"{metadata_folder}/RECORD"
    status = os.stat(record if os.path.exists(record) else metadata_folder)
    return [metadata_folder, status.st_ino, status.st_size, status.st_mtime_ns]


def _found(requirement: Requirement) -> metadata.Distribution | None:
    try:
        return metadata.distribution(requirement.name)
    except metadata.PackageNotFoundError:
        return None


def _is_editable(distribution: metadata.Distribution) -> bool:
    """Return whether the distribution is an editable install, by PEP 610 or in the
    older way.
    """
    try:
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            return True
    except (ValueError, AttributeError):  # another tool's file says nothing
        pass
    # `setup.py develop` leaves metadata in the source folder, which a .pth file adds.
    in_packages = os.path.basename(folder_of(distribution)) in FOLDERS
    return not in_packages and not distribution.read_text("RECORD")


def _listed(distribution: metadata.Distribution, folder: str) -> Iterator[str]:
    """Yield the distribution's files, relative to its folder: the recorded files, or
    the files of its top-level modules, since a system's packages record no files.
    """
    record = distribution.read_text("RECORD")
    if record:
        for row in csv.reader(record.splitlines()):
            if row and not os.path.isabs(row[0]):
                yield os.path.normpath(row[0])
        return
    name = distribution.name.replace("-", "_")
    tops = (distribution.read_text("top_level.txt") or "").split() or (name, name.lower())
    own = os.path.basename(str(getattr(distribution, "_path", "")))
    for entry in os.listdir(folder):
        stem, _, suffix = entry.partition(".")
        if entry == own or (stem in tops and (not suffix or suffix.endswith(("py", "so")))):
            yield from _below(folder, entry)


def _below(folder: str, path: str) -> Iterator[str]:
    if not os.path.isdir(f"{folder}/{path}"):
        yield path
        return
    for name in _names(f"{folder}/{path}"):
        yield from _below(folder, f"{path}/{name}")


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _adds_folders(path: str) -> bool:
    """Return whether a `.pth` file has a line that is not an import, and so adds a
    folder.
    """
    try:
        lines = Path(path).read_text(errors="surrogateescape").splitlines()
    except OSError:
        return True
    return any(line.strip() and not line.startswith(("#", "import ", "import\t")) for line in lines)
