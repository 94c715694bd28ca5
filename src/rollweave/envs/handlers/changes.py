"""The changes of an agent in a folder of its sandbox: listed inside, validated here,
rendered as a patch.

Invariants: the listing is not trusted: paths stay below the folder, files are text, and
the total size is bounded.
"""

import base64
import difflib
import posixpath
from collections.abc import Callable, Mapping

import msgspec

Changes = dict[str, str | None]
"""New texts of files, by path; None if the file was removed."""

FILES = 100
"""Maximum number of changed files. A bug fix touches one or two."""

CHANGED_BYTES = 1 << 18
"""Maximum bytes of all changed files together."""

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
        return (
            {},
            "the files of the project could not be listed: they are too large, or the listing was "
            "tampered with",
        )
    changed: Changes = {path: None for path in before if path not in listed and keep(path)}
    for path, coded in listed.items():
        if not _is_below(path) or not keep(path):
            continue
        try:
            text = base64.b64decode(coded).decode()
        except ValueError:
            continue
        if "\0" not in text and text != before.get(path):
            changed[path] = text
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
        lines = difflib.unified_diff(_lines(old or ""), _lines(new or ""), source, target)
        parts += [
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in lines
        ]
    return "".join(parts)


def _lines(text: str) -> list[str]:
    """Return the lines with their ends. A line ends with a line feed only, as in
    git.
    """
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + lines[-1:] * bool(lines[-1])


def _is_below(path: str) -> bool:
    plain = (
        bool(path)
        and posixpath.normpath(path) == path
        and not path.startswith(("/", ".."))
        and path.isprintable()
    )
    return plain and len(path) <= PATH_CHARS
