"""The rows of a data set as files of JSON Lines, which are written once, into a cache.

Invariants: the name of a folder of the cache determines the contents of its files; it
gets this name only when they are complete, so that a process which is killed leaves
nothing that another one would read, and processes that write the same records at once
do not disturb each other.
"""

import datetime
import decimal
import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollweave.io import hub
from rollweave.io.locked_folders import remove_leftovers, unfinished_folder
from rollweave.schema.base import Struct
from rollweave.schema.errors import ConfigError
from rollweave_envs.dataset_source import (
    Place,
    Rows,
    explained,
    fingerprint,
    looks_like_files,
    names_in,
    nearest,
    pinned,
    place_of,
    unknown_column,
    value_at,
)

if TYPE_CHECKING:
    import datasets

FORMAT = 1
"""Number that changes when the same rows become other records."""

PROMPTS = ("prompt", "question", "problem")
"""Columns of which the first that exists holds the prompt, if options.prompt is left
out.
"""

ANSWERS = ("reward_model.ground_truth", "answer")
"""Columns of which the first that exists holds the answer, if options.answer is left
out.
"""

HELD_OUT = ("test", "validation")
"""Splits of which the first that has rows is held out, if options.held_out is left
out.
"""

TRAIN, REST = "train.jsonl", "held_out.jsonl"


class Selection(Struct, frozen=True, kw_only=True):
    """The options that determine the records of a data set."""

    path: str
    subset: str = ""
    split: str = "train"
    held_out: str = ""
    prompt: str = ""
    answer: str = ""
    columns: dict[str, str] = {}  # noqa: RUF012 (msgspec copies it)
    filter: dict[str, Any] = {}  # noqa: RUF012


def folder_of_records() -> Path:
    """Return the folder of all records of this user."""
    return hub.cache_home() / "rollweave" / "datasets"


class Records(Struct, frozen=True, kw_only=True):
    """The files of a data set's records."""

    train: str
    held_out: str
    """The file of the records that are held out; "" if there are none."""
    pins: dict[str, str]
    """The options `path` and `held_out` with the commits that were read, as far as they
    name data sets of the hub.
    """


def written(selection: Selection) -> Records:
    """Return the files of the records, which are written if they do not exist. Raises
    ConfigError.
    """
    place = pinned(place_of(selection.path, "path"), "path")
    apart = None
    if selection.held_out and looks_like_files(selection.held_out):
        apart = pinned(place_of(selection.held_out, "held_out"), "held_out")
    with explained(place, "path"):
        described = [
            FORMAT,
            fingerprint(place),
            fingerprint(apart) if apart is not None else selection.held_out,
            selection.subset,
            selection.split,
            [selection.prompt, selection.answer, selection.columns, selection.filter],
        ]
        text = json.dumps(described, sort_keys=True, default=str)
    folder = folder_of_records() / hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    if not folder.is_dir():
        with explained(place, "path"):
            folder.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(folder.parent)
            with unfinished_folder(folder.parent) as unfinished:
                _write(selection, place, apart, unfinished)
                _rename(unfinished, folder)
    places = {"path": place} | ({"held_out": apart} if apart is not None else {})
    return Records(
        train=str(folder / TRAIN),
        held_out=str(folder / REST) if (folder / REST).exists() else "",
        pins={name: f"{one.name}@{one.revision}" for name, one in places.items() if one.name},
    )


def _rename(unfinished: Path, folder: Path) -> None:
    """Give the folder its name, unless another process has written the same records."""
    try:
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _write(selection: Selection, place: Place, apart: Place | None, folder: Path) -> None:
    """Write the records into a new folder."""
    rows = Rows(place, selection.subset)
    _write_file(folder / TRAIN, selection, place, rows.of(selection.split, "split"))
    if apart is not None:
        others = Rows(apart, "", "held_out").of("train", "held_out")
        _write_file(folder / REST, selection, apart, others)
        return
    if selection.held_out:
        others = rows.of(selection.held_out, "held_out")
        _write_file(folder / REST, selection, place, others)
        return
    for split in HELD_OUT:
        if split not in names_in(selection.split) and rows.splits.get(split):
            _write_file(folder / REST, selection, place, rows.of(split, "held_out"))
            return


