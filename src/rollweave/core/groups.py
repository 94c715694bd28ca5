"""Groups: drawn, launched, completed, buffered, dropped. A group is the unit that is
trained on together.

Invariant (`reading/status`): every training trajectory that was started is trained,
dropped for a named reason, cancelled, buffered or in flight. Only scored members of
complete groups enter the buffer; a dropped group takes all its members with it. A
member that is too old leaves its group, if enough others stay.
"""

from collections.abc import Mapping, Sequence

from rollweave.core import attempts, trajectories
from rollweave.core.policy.modes import acceptable
from rollweave.core.policy.redundancy import (
    MIN_MEMBERS,
    GroupDecision,
    decide_group,
    is_barren,
    is_spent,
    learned_spare_groups,
    next_domain,
)
from rollweave.core.run import Run
from rollweave.core.state import Group, GroupStatus, Phase, Stage, Trajectory
from rollweave.schema.base import GroupId, TrajectoryId
from rollweave.schema.commands import DrawTask, Evict
from rollweave.schema.events import DrawFailed, GroupSubmitted
from rollweave.schema.work import Purpose, StopReason

CANCELLING = frozenset({StopReason.SURPLUS, StopReason.CANCELLED})
"""Reasons counted as cancelled: the trajectory was good, but is no longer needed.

All others count as dropped.
"""

STOP_REASONS = frozenset(reason.value for reason in StopReason)

LEGAL: Mapping[GroupStatus, frozenset[GroupStatus]] = {
    GroupStatus.DRAWING: frozenset({GroupStatus.ACTIVE, GroupStatus.DROPPED}),
    GroupStatus.ACTIVE: frozenset(
        {GroupStatus.COMPARING, GroupStatus.BUFFERED, GroupStatus.DROPPED}
    ),
    GroupStatus.COMPARING: frozenset(
        {GroupStatus.COMPARING, GroupStatus.ACTIVE, GroupStatus.BUFFERED, GroupStatus.DROPPED}
    ),
    GroupStatus.BUFFERED: frozenset({GroupStatus.TAKEN, GroupStatus.DROPPED}),
    GroupStatus.TAKEN: frozenset({GroupStatus.TRAINED, GroupStatus.BUFFERED}),
    GroupStatus.TRAINED: frozenset({GroupStatus.COVERED, GroupStatus.BUFFERED}),
    GroupStatus.COVERED: frozenset(),
    GroupStatus.DROPPED: frozenset(),
}
"""Legal transitions of a group. A lost trainer returns its groups to the buffer, and a
lost controller begins comparisons anew.
"""


# Drawing and launching.


def launch(run: Run) -> None:
    """Draw as many training groups as the mode's pacing has room for."""
    drawn = run.state.drawing.drawn
    for _ in range(run.pacing.room(run) if run.admits_training() else 0):
        name = next_domain(run.task_weights, drawn)
        index = drawn.get(name, 0)
        drawn[name] = index + 1
        draw(run, name, index, Purpose.TRAIN)


def enter(run: Run, group: Group, status: GroupStatus) -> None:
    """Change the status of the group; nothing else does. Mechanisms may follow it."""
    assert status in LEGAL[group.status], f"{group.id}: {group.status} → {status}"
    group.status = status
    run.follow(status, group)


def draw(run: Run, name: str, index: int, purpose: Purpose) -> Group:
    state = run.state
    letter = "g" if purpose is Purpose.TRAIN else "e"
    group = Group(
        id=GroupId(f"{letter}{state.drawing.next_group}"),
        name=name,
        index=index,
        purpose=purpose,
        since=run.now,
    )
    state.drawing.next_group += 1
    state.groups[group.id] = group
    if purpose is Purpose.TRAIN:
        state.drawing.active[group.id] = None
    run.emit(DrawTask(group_id=group.id, name=name, index=index, purpose=purpose))
    return group


