"""The source of the rows of a data set: a repository of the Hugging Face hub, or
files of Parquet, JSON or CSV, both through the library `datasets`.

Invariant: a problem of the user's (a name that does not exist, no network, no access, a
full disk, a split without rows) is a ConfigError of one line, which names the option,
the rule and the value.
"""

import contextlib
import csv
import difflib
import functools
import glob
import hashlib
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from rollweave.io import hub
from rollweave.io.extras import MissingExtraError
from rollweave.schema.base import Struct
from rollweave.schema.errors import ConfigError
from rollweave.schema.text import visible

if TYPE_CHECKING:
    import datasets

KINDS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}
"""Formats of files by their suffixes, as the library names its loaders."""

HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^@\s]+))?", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")

FILE = re.compile(r"hf://datasets/(?P<name>[^@]+)@(?P<commit>[^/]+)/(?P<file>.+)")
"""The form in which the library lists the files of a data set."""


class Place(Struct, frozen=True, kw_only=True):
    """A source of rows: a commit of a repository of the hub, or files."""

    path: str
    """The value of the option, for errors."""
    name: str = ""
    """Name on the hub; "" for files."""
    revision: str = ""
    files: tuple[str, ...] = ()
    kind: str = ""
    is_folder: bool = False

    @property
    def is_pinned(self) -> bool:
        """Return whether the rows can never change: a commit is fixed, and files are
        compared by their contents.
        """
        return not self.name or COMMIT.fullmatch(self.revision) is not None


def place_of(path: str, option: str) -> Place:
    """Return the source that options.`option` names. Raises ConfigError."""
    expanded = os.path.expanduser(path)
    has_pattern = glob.has_magic(expanded) and not os.path.exists(expanded)
    if os.path.isdir(expanded):
        files = [file for file in Path(expanded).rglob("*") if file.suffix in KINDS]
        return _files(path, sorted(map(str, files)), option, is_folder=True)
    if has_pattern:
        return _files(path, sorted(glob.glob(expanded, recursive=True)), option)
    if os.path.exists(expanded):
        return _files(path, [expanded], option)
    found = HUB.fullmatch(path)
    if Path(path).suffix in KINDS or path.startswith(("/", ".", "~")) or found is None:
        raise ConfigError(
            f"options.{option} must be a file, a folder or a pattern of files that exist, or "
            f"owner/name or owner/name@revision of a data set of the hub, got {path!r}"
        )
    return Place(path=path, name=found["name"], revision=found["revision"] or "main")


def looks_like_files(text: str) -> bool:
    """Return whether the text names files, and not a split."""
    return Path(text).suffix in KINDS or any(mark in text for mark in "*?/")


def pinned(place: Place, option: str) -> Place:
    """Return the source with the commit that its revision is now. In offline mode, this
    is the commit that it was when it was last asked for.

    Raises ConfigError.
    """
    if place.is_pinned:
        return place
    with explained(place, option):
        commit = _remembered(place) if hub.is_offline() else _commit(place)
    return Place(path=place.path, name=place.name, revision=commit)


def fingerprint(place: Place) -> list[list[str]]:
    """Return what determines the rows: name and commit, or the names and contents of
    the files.
    """
    if place.name:
        return [[place.name, place.revision]]
    base = os.path.expanduser(place.path) if place.is_folder else ""
    names = [os.path.relpath(file, base) if base else "" for file in place.files]
    digests = [_digest(file, os.stat(file).st_mtime_ns) for file in place.files]
    return [list(pair) for pair in zip(names, digests, strict=True)]


