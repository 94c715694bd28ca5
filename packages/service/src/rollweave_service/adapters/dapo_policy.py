"""Asynchronous DAPO (ProRL §3.4): decide which groups to start, to stop, and to train
on, for a trainer that requests batches.

DAPO trains on groups whose rewards differ; others carry no signal and are replaced.
Three decisions keep engines busy: a group that ends is replaced immediately
(replenishment); a batch is ready with its last informative group, whatever else is in
flight (early termination); groups that are then in flight or complete count for a later
batch, unless they are too old (carry-over).

Invariants: a batch has exactly `groups` groups, oldest first; a group is in at most one
batch, and at most `staleness` versions old in it; at most `under_way` groups are in
flight. The account balances after every call: `started = used + filtered + failed +
stale + cancelled + carried`.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollweave.core.policy.modes import acceptable
from rollweave.core.policy.redundancy import (
    GroupDecision,
    capacity,
    decide_group,
    is_barren,
    is_spent,
)
from rollweave.schema.base import Struct


class DapoRule(Struct, frozen=True, kw_only=True):
    """A trainer's requirements for its batches.

    `groups` informative groups make a batch. A group is `group_size` attempts at one
    task, and remains valid with `min_members`. `under_way` is the maximum number of
    groups in flight; more than `groups` compensates for groups that will be filtered.
    `staleness` is the maximum number of versions between the weights under which a
    group started and the weights that train on it. With 0 nothing is carried over: a
    full batch cancels what is in flight, and nothing starts until the next request. A
    bound below the longest rollouts excludes such rollouts from all batches.
    """

    groups: int
    group_size: int
    under_way: int
    staleness: int
    min_members: int = 2

    def __post_init__(self) -> None:
        for name, least in (
            ("groups", 1),
            ("group_size", 2),
            ("under_way", 1),
            ("staleness", 0),
            ("min_members", 2),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.min_members > self.group_size:
            raise ValueError(
                f"min_members must be at most group_size ({self.group_size}), got "
                f"{self.min_members}"
            )


@dataclass(slots=True)
class Account:
    """The number of groups by outcome.

    `carried` groups are in flight, or complete and waiting for a batch.
    """

    started: int = 0
    used: int = 0
    filtered: int = 0  # rewards all equal
    failed: int = 0  # fewer than min_members rewards
    stale: int = 0  # complete, but too old when its turn came
    cancelled: int = 0  # stopped in flight, because it could only become stale, or at the end
    carried: int = 0


@dataclass(slots=True)
class Dapo:
    """The state of the decisions.

    After any change the caller stops the groups that `overdue` returns, and starts the
    number of groups that `room` returns.
    """

    rule: DapoRule
    version: int = -1  # of the last request, which serves now; -1 before the first
    # group -> version that it started under
    under_way: dict[int, int] = field(default_factory=dict)
    # complete and informative, in the order of completion
    ready: dict[int, int] = field(default_factory=dict)
    account: Account = field(default_factory=Account)
    _next: int = 0  # version of the next batch
    _failed_in_a_row: int = 0
    _filtered_in_a_row: int = 0

    def request_batch(self, version: int) -> None:
        """Request a batch to train on from weights `version`, which sample everything
        that starts from now on.

        Raises ValueError for a version below the last version.
        """
        if version < max(self.version, 0):
            raise ValueError(
                f"version must not go back below {max(self.version, 0)}, got {version}"
            )
        self.version = self._next = version

    def take(self) -> list[int] | None:
        """Return the batch if it is full.

        The batch then belongs to the caller, and the next batch is assumed to train one
        version later.
        """
        fresh = sorted(
            (group for group, start_version in self.ready.items() if self._fresh(start_version)),
            key=self.ready.__getitem__,
        )
        if len(fresh) < self.rule.groups:
            return None
        batch = fresh[: self.rule.groups]
        for group in batch:
            del self.ready[group]
        self.account.used += len(batch)
        self._carry(-len(batch))
        self._next = self.version + 1
        return batch

    def overdue(self) -> list[int]:
        """Return the groups in flight to stop now, because no future batch could accept
        them.

        Complete groups that are too old are dropped as well.
        """
        stopped = [
            group
            for group, start_version in self.under_way.items()
            if not self._fresh(start_version)
        ]
        dropped = [
            group for group, start_version in self.ready.items() if not self._fresh(start_version)
        ]
        for group in stopped:
            del self.under_way[group]
        for group in dropped:
            del self.ready[group]
        self.account.cancelled += len(stopped)
        self.account.stale += len(dropped)
        self._carry(-len(stopped) - len(dropped))
        return stopped

    def room(self) -> int:
        """Return how many groups may start now.

        The number of groups in flight or ready never exceeds a limit. The limit counts
        the groups of all batches for which a group that starts now is fresh enough, and
        the groups beyond one batch that `under_way` allows in place of filtered groups.
        So few groups are started that would only become stale.
        """
        if self.version < 0:
            return 0
        most = capacity(
            window=self.rule.staleness,
            serving_version=self.version,
            next_version=self._next,
            open_version=self._next,
            groups_per_step=self.rule.groups,
            spare_groups=max(0, self.rule.under_way - self.rule.groups),
            last_step=sys.maxsize,
        )
        return max(0, min(self.rule.under_way, most - len(self.ready)) - len(self.under_way))

    def start_group(self) -> int:
        """Record that a group has started, and return its number."""
        group = self.account.started
        self.account.started += 1
        self.under_way[group] = self.version
        self._carry(1)
        return group

    def end_group(self, group: int, rewards: Sequence[float]) -> GroupDecision:
        """Record that a group is complete, with the rewards of the members that have a
        reward. A group that was stopped before still counts as stopped.
        """
        start_version = self.under_way.pop(group, None)
        if start_version is None:
            return GroupDecision.INCOMPLETE
        decision = decide_group(
            rewards,
            pending=0,
            group_size=self.rule.group_size,
            min_members=self.rule.min_members,
            dynamic_sampling=True,
        )
        if decision is GroupDecision.COMPLETE:
            self.ready[group] = start_version
        else:
            self.account.filtered += decision is GroupDecision.FILTERED
            self.account.failed += decision is GroupDecision.INCOMPLETE
            self._carry(-1)
        self._failed_in_a_row = 0 if rewards else self._failed_in_a_row + 1
        self._filtered_in_a_row = (
            self._filtered_in_a_row + 1 if decision is GroupDecision.FILTERED else 0
        )
        return decision

    def abandon(self) -> list[int]:
        """End: stop carrying groups. Return the groups to stop."""
        stopped = list(self.under_way)
        self.account.cancelled += len(stopped) + len(self.ready)
        self._carry(-len(stopped) - len(self.ready))
        self.under_way.clear()
        self.ready.clear()
        return stopped

    def hopeless(self) -> str:
        """Return why no batch can become full, judging by the last groups, or "" (as in
        a run's dynamic sampling).
        """
        if is_barren(self._failed_in_a_row, self.rule.groups):
            return f"{self._failed_in_a_row} groups in a row failed without one reward"
        if is_spent(self._filtered_in_a_row, self.rule.groups):
            return (
                f"{self._filtered_in_a_row} groups in a row had equal rewards: nothing is left to "
                "learn from"
            )
        return ""

    def _fresh(self, start_version: int) -> bool:
        return acceptable(start_version, self._next, self.rule.staleness)

    def _carry(self, groups: int) -> None:
        self.account.carried += groups
