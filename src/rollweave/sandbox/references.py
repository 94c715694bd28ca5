"""The names by which the settings of a run name the images of sandboxes: a digest, an
archive, a recipe, or a folder. A recipe is a TOML file with the fields of `Recipe`.
"""

import os
import tarfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from rollweave.sandbox.base import ARCHIVES, DIGEST, HOST, RECIPE
from rollweave.schema.base import Struct
from rollweave.schema.errors import ConfigError
from rollweave.schema.text import did_you_mean

Mode = Literal["scratch", "versioned", "lock"]
"""Condition for reusing an image that was built before. scratch: the same run;
versioned: the same recipe, base and version of rollweave; lock: the same lock file.
"""

SHOWN = 12
"""Number of digits of a digest that a message shows."""


class CopyStep(Struct, frozen=True, kw_only=True):
    """A file or folder of the host, and its path in the image."""

    source: str
    target: str


class Recipe(Struct, frozen=True, kw_only=True):
    """The contents of an image. Relative paths start at `relative_to` of the build."""

    name: str
    base: str
    """A folder, an archive, or `sha256:` with the digest of an image."""
    copy: tuple[CopyStep, ...] = ()
    run: tuple[str, ...] = ()
    """Commands, each of which runs in a sandbox over the image as built so far."""
    network: bool = False
    """True if the commands have the host's network."""
    lock: str | None = None
    """The lock file that mode `lock` compares."""
    rebuild: bool = False
    """True if every run builds the image anew (mode `scratch`)."""

    def __post_init__(self) -> None:
        for step in self.copy:
            if (
                not step.target.startswith("/")
                or ".." in step.target.split("/")
                or not step.target.strip("/")
            ):
                raise ValueError(
                    f"copy.target must be an absolute path without '..', got {step.target!r}"
                )


@dataclass(frozen=True, kw_only=True)
class Reference:
    """An image as it was named. Exactly one of `digest`, `folder`, `archive` and
    `recipe` is given.
    """

    text: str
    digest: str = ""
    folder: Path | None = None
    archive: Path | None = None
    recipe: Recipe | None = None
    file: Path = Path()
    """The file of the recipe. Its paths are relative to the folder of the file."""

    @property
    def label(self) -> str:
        """The name of the image in messages."""
        return f"sha256:{self.digest[:SHOWN]}…" if self.digest else self.text

    @property
    def place(self) -> Path:
        """Folder to which the recipe's paths are relative."""
        return self.file.parent

    @property
    def mode(self) -> Mode:
        """The condition for reusing the image of the recipe."""
        if self.recipe is not None and self.recipe.rebuild:
            return "scratch"
        return "lock" if self.recipe is not None and self.recipe.lock else "versioned"

    def paths(self) -> Iterator[Path]:
        """Yield the files and folders that the image is made from."""
        if self.archive is not None:
            yield self.archive
        if self.recipe is not None:
            yield self.file
            for name in self.names():
                yield Path(os.path.normpath(self.place / name))

    def names(self) -> Iterator[str]:
        """Yield the files and folders of the recipe, under the recipe's own names."""
        if self.recipe is not None:
            yield from (step.source for step in self.recipe.copy)
            if self.recipe.lock:
                yield self.recipe.lock
            if not _names_digest(self.recipe.base):
                yield self.recipe.base


def parse_reference(text: str, here: Path) -> Reference:
    """Return the image that `text` names, which must not be `HOST`. Relative paths
    start at `here`. Raises ConfigError.
    """
    if match := DIGEST.fullmatch(text):
        return Reference(text=text, digest=match[1])
    if text.startswith("sha256:"):
        raise ConfigError(f"image must have 64 hexadecimal digits after sha256:, got {text!r}")
    path = Path(os.path.normpath(here / text))
    if text.endswith(RECIPE):
        return Reference(text=text, recipe=_recipe(path), file=path)
    if text.endswith(ARCHIVES):
        return Reference(text=text, archive=path)
    if not text.startswith("/"):
        raise ConfigError(
            f"image must be {HOST}, an absolute path, sha256:DIGEST, or the path of an archive "
            f"({', '.join(ARCHIVES)}) or of a recipe ({RECIPE}), got {text!r}"
        )
    return Reference(text=text, folder=path)


def check_reference(reference: Reference) -> str:
    """Return a description of what the image is made from. Raises ConfigError if its
    source is missing or cannot be an image.
    """
    for path in reference.paths():
        if not path.exists():
            raise ConfigError(f"image {reference.text} must have all its files, {path} is missing")
    if reference.folder is not None:
        if not reference.folder.exists():
            raise ConfigError(f"image must exist, got {reference.text!r}")
        return f"{reference.text} as it is"
    if reference.archive is not None:
        _check_archive(reference.archive)
        return f"the archive {reference.text}"
    if reference.recipe is None:
        return reference.label
    base = reference.place / reference.recipe.base
    if not _names_digest(reference.recipe.base) and not base.is_dir():
        _check_archive(base)
    return f"recipe {reference.recipe.name} ({reference.text})"


def _check_archive(path: Path) -> None:
    try:
        readable = tarfile.is_tarfile(path)
    except (OSError, EOFError) as error:
        raise ConfigError(f"image must be a readable archive, got {path}: {error}") from error
    if not readable:
        raise ConfigError(f"image must be a tar archive, perhaps compressed, got {path}")


def _names_digest(base: str) -> bool:
    return DIGEST.fullmatch(base) is not None


def _recipe(path: Path) -> Recipe:
    try:
        fields = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"image must be a readable recipe, got {path}: {error}") from error
    known = Recipe.__struct_fields__
    for name in fields:
        if name not in known:
            raise ConfigError(
                f"recipe {path} must have the fields {', '.join(known)}, got "
                f"{name!r}{did_you_mean(name, known)}"
            )
    try:
        return msgspec.convert(fields, Recipe)
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"recipe {path}: {error}") from error