def on_submitted(run: Run, event: GroupSubmitted) -> None:
    group = run.state.groups.get(event.group_id)
    if group is None or group.status is not GroupStatus.DRAWING:
        return
    enter(run, group, GroupStatus.ACTIVE)
    group.task = event.task
    rollout = run.config.rollout
    size = (
        run.group_sizes[group.name] + rollout.spare_members if group.purpose is Purpose.TRAIN else 1
    )
    for member in range(size):
        trajectory = Trajectory(
            id=TrajectoryId(f"{group.id}.{member}"), group_id=group.id, member=member, since=run.now
        )
        group.members.append(trajectory.id)
        attempts.add(run, trajectory)


def on_draw_failed(run: Run, event: DrawFailed) -> None:
    """End the run: the task source is the user's code, and drawing is deterministic, so
    another try would fail again.
    """
    if run.state.phase is not Phase.FINISHED:
        run.state.error = run.state.error or f"drawing a task failed: {event.error}"


# Facts about members.


def wants_members(run: Run, group: Group) -> bool:
    """True while another attempt at a member could still be of use."""
    return group.status is GroupStatus.ACTIVE and run.training


def member_scored(run: Run, group: Group, trajectory: Trajectory) -> None:
    """Choose the member, and decide whether the group is complete."""
    group.chosen.append(trajectory.id)
    evaluate_group(run, group)


def member_ended(run: Run, group: Group, trajectory: Trajectory, reason: StopReason) -> None:
    """Count the member, and decide whether the group can still complete."""
    if trajectory.started:
        trajectory.started = False  # counted here, once
        _count_ended(run, reason, 1)
    if group.status is GroupStatus.ACTIVE:
        evaluate_group(run, group)
    else:
        forget_if_stopped(run, group)


def evaluate_group(run: Run, group: Group) -> None:
    """Complete, compare, filter or drop an active group as soon as its members
    allow.
    """
    decision = _decide(run, group)
    if decision is GroupDecision.COMPLETE and group.name in run.compared_domains:
        _end_surplus(run, group)
        _drop_expired_members(run, group)
        if group.status is GroupStatus.ACTIVE:
            _compare(run, group)
    elif decision is not GroupDecision.WAIT:
        _conclude(run, group, decision)


def conclude(run: Run, group: Group) -> None:
    """Decide about a group whose members are compared."""
    _conclude(run, group, _decide(run, group))


def _decide(run: Run, group: Group) -> GroupDecision:
    """Decide about a group by its members' rewards. Those of a judged domain are final
    once they are compared, and no other member scores then.
    """
    comparing = group.status is GroupStatus.COMPARING
    final = comparing or group.name not in run.compared_domains
    members = [run.state.trajectories[member] for member in group.members]
    pending = sum(member.stage not in (Stage.SCORED, Stage.ENDED) for member in members)
    return decide_group(
        [run.state.trajectories[member].reward or 0.0 for member in group.chosen],
        pending=0 if comparing else pending,
        group_size=run.group_sizes[group.name],
        min_members=MIN_MEMBERS,
        dynamic_sampling=run.config.rollout.dynamic_sampling and final,
    )


def _conclude(run: Run, group: Group, decision: GroupDecision) -> None:
    """Put a complete group into the buffer, or drop one that is filtered or
    incomplete.
    """
    scored, drawing = bool(group.chosen), run.state.drawing
    drawing.kept += decision is GroupDecision.COMPLETE
    drawing.filtered += decision is GroupDecision.FILTERED
    if decision is GroupDecision.COMPLETE:
        del run.state.drawing.active[group.id]
        enter(run, group, GroupStatus.BUFFERED)
        run.state.buffer[group.id] = None
        _end_surplus(run, group)
        _drop_expired_members(run, group)
        if group.id in run.state.buffer:
            make_room(run)
            drop_surplus(run)
    else:
        drop(run, group, "filtered" if decision is GroupDecision.FILTERED else "incomplete_group")
    _check_yield(run, decision, scored=scored)


def learn_spare_groups(run: Run) -> None:
    """Learn how many groups to launch beyond a batch from the step that is over."""
    drawing = run.state.drawing
    if drawing.kept or drawing.filtered:
        drawing.spare = learned_spare_groups(
            kept=drawing.kept,
            filtered=drawing.filtered,
            groups_per_step=run.config.rollout.groups_per_step,
        )
    drawing.kept = drawing.filtered = 0


