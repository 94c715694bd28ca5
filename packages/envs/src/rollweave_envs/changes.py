"""The changes of an agent in a folder of its sandbox: listed inside, validated here,
rendered as a patch.

Invariants: the listing is not trusted: paths stay below the folder, files are text, and
the total size is bounded.
"""

import base64
import difflib
import json
import posixpath
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from rollweave.schema.base import Struct

Changes = dict[str, str | None]
"""New texts of files, by path; None if the file was removed."""

FILES = 100
"""Maximum number of changed files. A bug fix touches one or two."""

CHANGED_BYTES = 1 << 18
"""Maximum bytes of all changed files together."""

UNLISTED = (
    "the files of the project could not be listed: they are too large, or the listing was "
    "tampered with"
)

STEPS = 100_000_000
"""Maximum steps of a comparison, about a second; beyond it a patch has one hunk."""

CONTEXT = 3
"""Number of lines around a hunk."""

PATH_CHARS = 200
"""Maximum length of a changed file's path."""

LISTING = """
import base64, json, os, stat, sys
root, most, files = sys.argv[1], int(sys.argv[2]), {}
for folder, names, here in os.walk(root):
    names[:] = [name for name in names if not name.startswith(".") and name != "__pycache__"]
    for name in here:
        path = os.path.join(folder, name)
        if name.endswith(".pyc") or not stat.S_ISREG(os.lstat(path).st_mode):
            continue
        with open(path, "rb") as file:
            name = os.fsencode(os.path.relpath(path, root)).decode(errors="replace")
            files[name] = file.read(most + 1)
json.dump({path: base64.b64encode(data).decode() for path, data in files.items()}, sys.stdout)
"""
"""A program that prints the files of a folder, `LISTING ROOT MOST`, without hidden
folders and irregular files.
"""

_WALK = """
import base64, hashlib, json, os, stat, sys, zlib
SKIPPED = {".git", "__pycache__", ".hypothesis", ".mypy_cache", ".nox", ".pytest_cache",
           ".ruff_cache", ".tox", ".venv", "node_modules"}
def walk(root):
    for folder, names, here in os.walk(root):
        names[:] = [name for name in names if name not in SKIPPED]
        for name in here:
            path = os.path.join(folder, name)
            if not name.endswith(".pyc") and stat.S_ISREG(os.lstat(path).st_mode):
                yield os.fsencode(os.path.relpath(path, root)).decode(errors="replace"), path
def digest(path):
    with open(path, "rb") as file:
        found = hashlib.blake2b(digest_size=12)
        while chunk := file.read(1 << 20):
            found.update(chunk)
    return base64.b64encode(found.digest()).decode()
"""

SURVEY = f"""{_WALK}
files = {{name: digest(path) for name, path in walk(sys.argv[1])}}
sys.stdout.buffer.write(zlib.compress(json.dumps(files).encode()))
"""
"""A program that prints the digest of each file of a folder, compressed: `SURVEY ROOT`.
It skips git's folder, environments and caches.
"""

CHANGED = f"""{_WALK}
root, most = sys.argv[1], int(sys.argv[2])
before = json.loads(zlib.decompress(sys.stdin.buffer.read()))
files, executable, size = {{}}, [], 0
for name, path in walk(root):
    if before.pop(name, None) != digest(path):
        with open(path, "rb") as file:
            data = file.read(most + 1)
        if b"\\0" in data:
            continue
        size += len(data)
        if size > most:
            break
        files[name] = base64.b64encode(data).decode()
        if os.access(path, os.X_OK):
            executable.append(name)
else:
    files.update(dict.fromkeys(before))
    json.dump({{"files": files, "executable": executable}}, sys.stdout)
"""
"""A program that prints the files of a folder that differ from a survey on standard
input, `CHANGED ROOT MOST`, without binary files; nothing if they have more than MOST
bytes together.
"""


class Changed(Struct, frozen=True, kw_only=True):
    """The output of CHANGED: new contents in base 64, None for a removed file."""

    files: dict[str, str | None]
    executable: tuple[str, ...]


def changes(
    listing: bytes, before: Mapping[str, str], *, keep: Callable[[str], bool]
) -> tuple[Changes, str]:
    """Return the differences from `before`, at paths that `keep` accepts, and why all
    of them were refused ("" if they were not).

    Files that are not text are left out.
    """
    try:
        listed = msgspec.json.decode(listing, type=dict[str, str])
    except msgspec.MsgspecError:
        return {}, UNLISTED
    removed: Changes = {path: None for path in before if path not in listed and keep(path)}
    texts = {path: text for path, text in _texts(listed, keep).items() if text != before.get(path)}
    return _bounded(removed | texts)


