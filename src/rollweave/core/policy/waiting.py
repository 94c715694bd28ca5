"""Decide which waits of a run its log names, and when: a wait that is longer than
usual, and again whenever it has doubled.
"""

from collections.abc import Iterable, Sequence

from rollweave.schema.base import Struct

FIRST_S = 10.0
"""Minimum seconds of a wait that is named; waits of a small healthy run are shorter."""

UNUSUAL = 2.0
"""Multiple of its usual seconds from which a wait is named."""

GROWTH = 2.0
"""Factor by which a wait grows until it is named again."""

SHOWN = 8
"""Maximum number of waits named at the same time: in a large fleet, many waits have one
cause.
"""


class Wait(Struct, frozen=True, kw_only=True):
    """A wait for `component`. `what` describes what the component does, or what it
    lacks.

    The wait began at `since`; None means the time when it was first listed. It usually
    takes `usual_s`, and at most `limit_s` if that is not 0.
    """

    component: str
    what: str
    since: float | None = None
    usual_s: float = 0.0
    limit_s: float = 0.0


def wait_lines(named: Sequence[tuple[Wait, float]]) -> list[tuple[str, str]]:
    """Return the component and the line of each of the first `SHOWN` waits, and one
    line for all others.
    """
    lines = [
        (wait.component, f"waiting {_duration(wait, seconds)} for {wait.component}: {wait.what}")
        for wait, seconds in named[:SHOWN]
    ]
    if rest := named[SHOWN:]:
        longest = max(seconds for _, seconds in rest)
        first, last = rest[0][0].component, rest[-1][0].component
        lines.append(
            ("others", f"waiting up to {longest:.0f} s for {len(rest)} others: {first} … {last}")
        )
    return lines


def _duration(wait: Wait, seconds: float) -> str:
    limit = f" of at most {wait.limit_s:.0f} s" if wait.limit_s else ""
    return f"{seconds:.0f} s{limit}"


class LongWaits:
    """The present waits, each with the seconds after which it is named next.

    Two waits are the same if their components and beginnings are equal.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, float | None], tuple[float, float]] = {}
        """Beginning of each wait, and the seconds after which it is named."""

    def due(self, now: float, waits: Iterable[Wait]) -> list[tuple[Wait, float]]:
        """Return the present waits that are to be named now, with their seconds."""
        present: dict[tuple[str, float | None], tuple[float, float]] = {}
        named: list[tuple[Wait, float]] = []
        for wait in waits:
            key = (wait.component, wait.since)
            began = now if wait.since is None else wait.since
            first = max(FIRST_S, UNUSUAL * wait.usual_s)
            began, due_s = self._known.get(key, (began, first))
            seconds = now - began
            if seconds >= due_s:
                named.append((wait, seconds))
                due_s = GROWTH * seconds
            present[key] = (began, due_s)
        self._known = present
        return named
