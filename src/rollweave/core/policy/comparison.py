"""Decide which members of a group a pairwise judge compares, what its verdicts are
worth, and how long it may take.
"""

from collections.abc import Iterable

from rollweave.schema.rollouts import SERVICE_CALLS

OPPONENTS = 6
"""Maximum number of members with which one member is compared; even. Up to 7 members
are all compared with each other; in larger groups each member is compared with exactly
6 others, so that the requests to the judge grow with the number of members, not with
its square.
"""

COUNTED = 0.5
"""Minimum share of a member's comparisons that must not have failed for it to have a
reward.
"""


def pairs(count: int) -> tuple[tuple[int, int], ...]:
    """Return the pairs of `count` members to compare: all pairs, or each member with
    the `OPPONENTS // 2` members that follow it on a ring.
    """
    if count <= OPPONENTS + 1:
        return tuple(
            (first, second) for first in range(count) for second in range(first + 1, count)
        )
    return tuple(
        (member, (member + step) % count)
        for member in range(count)
        for step in range(1, OPPONENTS // 2 + 1)
    )


def longest_s(comparisons: int, timeout_s: float) -> float:
    """Return the maximum seconds that a judge takes for `comparisons` comparisons. A
    comparison is asked twice, and a request takes at most `timeout_s`.
    """
    return timeout_s * -(-2 * comparisons // SERVICE_CALLS)


def points(first: float, second: float) -> float:
    """Return a member's points, 0 to 1, of a comparison that was asked in both orders:
    `first` are the points that it won when it was shown first, `second` the points when
    it was shown second. A judge that always prefers one place gives 0.5.
    """
    return (first + second) / 2


def share_of_wins(comparisons: Iterable[float | None]) -> float | None:
    """Return a member's mean points; None if more than half of its comparisons failed.
    A comparison that failed counts for neither of its members.
    """
    asked = list(comparisons)
    known = [won for won in asked if won is not None]
    if not known or len(known) < COUNTED * len(asked):
        return None
    return sum(known) / len(known)
