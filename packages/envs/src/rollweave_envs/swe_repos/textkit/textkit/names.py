"""Names for files, addresses and people."""

import re
import unicodedata


def slug(text, *, longest=40):
    """Lower-case letters, digits and single dashes, at most `longest` characters, not cut within a word if it can be."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    words = re.findall(r"[a-z0-9]+", plain)
    found = ""
    for word in words:
        more = f"{found}-{word}" if found else word
        if len(more) > longest:
            break
        found = more
    return found or (words[0][:longest] if words else "")


def unique(name, taken):
    """`name`, or the first of `name-2`, `name-3`, ... that is not taken."""
    if name not in taken:
        return name
    number = 2
    while f"{name}-{number}" in taken:
        number += 1
    return f"{name}-{number}"


def initials(name):
    """`Ada M. Lovelace` is AML; parts with a dash give a letter each: `Jean-Luc Picard` is JLP."""
    return "".join(part[0].upper() for part in re.split(r"[\s\-]+", name) if part)


def natural(names):
    """Sorted as people do: `file2` before `file10`, whatever the case."""
    return sorted(names, key=lambda name: [int(part) if part.isdigit() else part.lower() for part in re.split(r"(\d+)", name)])