def _write_file(file: Path, selection: Selection, place: Place, rows: "datasets.Dataset") -> None:
    count = 0
    with file.open("w", encoding="utf-8") as opened:
        for record in _records(selection, place, rows):
            opened.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
            count += 1
    if not count:
        raise ConfigError(
            f"options.filter must leave rows, got {selection.filter!r:.200}: none of the "
            f"{len(rows):,} rows of {place.path} has these values"
        )


def _records(
    selection: Selection, place: Place, rows: "datasets.Dataset"
) -> Iterator[dict[str, Any]]:
    """Yield a record for each row that the filter leaves."""
    columns = list(rows.column_names)
    prompt = _column(selection.prompt, PROMPTS, "prompt", rows, place)
    answer = _column(selection.answer, ANSWERS, "answer", rows, place)
    for option, names in (("columns", selection.columns.values()), ("filter", selection.filter)):
        for name in names:
            if not _has(rows, name):
                unknown_column(option, name, columns, place.path)
    if selection.columns:
        needed = [prompt, answer, *selection.columns.values(), *selection.filter]
        roots = {name if name in columns else name.partition(".")[0] for name in needed if name}
        rows = rows.select_columns([name for name in columns if name in roots])
    for number, row in enumerate(rows):
        where = f"row {number} of {place.path}"
        if not all(
            _suits(_value(row, name, where), want) for name, want in selection.filter.items()
        ):
            continue
        kept = (
            {name: _value(row, column, where) for name, column in selection.columns.items()}
            if selection.columns
            else row
        )
        record = {name: _plain(value, name, where) for name, value in kept.items()}
        record["prompt"] = _plain(_value(row, prompt, where), prompt, where)
        if record["prompt"] is None:
            raise ConfigError(f"options.prompt must have a value in every row, got none in {where}")
        if answer:
            record["answer"] = _plain(_value(row, answer, where), answer, where)
        yield record


def _column(
    given: str, usual: tuple[str, ...], option: str, rows: "datasets.Dataset", place: Place
) -> str:
    """Return the column that the option names, or the first usual one; "" without an
    answer. Raises ConfigError.
    """
    columns = list(rows.column_names)
    if given:
        if not _has(rows, given):
            unknown_column(option, given, columns, place.path)
        return given
    found = next((name for name in usual if _has(rows, name)), "")
    if not found and option == "prompt":
        raise ConfigError(
            f"options.prompt must be a column of {place.path} ({', '.join(columns)}), got '', and "
            f"none of them is {', '.join(usual)}{nearest(usual[0], columns)}"
        )
    return found


def _has(rows: "datasets.Dataset", column: str) -> bool:
    """Return whether the rows have a column, or a field within one. What the library
    reads as JSON may have any field.
    """
    fields: Any = rows.features
    while isinstance(fields, dict):
        if column in fields:
            return True
        outer, dot, column = column.partition(".")
        if not dot or outer not in fields:
            return False
        fields = fields[outer]
    return type(fields).__name__ == "Json"


def _value(row: dict[str, Any], column: str, where: str) -> Any:
    try:
        return value_at(row, column)
    except KeyError:
        raise ConfigError(f"{where} must have the field {column!r}, which it lacks") from None


def _suits(value: Any, wanted: Any) -> bool:
    """Return whether a value is the wanted one, or one of those. Values of CSV are
    text, and are compared as such: `True` and `true` are both true.
    """
    if isinstance(wanted, list):
        return any(_suits(value, one) for one in wanted)
    if isinstance(value, str) and not isinstance(wanted, str):
        value, wanted = value.lower(), str(wanted).lower()
    return bool(value == wanted)


def _plain(value: Any, column: str, where: str) -> Any:
    """Return the value as JSON has it: times are text, and NaN is null."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            if math.isinf(value):
                raise ConfigError(f"column {column!r} must be finite, got {value} in {where}")
            return None if math.isnan(value) else value
        case dict():
            return {str(key): _plain(inner, column, where) for key, inner in value.items()}
        case list() | tuple():
            return [_plain(inner, column, where) for inner in value]
        case datetime.datetime() | datetime.date() | datetime.time():
            return value.isoformat()
        case decimal.Decimal():
            return str(value)
    raise ConfigError(
        f"options.columns must leave out column {column!r}, whose values JSON cannot hold, got "
        f"{type(value).__name__} in {where}"
    )
