"""Valid text: text that has an encoding in UTF-8, so that it can be stored and sent.

Python's strings may hold lone surrogates: from a file name that is not UTF-8, from
JSON's escapes, from a slice of UTF-16. No encoder accepts them. So text is made valid
where it enters, and all code behind that boundary can rely on it. Also: sizes,
durations and similar names, as people read them; and the text of an exception that user
code has raised, with the part that texts of the same failure have in common.
"""

import difflib
import math
import re
from collections.abc import Iterable
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")

_DECIMAL = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?", re.ASCII)

_CONTROL = re.compile("[^\t\n\x20-\x7e\xa0-\U0010ffff]|[\u2028-\u202e\u2066-\u2069]")
"""Control characters except tab and newline, and characters that begin a line or change
the direction of writing.
"""

ERROR_CHARS = 8000
"""Maximum length of a failure's description: an exception can quote a whole file, and
every record repeats it.
"""


def valid(text: str) -> str:
    """Return the text with every surrogate replaced by U+FFFD."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def visible(text: str) -> str:
    """Return the text with every character on which a terminal would act, or that
    changes the order of a line, as its escape (`\\u001b`). Newlines and tabs stay.
    """
    if text.isprintable():
        return text
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def valid_tree(value: Any) -> Any:
    """Return the dicts, lists and tuples with all text valid, keys included.

    Raises RecursionError for a very deep value.
    """
    match value:
        case str():
            return valid(value)
        case dict():
            return {valid_tree(key): valid_tree(inner) for key, inner in value.items()}
        case list():
            return [valid_tree(inner) for inner in value]
        case tuple():
            return tuple(map(valid_tree, value))
        case _:
            return value


def decimal(text: str) -> float | None:
    """Parse a number in ASCII digits (`-1.5`, `2e-3`); None for anything else.

    `float` accepts more: `1_000`, `nan`, digits of every script.
    """
    value = float(text) if _DECIMAL.fullmatch(text) else math.inf
    return value if math.isfinite(value) else None


def whole(text: str) -> int | None:
    """Parse a whole number of at most 18 ASCII digits; None for anything else.

    `int` accepts more: a sign, white space, `1_000`, digits of every script.
    """
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else None


def shortened(text: str, most: int = ERROR_CHARS) -> str:
    """Return valid text of about `most` characters: a longer text is cut to its head
    and tail.
    """
    if len(text) > most:
        half = most // 2
        text = (
            f"{text[:half]} [... {len(text) - 2 * half} characters left out ...] "
            f"{text[len(text) - half :]}"
        )
    return valid(text)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error that names the known name most like `name`; "" if no
    known name is like it.
    """
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def human_bytes(count: float) -> str:
    """Format a size, such as `3.4 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_seconds(seconds: float) -> str:
    """Format a duration, such as `35 ms`, `7.5 s`, `2 min 05 s` or `3 h 12 min`."""
    if seconds < 0.95:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


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
