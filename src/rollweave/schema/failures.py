"""The text of an exception that user code has raised, and the part that texts of the
same failure have in common.
"""

import re

_PLACE = re.compile(r".+:\d+\)")
_QUOTED = re.compile(r"""(?<!\w)(?:'[^'\n]*'|"[^"\n]*"|`[^`\n]*`)(?!\w)""")
_VARIABLE = re.compile(r"[\d/\\]")


def raised(method: str, kind: str, text: str, place: str) -> str:
    """Say that `method` raised an exception of class `kind` with `text`. `place` is the
    line of code that raised it, `FILE:LINE`, or "" if the line is not known.
    """
    return f"{method} raised {kind}: {text}" + (f" ({place})" if place else "")


def failure_kind(text: str) -> str:
    """Return the part of the text that attempts have in common if they fail in the same
    way, although each text names its own task, file or number.

    For a text of `raised` with a place, this is the method, the exception's class and
    the place. Any other text is reduced to its last line, since a traceback ends with
    its exception, and this line to its words, without quoted parts and without words
    that contain a digit or a slash. If no word is left, the whole text is returned.
    """
    method, _, rest = text.partition(" raised ")
    kind, _, rest = rest.partition(": ")
    place = rest.rpartition(" (")[2]
    if _PLACE.fullmatch(place) and "\n" not in method + kind:
        return f"{method} raised {kind} ({place}"
    last = text.rstrip().rpartition("\n")[2]
    words = [word for word in _QUOTED.sub(" ", last).split() if not _VARIABLE.search(word)]
    return " ".join(words) or text