class Rows:
    """The splits of a source, loaded by the library."""

    def __init__(self, place: Place, subset: str, option: str = "path") -> None:
        """Load all splits of the subset; download what is not in the cache. Raises
        ConfigError.
        """
        self._place, self._option = place, option
        with explained(place, option, subset):
            self._builder = _builder(place, subset)
            if place.name:
                _download(self._builder)
            self._builder.download_and_prepare()
        splits = self._builder.info.splits or {}
        self.splits: dict[str, int] = {name: one.num_examples for name, one in splits.items()}
        """The number of rows of each split."""

    def of(self, split: str, option: str) -> "datasets.Dataset":
        """Return the rows of a split, such as "train" or "train[:1000]";
        options.`option` names it. Raises ConfigError.
        """
        for name in names_in(split):
            if name not in self.splits:
                raise ConfigError(
                    f"options.{option} must be a split of {self._place.path} "
                    f"({', '.join(self.splits)}), got {split!r}{nearest(name, self.splits)}"
                )
        rows: Any = ()
        if any(self.splits[name] for name in names_in(split)):
            with explained(self._place, option):
                rows = self._builder.as_dataset(split=split)
        if not len(rows):
            raise ConfigError(
                f"options.{option} must be a split that has rows, got {split!r} of "
                f"{self._place.path}, which has none"
            )
        return cast("datasets.Dataset", rows)


def names_in(split: str) -> list[str]:
    """Return the names of the splits in an expression such as "train[:1000]+test"."""
    return [part.partition("[")[0].strip() for part in split.split("+")]


def nearest(name: str, known: Any) -> str:
    """Return the end of an error that names the known name that is most like `name`."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.3)
    return f"; the nearest is {near[0]!r}" if near else ""


@contextlib.contextmanager
def explained(place: Place, option: str, subset: str = "") -> Iterator[None]:
    """Raise ConfigError for every error of the libraries in this context."""
    try:
        with _quiet():
            yield
    except (ConfigError, MissingExtraError):
        raise
    except Exception as error:
        text = _problem(error, place, option, subset)
        raise ConfigError(visible(" ".join(text.split()))) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the libraries, which report on several lines what is then raised."""
    loggers = [logging.getLogger(name) for name in ("datasets", "huggingface_hub", "fsspec")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _problem(error: Exception, place: Place, option: str, subset: str) -> str:
    """Say in one line what is wrong."""
    field, got = f"options.{option}", f"got {place.path!r}"
    said = hub.problem(
        error, field=field, got=place.path, kind="dataset", name=place.name, revision=place.revision
    )
    if said is not None:
        return said
    chain = list(hub.causes(error))
    kinds = {kind.__name__ for each in chain for kind in type(each).__mro__}
    if kinds & {"EmptyDatasetError", "DataFilesNotFoundError"}:
        return f"{field} must have data files ({', '.join(KINDS)}), {got}, which has none"
    if names := _subsets(chain):
        if not subset:
            return f"options.subset must be one of {', '.join(names)} for {place.path!r}, got ''"
        near = nearest(subset, names)
        rule = f"options.subset must be a subset of {place.path} ({', '.join(names)})"
        return f"{rule}, got {subset!r}{near}"
    last = chain[-1] if isinstance(error, ValueError | RuntimeError) else error
    return f"{field} must be readable, {got}: {type(last).__name__}: {str(last)[:300]}"


def _subsets(chain: list[BaseException]) -> list[str]:
    """Return the names of the subsets if the library asks for one of them."""
    for each in chain:
        text = str(each)
        found = re.search(r"(?:among the available configs|Available): (\[.*?\])", text, re.DOTALL)
        if isinstance(each, ValueError) and found is not None:
            return re.findall(r"'([^']*)'", found[1])
    return []


def _download(builder: Any) -> None:
    """Download the data files of a builder that are not in the cache.

    Passes the errors of the library and of the operating system through.
    """
    if hub.is_offline():
        return
    named = [
        found
        for files in (builder.config.data_files or {}).values()
        for file in files
        if (found := FILE.fullmatch(str(file)))
    ]
    for name in dict.fromkeys(found["name"] for found in named):
        files = [(one["commit"], one["file"]) for one in named if one["name"] == name]
        hub.download("dataset", name, files)


def _builder(place: Place, subset: str) -> Any:
    library = _library()
    if place.name:
        return library.load_dataset_builder(place.name, subset or None, revision=place.revision)
    if subset and not place.is_folder:
        raise ConfigError(
            f"options.subset must be left out for files, got {subset!r} with {place.path!r}"
        )
    text = _as_text(place.files[0]) if place.kind == "csv" else {}
    if place.is_folder:
        folder = os.path.abspath(os.path.expanduser(place.path))
        return library.load_dataset_builder(folder, subset or None, **text)
    files = {"train": [os.path.abspath(file) for file in place.files]}
    return library.load_dataset_builder(place.kind, data_files=files, **text)


def _as_text(file: str) -> dict[str, Any]:
    """Return the options with which values of CSV stay as they are written. The columns
    are those of this file.
    """
    library = _library()
    with open(file, newline="", encoding="utf-8-sig") as opened:
        columns = next(csv.reader(opened), [])
    features = library.Features({column: library.Value("string") for column in columns})
    return {"features": features, "keep_default_na": False} if columns else {}


def _library() -> Any:
    """Import the library; its progress bars are shown on a terminal only."""
    try:
        import datasets
        from huggingface_hub.utils.tqdm import disable_progress_bars as disable_hub_bars
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{error.name} is not installed (pip install 'rollweave-envs[datasets]')"
        ) from error
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
        disable_hub_bars()
    return datasets


