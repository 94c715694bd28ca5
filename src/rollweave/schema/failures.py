"""The text of an exception that user code has raised, and what two texts of the same
failure have in common.
"""

import re

_PLACE = re.compile(r".+:\d+\)")
_QUOTED = re.compile(r"""(?<!\w)(?:'[^'\n]*'|"[^"\n]*"|`[^`\n]*`)(?!\w)""")
_VARIABLE = re.compile(r"[\d/\\]")


def raised(method: str, kind: str, text: str, place: str) -> str:
    """Say that `method` raised an exception of class `kind` with `text`. `place` is the
    line of code that it came from, `FILE:LINE`, or "" if it is not known.
    """
    return f"{method} raised {kind}: {text}" + (f" ({place})" if place else "")


def failure_kind(text: str) -> str:
    """Return what attempts that fail in the same way have in common, although each
    names its own task, file or number.

    For what `raised` says with a place, these are the method, the exception's class and
    the place. Any other text is reduced to its last line, since a traceback ends with
    its exception, and from this line to its words: without what is quoted, and without
    words that contain a digit or a slash. If no word is left, the text is all that it
    has in common with others.
    """
    method, _, rest = text.partition(" raised ")
    kind, _, rest = rest.partition(": ")
    place = rest.rpartition(" (")[2]
    if _PLACE.fullmatch(place) and "\n" not in method + kind:
        return f"{method} raised {kind} ({place}"
    last = text.rstrip().rpartition("\n")[2]
    words = [word for word in _QUOTED.sub(" ", last).split() if not _VARIABLE.search(word)]
    return " ".join(words) or text