def _end_surplus(run: Run, group: Group) -> None:
    """Cancel the members that a complete group does not need."""
    for member in [run.state.trajectories[member] for member in group.members]:
        if member.stage is not Stage.SCORED:
            trajectories.cancel(run, member, StopReason.SURPLUS)


def _drop_expired_members(run: Run, group: Group) -> None:
    """Drop what has expired, in a mode that does not abort it."""
    if not run.mode.aborts:
        _drop_stale(run, group, run.next_version(), StopReason.STALE)


# Comparing.


def _compare(run: Run, group: Group) -> None:
    """Let the group's members be compared: its mechanism concludes it."""
    group.since = run.now
    enter(run, group, GroupStatus.COMPARING)


def resume_comparison(run: Run, group: Group) -> None:
    """Compare the members again, since the controller was lost. If their domain has no
    pairwise judge any longer, the group ends with the rewards that it has.
    """
    if group.name in run.compared_domains:
        _compare(run, group)
        return
    decision = _decide(run, group)
    enter(run, group, GroupStatus.ACTIVE)  # no comparison is under way that can be cancelled
    _conclude(run, group, decision)


def _check_yield(run: Run, decision: GroupDecision, *, scored: bool) -> None:
    """End a run whose groups all fail or are all filtered: it would draw groups for
    ever. Warn before filtering ends it.
    """
    state, batch = run.state, run.config.rollout.groups_per_step
    failed = 0 if scored else state.drawing.consecutive_failed + 1
    state.drawing.consecutive_failed = failed
    if is_barren(failed, batch):
        state.error = state.error or (
            f"{failed} groups in a row failed without one scored trajectory; last failure: "
            f"{state.last_failure}"
        )
    filtered = state.drawing.consecutive_filtered + 1 if decision is GroupDecision.FILTERED else 0
    state.drawing.consecutive_filtered = filtered
    if filtered and filtered % (10 * batch) == 0:
        run.warn(
            "dynamic sampling",
            f"{filtered} groups in a row had equal rewards: the tasks are too hard or too easy "
            "for the model",
            count="all_filtered",
        )
    if is_spent(filtered, batch):
        state.error = state.error or (
            f"{filtered} groups in a row had equal rewards: dynamic sampling finds nothing to "
            "learn from"
        )


# Dropping.


def drop(run: Run, group: Group, reason: str) -> None:
    """Drop a group that is not being trained on: scored members are evicted, the others
    cancelled.

    `reason` names the drop in the account; a `StopReason` is also the members' reason
    to stop.
    """
    state = run.state
    state.drawing.active.pop(group.id, None)
    state.buffer.pop(group.id, None)
    enter(run, group, GroupStatus.DROPPED)
    stop = StopReason(reason) if reason in STOP_REASONS else StopReason.SURPLUS
    members = [state.trajectories[member] for member in group.members]
    end_members(run, members, reason, stop)
    forget_if_stopped(run, group)


def end_members(run: Run, members: Sequence[Trajectory], reason: str, stop: StopReason) -> None:
    """Evict the scored ones of these members for `reason`, and cancel the others."""
    scored = [member for member in members if member.stage is Stage.SCORED]
    if scored:
        _count_ended(run, reason, len(scored))
        run.emit(Evict(trajectory_ids=tuple(member.id for member in scored), reason=reason))
    for member in scored:
        member.started = False  # counted
        attempts.move(run, member, Stage.ENDED)
    for member in members:
        trajectories.cancel(run, member, stop)


def drop_expired(run: Run) -> None:
    """Drop the trajectories that no step from the next one on would accept (RollArt
    §6.2), and groups of which too few others are left.

    In a mode that does not abort, running members finish first: they are checked when
    their group is complete.
    """
    state, version = run.state, run.next_version()
    if state.drawing.swept_for_version == version:
        return
    state.drawing.swept_for_version = version
    for group_id in [*(state.drawing.active if run.mode.aborts else ()), *state.buffer]:
        group = state.groups.get(group_id)
        if group is not None:
            _drop_stale(run, group, version, _reason_for_age(run))