def surveyed_changes(
    listing: bytes, survey: bytes, *, keep: Callable[[str], bool]
) -> tuple[Changes, frozenset[str], str]:
    """Return the changes in the output of CHANGED, at paths that `keep` accepts, which
    of the files are executable, and why all were refused ("" if they were not).
    """
    try:
        listed = msgspec.json.decode(listing, type=Changed)
    except msgspec.MsgspecError:
        return {}, frozenset(), UNLISTED
    before = json.loads(zlib.decompress(survey))
    removed: Changes = {
        path: None
        for path, coded in listed.files.items()
        if coded is None and path in before and keep(path)
    }
    coded = {path: coded for path, coded in listed.files.items() if coded is not None}
    changed, refused = _bounded(removed | _texts(coded, keep))
    return changed, frozenset(listed.executable), refused


def _texts(coded: Mapping[str, str], keep: Callable[[str], bool]) -> Changes:
    """Return the files that are text."""
    texts: Changes = {}
    for path, data in coded.items():
        if not is_below(path) or not keep(path):
            continue
        try:
            text = base64.b64decode(data).decode()
        except ValueError:
            continue
        if "\0" not in text:
            texts[path] = text
    return texts


def _bounded(changed: Changes) -> tuple[Changes, str]:
    size = sum(len(text.encode()) for text in changed.values() if text is not None)
    if size > CHANGED_BYTES or len(changed) > FILES:
        return (
            {},
            f"at most {FILES} files of {CHANGED_BYTES} bytes together may be changed, got "
            f"{len(changed)} of {size}",
        )
    return changed, ""


def patch(before: Mapping[str, str], changed: Changes) -> str:
    """Return the changes in the format of `git apply` and `patch -p1`."""
    parts: list[str] = []
    for path, text in sorted(changed.items()):
        old, new = before.get(path), text
        source = "/dev/null" if old is None else f"a/{path}"
        target = "/dev/null" if new is None else f"b/{path}"
        lines, others = _lines(old or ""), _lines(new or "")
        if _steps(lines, others) <= STEPS:
            found = difflib.unified_diff(lines, others, source, target)
        else:
            found = _one_hunk(lines, others, source, target)
        parts += [
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in found
        ]
    return "".join(parts)


def _common(lines: Sequence[str], others: Sequence[str]) -> int:
    """Return the number of equal lines at the beginning of both."""
    pairs = enumerate(zip(lines, others, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(lines), len(others)))


def _changed_part(lines: Sequence[str], others: Sequence[str]) -> tuple[int, int, int]:
    """Return where the differences begin in both, and where they end in each."""
    start = _common(lines, others)
    end = _common(lines[start:][::-1], others[start:][::-1])
    return start, len(lines) - end, len(others) - end


def _steps(lines: Sequence[str], others: Sequence[str]) -> int:
    """Return about how many steps difflib may take in the part that differs: for each
    line that it can match, all pairs of equal lines.
    """
    start, end, other_end = _changed_part(lines, others)
    counts = Counter(others[start:other_end])
    matched = [counts[line] for line in lines[start:end] if line in counts]
    return sum(matched) * len(matched)


def _one_hunk(
    lines: Sequence[str], others: Sequence[str], source: str, target: str
) -> Iterator[str]:
    """Yield a patch that replaces all lines from the first to the last difference."""
    start, end, other_end = _changed_part(lines, others)
    first, after = max(0, start - CONTEXT), lines[end : end + CONTEXT]
    yield f"--- {source}\n"
    yield f"+++ {target}\n"
    sizes = [to - first + len(after) for to in (end, other_end)]
    ranges = [f"{first + 1 if size else first},{size}" for size in sizes]
    yield f"@@ -{ranges[0]} +{ranges[1]} @@\n"
    yield from (f" {line}" for line in lines[first:start])
    yield from (f"-{line}" for line in lines[start:end])
    yield from (f"+{line}" for line in others[start:other_end])
    yield from (f" {line}" for line in after)


def _lines(text: str) -> list[str]:
    """Return the lines with their ends. A line ends with a line feed only, as in
    git.
    """
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + lines[-1:] * bool(lines[-1])


def is_below(path: str) -> bool:
    """Return whether a relative path is plain and stays below its folder."""
    plain = (
        bool(path)
        and posixpath.normpath(path) == path
        and not path.startswith(("/", ".."))
        and path.isprintable()
    )
    return plain and len(path) <= PATH_CHARS
