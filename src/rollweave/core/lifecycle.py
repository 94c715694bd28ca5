"""Settle what follows from the end of an attempt: another attempt, or a loss or gain
for the trajectory's owner.

A sub-machine changes its own records, emits commands and posts facts; it never calls
one that stands above it. Here the facts are acted on, in the order in which they were
posted, until none is left. What acting on one entails, such as the cancellation of a
complete group's surplus members, posts further facts and waits for its turn, so that
nothing here is re-entered.
"""

from collections.abc import Mapping
from typing import Protocol

from rollweave.core import evaluation, groups, serving, trajectories
from rollweave.core.policy.retry import try_again
from rollweave.core.run import AttemptOver, Run
from rollweave.core.state import Group, Trajectory
from rollweave.schema.work import Purpose, StopReason


class Owner(Protocol):
    """The sub-machine for whose purpose a group is rolled out."""

    def wants_members(self, run: Run, group: Group) -> bool:
        """True while another attempt at a member could still be of use."""

    def member_scored(self, run: Run, group: Group, trajectory: Trajectory) -> None:
        """A member has its reward."""

    def member_ended(
        self, run: Run, group: Group, trajectory: Trajectory, reason: StopReason
    ) -> None:
        """A member has ended for good, without a reward."""


OWNERS: Mapping[Purpose, Owner] = {
    Purpose.TRAIN: groups,
    Purpose.EVAL: evaluation,
    Purpose.SERVE: serving,
}
"""The owner of groups of each purpose."""


def settle(run: Run) -> None:
    """Run the consequences of attempts that are over until there are none left."""
    while run.over:
        _settle(run, run.over.popleft())


def _settle(run: Run, fact: AttemptOver) -> None:
    trajectory = run.state.trajectories[fact.trajectory_id]
    group = run.state.groups[trajectory.group_id]
    owner = OWNERS[group.purpose]
    if fact.scored:
        owner.member_scored(run, group, trajectory)
        return
    again = try_again(
        fact.reason,
        attempt=trajectory.attempt,
        retries=run.config.rollout.retries,
        worlds=trajectory.past.worlds_lost,
        repeated=fact.repeated,
    )
    if again and owner.wants_members(run, group):
        trajectories.retry(run, trajectory, fact.reason)
    else:
        trajectories.finish(run, trajectory)
        owner.member_ended(run, group, trajectory, fact.reason)
