"""What an agent changed in a folder of its sandbox: listed inside, checked here, shown
as a patch.

Invariants: nothing that the sandbox lists is believed: paths stay below the folder,
files are text, all of it is bounded.
"""

import base64
import difflib
import posixpath
from collections.abc import Callable, Mapping

import msgspec

Changes = dict[str, str | None]
"""New texts of files, by path; None where the file was removed."""

FILES = 100
"""Files that may be changed. A bug is mended in one or two."""

CHANGED_BYTES = 1 << 18
"""Of all changed files together."""

PATH_CHARS = 200

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
"""A program that prints the files of a folder, `LISTING ROOT MOST`: hidden folders and
what is no regular file are left out.
"""


def changes(
    listing: bytes, before: Mapping[str, str], *, keep: Callable[[str], bool]
) -> tuple[Changes, str]:
    """What differs from `before`, at paths that `keep` takes; and why all of it was
    refused, "" where it was not.

    Files that are no text are left out.
    """
    try:
        listed = msgspec.json.decode(listing, type=dict[str, str])
    except msgspec.MsgspecError:
        return (
            {},
            "the files of the project could not be listed: they are too much, or the listing was "
            "tampered with",
        )
    found: Changes = {path: None for path in before if path not in listed and keep(path)}
    for path, coded in listed.items():
        if not _is_below(path) or not keep(path):
            continue
        try:
            text = base64.b64decode(coded).decode()
        except ValueError:
            continue
        if "\0" not in text and text != before.get(path):
            found[path] = text
    size = sum(len(text.encode()) for text in found.values() if text is not None)
    if size > CHANGED_BYTES or len(found) > FILES:
        return (
            {},
            f"at most {FILES} files of {CHANGED_BYTES} bytes together may be changed, got "
            f"{len(found)} of {size}",
        )
    return found, ""


def patch(before: Mapping[str, str], changed: Changes) -> str:
    """As `git apply` and `patch -p1` take it."""
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
    """With their ends. A line ends with a line feed alone, as for git."""
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