def _commit(place: Place) -> str:
    """Ask the hub for the commit of the revision, and remember it for offline mode."""
    _library()
    from huggingface_hub import HfApi

    commit = str(HfApi().dataset_info(place.name, revision=place.revision, timeout=30.0).sha)
    file = _memory(place)
    with contextlib.suppress(OSError):  # only offline mode needs it
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f"{file.name}.{os.getpid()}")
        new.write_text(commit)
        new.replace(file)
    return commit


def _remembered(place: Place) -> str:
    try:
        return _memory(place).read_text()
    except OSError:
        raise ConfigError(
            f"options.path must name a data set that was loaded before in offline mode "
            f"(HF_HUB_OFFLINE), got {place.path!r}, which was not"
        ) from None


def _memory(place: Place) -> Path:
    name = re.sub(r"[^\w.-]", "--", f"{place.name}@{place.revision}")
    return hub.cache_home() / "rollweave" / "revisions" / name


def _files(path: str, files: list[str], option: str, *, is_folder: bool = False) -> Place:
    suffixes = sorted({Path(file).suffix for file in files})
    kinds = {KINDS.get(suffix, "") for suffix in suffixes}
    if len(kinds) != 1 or "" in kinds:
        got = ", ".join(suffix or "no suffix" for suffix in suffixes) or "none"
        raise ConfigError(
            f"options.{option} must have files of one format ({', '.join(KINDS)}), got {path!r} "
            f"with {got}"
        )
    return Place(path=path, files=tuple(files), kind=kinds.pop(), is_folder=is_folder)


@functools.lru_cache(1024)
def _digest(file: str, changed_ns: int) -> str:
    """Return a digest of a file that was last changed at `changed_ns`."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "blake2b").hexdigest()[:32]


def value_at(row: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column, or, for a dotted name, of a field within one; None
    if a value on the way is null.

    Raises KeyError for a name that the row does not have.
    """
    if column in row:
        return row[column]
    outer, dot, inner = column.partition(".")
    if not dot or outer not in row:
        raise KeyError(column)
    value = row[outer]
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise KeyError(column)
    return value_at(value, inner)


def unknown_column(option: str, column: str, columns: list[str], path: str) -> NoReturn:
    """Raise ConfigError for a column that the source does not have."""
    shown = ", ".join(columns)
    raise ConfigError(
        f"options.{option} must be a column of {path} ({shown}), got {column!r}"
        f"{nearest(column, columns)}"
    )
