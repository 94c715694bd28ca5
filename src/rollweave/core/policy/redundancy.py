"""Decide how many groups to launch, of which task domain, and when a group is complete
(RollArt §6.3; ProRL §3.4; AReaL's admission rule).
"""

import enum
from collections.abc import Mapping, Sequence

from rollweave.core.policy.modes import acceptable

MIN_MEMBERS = 2
"""Minimum number of scored members for training on a group that lost other members to
failures.
"""

EQUAL_REWARDS = 1e-9
"""Maximum difference of rewards that count as equal: a group with equal rewards has no
advantage to learn from (DAPO).
"""

BARREN_BATCHES = 2
"""Number of batches' worth of groups that may fail in a row, without one scored member,
before the environment counts as broken.
"""


def is_barren(groups_in_a_row: int, groups_per_step: int) -> bool:
    """Return whether so many groups have failed in a row that drawing more is
    pointless.
    """
    return groups_in_a_row >= max(4, BARREN_BATCHES * groups_per_step)


FILTERED_BATCHES = 100
"""Number of batches' worth of groups that dynamic sampling may filter in a row before
the run ends, because nothing is left to learn.
"""


def is_spent(filtered_in_a_row: int, groups_per_step: int) -> bool:
    """Return whether so many groups in a row had equal rewards that drawing more is
    pointless.
    """
    return filtered_in_a_row >= FILTERED_BATCHES * groups_per_step


MOST_SPARE_BATCHES = 5
"""Maximum number of spare groups that are learned, in batches: a step of DAPO has up to
5.7 times the trajectories of its batch (ROSE §2.2).
"""


def learned_spare_groups(*, kept: int, filtered: int, groups_per_step: int) -> int:
    """Return how many groups to launch beyond a batch so that a whole batch is kept, if
    the same share is filtered as in the step before (ROSE §6). Without spare groups, a
    group is replaced only once it is filtered, and the batch waits for the whole
    rollout of the replacement.
    """
    most = MOST_SPARE_BATCHES * groups_per_step
    return min(most, -(-groups_per_step * filtered // kept)) if kept else min(most, filtered)


def capacity(
    *,
    window: int,
    serving_version: int,
    next_version: int,
    open_version: int,
    groups_per_step: int,
    spare_groups: int,
    last_step: int,
) -> int:
    """Return how many groups may be active or buffered at the same time. `open_version`
    is the version of the first step whose batch is incomplete (`trained_at`).

    A group launched now, under `serving_version`, must still be acceptable when its
    turn comes: with `k` groups ahead of it, it is trained at version `next_version + k
    // groups_per_step`. Requiring that to be at most `serving_version + window` gives
    AReaL's rule, floor((accepted + running − 1) / B) ≤ n + η, counted from the groups
    not yet trained. Spare groups come on top, as redundancy against the slowest groups;
    no group is launched that could only be dropped.
    """
    steps_ahead = min(serving_version + window - next_version + 1, last_step - next_version)
    versions = next_version, open_version
    if steps_ahead <= 0 or not all(acceptable(serving_version, one, window) for one in versions):
        return 0
    return steps_ahead * groups_per_step + spare_groups


def trained_at(*, buffered: int, taken: int, next_version: int, groups_per_step: int) -> int:
    """Return the version that trains on a group that completes now, behind `buffered`
    other groups.

    `taken` groups of the batch of `next_version` are with the trainer already.
    """
    return next_version + (taken + buffered) // groups_per_step


def pool_room(
    *,
    free_capacity: int,
    waiting: int,
    running: int,
    group_size: int,
    active: int,
    buffered: int,
    buffer_capacity: int | None,
    next_version: int,
    groups_per_step: int,
    last_step: int,
) -> int:
    """Return how many groups to draw if each engine starts as many trajectories as it
    can (Laminar §3.2): as many groups as fill the `free_capacity`, in trajectories.

    `waiting` trajectories will take part of the free capacity. The experience buffer
    has room for `buffer_capacity` groups: `buffered` groups and groups in flight,
    counted by their trajectories. If training is slower than rollouts, more groups
    would only become stale. Since trajectories are counted, the last member of a
    long-tailed group reserves nothing for its siblings. With a `buffer_capacity` of
    None, engines do not wait for places. No group is drawn that no remaining step could
    train on.
    """
    wanted = free = -(-max(0, free_capacity - waiting) // group_size)
    if buffer_capacity is not None:
        free = buffer_capacity - buffered - -(-(waiting + running) // group_size)
    left = (last_step - next_version) * groups_per_step - active - buffered
    return max(0, min(wanted, free, left))


class GroupDecision(enum.Enum):
    WAIT = "wait"
    COMPLETE = "complete"
    FILTERED = "filtered"
    INCOMPLETE = "incomplete"


def decide_group(
    rewards: Sequence[float],
    *,
    pending: int,
    group_size: int,
    min_members: int,
    dynamic_sampling: bool,
) -> GroupDecision:
    """Decide about a group that has `rewards` so far and `pending` members that may
    still score.

    It is complete with `group_size` rewards (surplus members are cancelled), or with at
    least `min_members` rewards if no more will come. With `dynamic_sampling`, a
    complete group whose rewards are all equal is filtered out and replaced (DAPO).
    """
    if len(rewards) < group_size and pending > 0:
        return GroupDecision.WAIT
    if len(rewards) < min(min_members, group_size):
        return GroupDecision.INCOMPLETE
    if dynamic_sampling and max(rewards) - min(rewards) <= EQUAL_REWARDS:
        return GroupDecision.FILTERED
    return GroupDecision.COMPLETE


def next_domain(weights: Sequence[tuple[str, float]], drawn: Mapping[str, int]) -> str:
    """Return the domain that lags most behind its share of all groups drawn so far;
    ties go to the domain that is named first.
    """
    return min(weights, key=lambda item: (drawn.get(item[0], 0) + 1) / item[1])[0]
