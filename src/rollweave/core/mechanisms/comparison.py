"""Groups whose members pairwise judges compare (`core/policy/comparison`).

When all members of such a group have their other rewards, the chosen members are
compared once; the judge's rewards replace theirs, and decide about the group. The world
asks the judge (`rollout/rewards`).

Invariant: a group has the status COMPARING if and only if it is in `State.groups`.
"""

from collections.abc import Iterable

import msgspec

from rollweave.core import attempts, groups
from rollweave.core.policy.comparison import longest_s, pairs
from rollweave.core.run import Mechanism, Run
from rollweave.core.state import Group, GroupStatus, Stage, Trajectory
from rollweave.core.watchdog import GRACE_S
from rollweave.schema.base import GroupId
from rollweave.schema.commands import CancelComparison, CompareGroup
from rollweave.schema.config.root import RunConfig
from rollweave.schema.events import GroupCompared, WorldLost
from rollweave.schema.work import StopReason


class Comparison(msgspec.Struct):
    """The comparisons under way."""

    # maximum seconds for the comparison of each group and the comparisons before it
    groups: dict[GroupId, float] = {}
    answered: bool = False  # a pairwise judge has answered, so that its start is over


def judged(config: RunConfig) -> bool:
    """True if a task domain has a pairwise judge."""
    return any(reward.pairwise for task in config.tasks for reward in config.rewards_of(task.name))


def compare(run: Run, group: Group) -> None:
    """Have the chosen members compared: only members that are trained on are."""
    assert group.task is not None, "a group with scored members has a task"
    run.part(Comparison).groups[group.id] = _longest_comparison_s(run)
    _set_limits(run, [group])
    chosen = sorted((run.state.trajectories[name] for name in group.chosen), key=_member)
    run.emit(
        CompareGroup(
            group_id=group.id,
            task=group.task,
            rewards={member.id: member.reward or 0.0 for member in chosen},
            pairs=pairs(len(chosen)),
        )
    )


def _longest_comparison_s(run: Run) -> float:
    """Return the maximum seconds until all comparisons that have begun are done: they
    may wait for the same judge.
    """
    names = [group.name for group in _comparing(run)]
    return longest_s(
        sum(len(pairs(run.group_sizes[name])) for name in names),
        max(_longest_request_s(run.config, name) for name in names),
    )


def _longest_request_s(config: RunConfig, name: str) -> float:
    """Return the maximum seconds of a request to a judge of this task domain."""
    return max(reward.timeout_s for reward in config.rewards_of(name) if reward.pairwise)


def _comparing(run: Run) -> list[Group]:
    active = map(run.state.groups.__getitem__, run.state.drawing.active)
    return [
        group
        for group in active
        if group.status is GroupStatus.COMPARING and group.name in run.compared_domains
    ]


def _set_limits(run: Run, compared: Iterable[Group]) -> None:
    """Set the maximum seconds of comparisons. They include the start of the judge
    unless a judge has answered.
    """
    part = run.part(Comparison)
    starting_s = 0.0 if part.answered else run.config.watchdog.start_s
    for group in compared:
        group.limit_s = part.groups[group.id] + starting_s + GRACE_S


def on_compared(run: Run, event: GroupCompared) -> None:
    """Replace the members' rewards, and drop members without a reward. They are not
    compared again: the judge has been asked repeatedly, until its deadline.
    """
    group, part = run.state.groups.get(event.group_id), run.part(Comparison)
    if group is None or group.status is not GroupStatus.COMPARING:
        return
    if event.rewards and not part.answered:
        part.answered = True
        _set_limits(run, map(run.state.groups.__getitem__, part.groups))
    members = [run.state.trajectories[name] for name in group.chosen]
    failed = [member for member in members if member.id not in event.rewards]
    if failed:
        attempts.note_failure(run, StopReason.REWARD_UNAVAILABLE, event.error)
        reason = StopReason.REWARD_UNAVAILABLE
        groups.end_members(run, failed, reason, reason)
    group.chosen = [name for name in group.chosen if name in event.rewards]
    for name in group.chosen:
        run.state.trajectories[name].reward = event.rewards[name]
    groups.conclude(run, group)


def _forget_former_judges(run: Run, _event: WorldLost) -> None:
    """Forget the comparisons by judges that the configuration no longer has."""
    part = run.part(Comparison)
    part.groups = {
        name: seconds
        for name, seconds in part.groups.items()
        if run.state.groups[name].name in run.compared_domains
    }


def _buffered(run: Run, group: Group) -> None:
    run.part(Comparison).groups.pop(group.id, None)


def _dropped(run: Run, group: Group) -> None:
    if run.part(Comparison).groups.pop(group.id, None) is not None:
        run.emit(CancelComparison(group_id=group.id))


def check_timeouts(run: Run) -> None:
    """Drop the groups whose comparison takes too long."""
    comparing = _comparing(run)
    _set_limits(run, comparing)
    for group in comparing:
        waited = run.now - group.since
        if group.status is GroupStatus.COMPARING and waited > group.limit_s:
            text = f"its members have not been compared for {waited:.0f} s; it is dropped"
            run.warn(group.id, text, count=StopReason.REWARD_HANG)
            groups.drop(run, group, StopReason.REWARD_HANG)


def check(run: Run) -> None:
    """Assert that only scored members of groups with a judge are compared."""
    comparing = [
        group for group in run.state.groups.values() if group.status is GroupStatus.COMPARING
    ]
    assert {group.id for group in comparing} == run.part(Comparison).groups.keys()
    for group in comparing:
        assert group.name in run.compared_domains, group
        members = map(run.state.trajectories.__getitem__, group.chosen)
        assert all(member.stage is Stage.SCORED for member in members), group


def _member(trajectory: Trajectory) -> int:
    return trajectory.member


MECHANISM = Mechanism(
    name="comparison",
    used=judged,
    state=Comparison,
    handlers={GroupCompared: on_compared, WorldLost: _forget_former_judges},
    steps={"trainer deadlines": check_timeouts},
    follows={
        GroupStatus.COMPARING: compare,
        GroupStatus.BUFFERED: _buffered,
        GroupStatus.DROPPED: _dropped,
    },
    check=check,
)
