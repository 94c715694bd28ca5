"""Decide which members of a group a pairwise judge compares, and what its verdicts are
worth.
"""

from collections.abc import Iterable

OPPONENTS = 6
"""Maximum number of members with which one member is compared; even. Up to 7 members
all meet each other; in larger groups each meets exactly 6, so that the requests to the
judge grow with the number of members, not with its square.
"""

COUNTED = 0.5
"""Minimum share of a member's comparisons that must not have failed for it to have a
reward.
"""


def pairs(count: int) -> tuple[tuple[int, int], ...]:
    """Return the pairs of `count` members that meet: all of them, or each member and
    the `OPPONENTS // 2` that follow it on a ring.
    """
    if count <= OPPONENTS + 1:
        return tuple((one, two) for one in range(count) for two in range(one + 1, count))
    return tuple(
        (one, (one + step) % count) for one in range(count) for step in range(1, OPPONENTS // 2 + 1)
    )


def points(first: float, second: float) -> float:
    """Return a member's points, 0 to 1, of a comparison that was asked in both orders:
    `first` are those that it won when it was shown first, and `second` those when it
    was shown second. A judge that always prefers one place gives 0.5.
    """
    return (first + second) / 2


def share_of_wins(meetings: Iterable[float | None]) -> float | None:
    """Return a member's mean points; None if more than half of its comparisons failed.
    A comparison that failed counts for neither of its members.
    """
    asked = list(meetings)
    known = [one for one in asked if one is not None]
    if not known or len(known) < COUNTED * len(asked):
        return None
    return sum(known) / len(known)
