"""Asynchronous DAPO (ProRL §3.4): which groups to begin, to stop, and to train on, for
a trainer that asks for batches.

DAPO trains on groups whose rewards differ; the others teach nothing and are replaced.
Three decisions keep engines at work: a group that ends is replaced at once
(replenishment); a batch is ready with its last informative group, whatever else is
still under way (early termination); what is under way or over by then counts for a
later batch, unless too old (carry-over).

Invariants: a batch has exactly `groups` groups, oldest first; a group is in one batch
at most, and at most `staleness` versions old in it; at most `under_way` groups are
under way. The account balances after every call: `begun = used + filtered + failed +
stale + cancelled + carried`.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollweave.core.policy.redundancy import Verdict, capacity, group_verdict, is_barren, is_spent
from rollweave.core.policy.staleness import acceptable
from rollweave.schema.base import Struct


class DapoRule(Struct, frozen=True, kw_only=True):
    """What a trainer wants of its batches.

    `groups` informative groups make a batch. A group is `group_size` attempts at one
    task; where some fail it goes on with `min_members`. `under_way`: groups rolled out
    at once; more than `groups` makes up for those that will be filtered. `staleness`:
    versions between the weights that a group was begun under and those that are trained
    from. With 0 nothing is carried over: what a full batch leaves under way is
    cancelled, and nothing begins until the next one is asked for. A bound that is
    shorter than the longest rollouts keeps these out of all batches.
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
    """Groups by what became of them.

    `carried` are under way, or over and waiting for a batch.
    """

    begun: int = 0
    used: int = 0
    filtered: int = 0  # rewards all equal
    failed: int = 0  # fewer than min_members rewards
    stale: int = 0  # over, but too old when its turn came
    cancelled: int = 0  # stopped while under way, as it could only have become stale; or at the end
    carried: int = 0

    def balances(self) -> bool:
        return (
            self.begun
            == self.used + self.filtered + self.failed + self.stale + self.cancelled + self.carried
        )


@dataclass(slots=True)
class Dapo:
    """The state.

    Whoever executes it calls, after any change: `overdue` and stops those groups,
    `room` and begins so many.
    """

    rule: DapoRule
    version: int = -1  # last asked for: what serves now; -1 before the first
    # group -> version that it was begun under
    under_way: dict[int, int] = field(default_factory=dict)
    # over and informative, in the order in which they ended
    ready: dict[int, int] = field(default_factory=dict)
    account: Account = field(default_factory=Account)
    _next: int = 0  # version of the batch that is given next
    _failed_in_a_row: int = 0
    _filtered_in_a_row: int = 0

    def ask(self, version: int) -> None:
        """A batch to train on from weights `version` is wanted; what begins from now on
        is sampled by them.

        Raises ValueError for a version below the last one.
        """
        if version < max(self.version, 0):
            raise ValueError(
                f"version must not go back below {max(self.version, 0)}, got {version}"
            )
        self.version = self._next = version

    def take(self) -> list[int] | None:
        """The batch, if it is full.

        It then belongs to the asker, and the next one is assumed to train one version
        later.
        """
        fresh = sorted(
            (group for group, begun in self.ready.items() if self._fresh(begun)),
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
        """Groups under way to stop now, as no batch to come could take them.

        What is over and too old is dropped with them.
        """
        stopped = [group for group, begun in self.under_way.items() if not self._fresh(begun)]
        dropped = [group for group, begun in self.ready.items() if not self._fresh(begun)]
        for group in stopped:
            del self.under_way[group]
        for group in dropped:
            del self.ready[group]
        self.account.cancelled += len(stopped)
        self.account.stale += len(dropped)
        self._carry(-len(stopped) - len(dropped))
        return stopped

    def room(self) -> int:
        """Groups that may begin now.

        Under way and ready together they are no more than the batches can take for
        which a group of now is fresh enough, and those beyond one batch that
        `under_way` allows for the filtered ones: so little is begun that only becomes
        stale.
        """
        if self.version < 0:
            return 0
        most = capacity(
            window=self.rule.staleness,
            serving_version=self.version,
            next_version=self._next,
            groups_per_step=self.rule.groups,
            spare_groups=max(0, self.rule.under_way - self.rule.groups),
            last_step=sys.maxsize,
        )
        return max(0, min(self.rule.under_way, most - len(self.ready)) - len(self.under_way))

    def begun(self) -> int:
        """A group has begun: its number."""
        group = self.account.begun
        self.account.begun += 1
        self.under_way[group] = self.version
        self._carry(1)
        return group

    def ended(self, group: int, rewards: Sequence[float]) -> Verdict:
        """A group is over, with the rewards of those members that have one.

        One that was stopped before counts as stopped.
        """
        begun = self.under_way.pop(group, None)
        if begun is None:
            return Verdict.INCOMPLETE
        verdict = group_verdict(
            rewards,
            pending=0,
            group_size=self.rule.group_size,
            min_members=self.rule.min_members,
            dynamic_sampling=True,
        )
        if verdict is Verdict.COMPLETE:
            self.ready[group] = begun
        else:
            self.account.filtered += verdict is Verdict.FILTERED
            self.account.failed += verdict is Verdict.INCOMPLETE
            self._carry(-1)
        self._failed_in_a_row = 0 if rewards else self._failed_in_a_row + 1
        self._filtered_in_a_row = self._filtered_in_a_row + 1 if verdict is Verdict.FILTERED else 0
        return verdict

    def abandon(self) -> list[int]:
        """The end: nothing is carried any more. Gives the groups to stop."""
        stopped = list(self.under_way)
        self.account.cancelled += len(stopped) + len(self.ready)
        self._carry(-len(stopped) - len(self.ready))
        self.under_way.clear()
        self.ready.clear()
        return stopped

    def hopeless(self) -> str:
        """Why no batch will ever be full, going by the last groups; "" while there is
        hope (as in a run's dynamic sampling).
        """
        if is_barren(self._failed_in_a_row, self.rule.groups):
            return f"{self._failed_in_a_row} groups in a row failed without one reward"
        if is_spent(self._filtered_in_a_row, self.rule.groups):
            return (
                f"{self._filtered_in_a_row} groups in a row had equal rewards: nothing is left to "
                "learn from"
            )
        return ""

    def _fresh(self, begun: int) -> bool:
        return acceptable(begun, self._next, self.rule.staleness)

    def _carry(self, groups: int) -> None:
        self.account.carried += groups