def drop_surplus(run: Run) -> None:
    """Drop running groups that no incomplete batch could still accept (RollArt §6.3):
    spare groups, and groups that younger ones have overtaken.

    A mode that does not abort lets them end.
    """
    state = run.state
    if not run.mode.aborts:
        return
    version = run.open_version()
    if version == run.next_version():
        return  # its batch is incomplete
    for group_id in [*state.drawing.active]:
        group = state.groups.get(group_id)
        if group is not None and group.status is GroupStatus.ACTIVE:
            _drop_stale(run, group, version, _reason_for_age(run))


def _reason_for_age(run: Run) -> StopReason:
    return StopReason.SURPLUS if run.mode.window == 0 else StopReason.STALE


def _drop_stale(run: Run, group: Group, version: int, reason: StopReason) -> None:
    """Drop the members that would not be accepted at `version`; with too few others,
    the group.
    """
    complete = group.status in (GroupStatus.COMPARING, GroupStatus.BUFFERED)
    names = group.chosen if complete else group.members
    members = [
        member
        for member in map(run.state.trajectories.__getitem__, names)
        if member.stage not in (Stage.CLOSING, Stage.OVER, Stage.ENDED)
    ]
    stale = [
        member
        for member in members
        if member.stage is not Stage.QUEUED  # else it is not launched yet
        and not acceptable(member.origin, version, run.mode.window)
    ]
    if not stale:
        return
    if len(members) - len(stale) < min(MIN_MEMBERS, run.group_sizes[group.name]):
        drop(run, group, reason)
        return
    end_members(run, stale, reason, reason)
    left = {member.id for member in stale}
    group.chosen = [name for name in group.chosen if name not in left]
    group.measures = None


def drop_unfinished(run: Run) -> None:
    """Drop the groups that are still being rolled out at the end of training."""
    for group_id in list(run.state.drawing.active):
        drop(run, run.state.groups[group_id], StopReason.CANCELLED)


def return_to_buffer(run: Run, group_ids: list[GroupId], *, trained: bool) -> None:
    """Put the groups of a lost step back into the buffer; `drop_expired` then decides
    whether they are still fresh.
    """
    for group_id in group_ids:
        group = run.state.groups[group_id]
        enter(run, group, GroupStatus.BUFFERED)
        run.state.buffer[group_id] = None
        if trained:
            run.state.counters.trained -= len(group.chosen)
        if group.tokens_lost:
            drop(run, group, StopReason.WORLD_LOST)
    run.state.drawing.swept_for_version = -1
    make_room(run)


def make_room(run: Run) -> None:
    """Evict the buffered groups that have no place."""
    for group_id in run.pacing.surplus(run):
        run.state.counters.evicted += 1
        drop(run, run.state.groups[group_id], "evicted")


def _count_ended(run: Run, reason: str, trajectories_ended: int) -> None:
    counters = run.state.counters
    if reason in CANCELLING:
        counters.cancelled += trajectories_ended
    else:
        counters.dropped[reason] = counters.dropped.get(reason, 0) + trajectories_ended


# Forgetting.


def mark_checkpointed(run: Run, group: Group) -> None:
    """Release the group's tokens: a checkpoint covers its step, which no restored
    trainer will lose.
    """
    enter(run, group, GroupStatus.COVERED)
    run.emit(Evict(trajectory_ids=tuple(group.chosen), reason="trained"))
    forget_if_stopped(run, group)


def forget_if_stopped(run: Run, group: Group) -> None:
    """Forget a group that is dropped, or trained and covered by a checkpoint, once its
    last member has stopped.
    """
    if group.id not in run.state.groups or group.status not in (
        GroupStatus.DROPPED,
        GroupStatus.COVERED,
    ):
        return
    if all(
        run.state.trajectories[member].stage in (Stage.ENDED, Stage.SCORED)
        for member in group.members
    ):
        forget(run, group)


def forget(run: Run, group: Group) -> None:
    for member in group.members:
        run.forget_trajectory(member)
    run.state.groups.pop(group.id, None)
