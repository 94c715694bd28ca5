"""Groups are completed, filtered, dropped or returned, and counted as such."""

from collections.abc import Sequence

import pytest

from rollweave.core import groups, training
from rollweave.core.policy.redundancy import BARREN_BATCHES, FILTERED_BATCHES
from rollweave.core.run import Run
from rollweave.core.state import Group, GroupStatus, Stage, TrainerStatus, Trajectory
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import GroupId, TrajectoryId
from rollweave.schema.work import Measures, Purpose, StopReason
from tests.support.kinds import of
from tests.support.states import running

SIZE, BATCH = 2, 3
"""Members of a group, and groups of a step, in `tests/support/core`."""


def rolling_out(
    *,
    dynamic: bool = False,
    mode: str = "bounded",
    spare: int = 0,
    spare_groups: int | str = 0,
    size: int = SIZE,
) -> Run:
    run = running(
        rollout={
            "dynamic_sampling": dynamic,
            "spare_members": spare,
            "spare_groups": spare_groups,
            "group_size": size,
        },
        eval={"every": 0},
        mode=mode,
    )
    run.state.groups.clear()
    run.state.drawing.active.clear()
    run.out = []
    return run


def group_of(run: Run, *members: float | Stage, name: str = "g9", initiated: int = 0) -> Group:
    """An active group with these members: scored ones are given by their reward."""
    state = run.state
    group = Group(
        id=GroupId(name),
        name="a",
        index=0,
        purpose=Purpose.TRAIN,
        since=0.0,
        status=GroupStatus.ACTIVE,
    )
    state.groups[group.id] = group
    state.drawing.active[group.id] = None
    for number, what in enumerate(members):
        scored = isinstance(what, float)
        trajectory = Trajectory(
            id=TrajectoryId(f"{name}.{number}"),
            group_id=group.id,
            member=number,
            stage=Stage.SCORED if isinstance(what, float) else what,
            reward=what if isinstance(what, float) else None,
            initiated=initiated,
            started=True,
        )
        state.trajectories[trajectory.id] = trajectory
        group.members.append(trajectory.id)
        if scored:
            group.chosen.append(trajectory.id)
        if what is Stage.RUN:
            state.pools.run[trajectory.id] = None
    return group


def stages(run: Run, group: Group) -> list[Stage]:
    return [run.state.trajectories[name].stage for name in group.members]


def evicted(run: Run) -> list[tuple[tuple[str, ...], str]]:
    return [(one.trajectory_ids, one.reason) for one in of(run.out, c.Evict)]


@pytest.mark.parametrize(
    "members",
    [(1.0, Stage.RUN), (Stage.RUN, Stage.RUN), (Stage.ENDED, Stage.RUN), (1.0, Stage.EVAL)],
)
def test_a_group_waits_for_its_members(members: Sequence[float | Stage]) -> None:
    run = rolling_out()
    group = group_of(run, *members)
    groups.evaluate_group(run, group)
    assert (group.status, list(run.state.drawing.active)) == (GroupStatus.ACTIVE, ["g9"])
    assert run.state.drawing.consecutive_failed == 0


def test_a_complete_group_is_buffered_and_its_surplus_stops() -> None:
    run = rolling_out(spare=1)
    group = group_of(run, 1.0, 0.0, Stage.RUN)
    run.state.drawing.consecutive_failed = 2
    groups.evaluate_group(run, group)
    assert group.status is GroupStatus.BUFFERED
    assert (list(run.state.buffer), list(run.state.drawing.active)) == (["g9"], [])
    assert stages(run, group) == [Stage.SCORED, Stage.SCORED, Stage.CLOSING]
    assert run.state.trajectories[group.members[2]].closing is StopReason.SURPLUS
    assert run.state.drawing.consecutive_failed == 0


@pytest.mark.parametrize(
    ("mode", "reason"),
    [("sync", StopReason.SURPLUS), ("bounded", StopReason.STALE), ("partial", None)],
)
def test_what_no_open_step_accepts_ends_with_the_last_group_of_a_batch(
    mode: str, reason: StopReason | None
) -> None:
    run = rolling_out(mode=mode)
    slow = group_of(run, 1.0, Stage.RUN, name="slow", initiated=-1 if mode != "sync" else 0)
    queued = group_of(run, Stage.QUEUED, Stage.QUEUED, name="queued")
    for number in range(BATCH):
        assert slow.status is GroupStatus.ACTIVE
        groups.evaluate_group(run, group_of(run, 1.0, 0.0, name=f"g{number}"))
    if reason is None:
        assert (slow.status, stages(run, slow)[1]) == (GroupStatus.ACTIVE, Stage.RUN)
    else:
        assert run.state.trajectories[slow.members[1]].closing is reason
        assert (slow.status, evicted(run)) == (GroupStatus.DROPPED, [(("slow.0",), reason)])
    assert queued.status is GroupStatus.ACTIVE
    assert list(run.state.buffer) == ["g0", "g1", "g2"]


@pytest.mark.parametrize("mode", ["sync", "stream", "bounded"])
def test_no_spare_group_is_launched_that_no_step_accepts(mode: str) -> None:
    run = rolling_out(mode=mode, spare_groups=2)
    assert run.mode.window is not None
    for number in range((run.mode.window + 1) * BATCH):
        assert run.pacing.room(run) > 0
        groups.evaluate_group(run, group_of(run, 1.0, 0.0, name=f"g{number}"))
    assert run.pacing.room(run) <= 0


def test_spare_groups_follow_from_what_the_last_step_filtered() -> None:
    run = rolling_out(dynamic=True, mode="sync", spare_groups="learned")
    before = run.pacing.room(run)
    assert before == BATCH
    for number in range(4):
        groups.evaluate_group(run, group_of(run, 1.0, 1.0, name=f"equal{number}"))
    for number in range(BATCH):
        groups.evaluate_group(run, group_of(run, 1.0, 0.0, name=f"g{number}"))
    run.state.buffer.clear()
    assert run.pacing.room(run) == BATCH, "nothing is learned within a step"
    groups.learn_spare_groups(run)
    assert run.pacing.room(run) == BATCH + 4, "as many as were filtered for one batch"
    groups.learn_spare_groups(run)
    assert run.pacing.room(run) == BATCH + 4, "a step without groups teaches nothing"
    groups.evaluate_group(run, group_of(run, 1.0, 0.0, name="kept"))
    groups.learn_spare_groups(run)
    run.state.buffer.clear()
    assert run.pacing.room(run) == BATCH


def test_a_group_of_too_few_is_dropped_with_its_scored_member() -> None:
    run = rolling_out()
    group = group_of(run, 1.0, Stage.ENDED)
    groups.evaluate_group(run, group)
    assert group.status is GroupStatus.DROPPED
    assert evicted(run) == [(("g9.0",), "incomplete_group")]
    assert run.state.counters.dropped == {"incomplete_group": 1}
    assert run.state.groups == {}, "its last member has stopped"


def test_equal_rewards_are_filtered_only_by_dynamic_sampling() -> None:
    for dynamic in (True, False):
        run = rolling_out(dynamic=dynamic)
        group = group_of(run, 1.0, 1.0)
        groups.evaluate_group(run, group)
        dropped = {"filtered": 2} if dynamic else {}
        assert run.state.counters.dropped == dropped
        assert run.state.drawing.consecutive_filtered == dynamic
        assert bool(run.state.buffer) is not dynamic


def test_a_run_whose_groups_all_fail_ends() -> None:
    run = rolling_out()
    run.state.last_failure = "env_error: boom"
    for number in range(BARREN_BATCHES * BATCH):
        assert run.state.error == ""
        groups.evaluate_group(run, group_of(run, Stage.ENDED, Stage.ENDED, name=f"g{number}"))
        assert run.state.drawing.consecutive_failed == number + 1
    assert run.state.error == (
        f"{BARREN_BATCHES * BATCH} groups in a row failed without one scored trajectory; "
        "last failure: env_error: boom"
    )


def test_a_run_whose_groups_are_all_filtered_is_warned_and_ends() -> None:
    run = rolling_out(dynamic=True)
    for number in range(FILTERED_BATCHES * BATCH):
        assert run.state.error == ""
        groups.evaluate_group(run, group_of(run, 1.0, 1.0, name=f"g{number}"))
        assert run.state.counters.watchdog.get("all_filtered", 0) == (number + 1) // (10 * BATCH)
    assert "dynamic sampling finds nothing to learn from" in run.state.error
    run.state.error = ""
    groups.evaluate_group(run, group_of(run, 1.0, 0.0))
    assert (run.state.error, run.state.drawing.consecutive_filtered) == ("", 0)


@pytest.mark.parametrize(
    ("reason", "cancelled", "stop"),
    [
        (StopReason.STALE, False, StopReason.STALE),
        (StopReason.CANCELLED, True, StopReason.CANCELLED),
        (StopReason.SURPLUS, True, StopReason.SURPLUS),
        ("evicted", False, StopReason.SURPLUS),
    ],
)
def test_a_dropped_group_takes_its_members_along(
    reason: str, cancelled: bool, stop: StopReason
) -> None:
    run = rolling_out()
    group = group_of(run, 1.0, 0.0, Stage.RUN)
    groups.drop(run, group, reason)
    assert stages(run, group) == [Stage.ENDED, Stage.ENDED, Stage.CLOSING]
    assert run.state.trajectories[group.members[2]].closing is stop
    assert run.state.counters.cancelled == (2 if cancelled else 0)
    assert run.state.counters.dropped == ({} if cancelled else {reason: 2})
    assert evicted(run) == [(("g9.0", "g9.1"), reason)]
    assert list(run.state.groups) == ["g9"], "a member has not stopped"


def test_a_member_is_counted_once() -> None:
    run = rolling_out()
    group = group_of(run, 1.0, Stage.RUN)
    member = run.state.trajectories[group.members[1]]
    member.stage = Stage.ENDED
    groups.member_ended(run, group, member, StopReason.ENV_ERROR)
    groups.member_ended(run, group, member, StopReason.ENV_ERROR)
    assert run.state.counters.dropped == {StopReason.ENV_ERROR: 1, "incomplete_group": 1}


def test_a_member_is_wanted_while_its_group_is_active_in_training() -> None:
    run = rolling_out()
    group = group_of(run, Stage.RUN, Stage.RUN)
    assert groups.wants_members(run, group)
    group.status = GroupStatus.BUFFERED
    assert not groups.wants_members(run, group)


@pytest.mark.parametrize("mode", ["bounded", "partial"])
def test_groups_that_no_step_accepts_expire(mode: str) -> None:
    """The window is one version; a mode that does not abort drops buffered ones."""
    run = rolling_out(mode=mode)
    window = run.mode.window
    assert window is not None
    run.state.trainer.step = window + 1
    stale, fresh = (
        group_of(run, Stage.RUN, name="g1"),
        group_of(run, Stage.RUN, name="g2", initiated=1),
    )
    kept = group_of(run, 1.0, name="g3", initiated=1)
    gone = group_of(run, 1.0, name="g4")
    for group in (kept, gone):
        del run.state.drawing.active[group.id]
        group.status = GroupStatus.BUFFERED
        run.state.buffer[group.id] = None
    groups.drop_expired(run)
    assert list(run.state.buffer) == ["g3"]
    aborts = mode == "bounded"
    assert list(run.state.drawing.active) == (["g2"] if aborts else ["g1", "g2"])
    assert (stale.status is GroupStatus.DROPPED) is aborts
    assert fresh.status is GroupStatus.ACTIVE
    assert run.state.counters.dropped == {StopReason.STALE: 1}


def aged(run: Run, group: Group, *initiated: int) -> None:
    """Let the members have begun at these versions, of which 0 is too old now."""
    run.state.trainer.step = (run.mode.window or 0) + 1
    for name, version in zip(group.members, initiated, strict=True):
        run.state.trajectories[name].initiated = version


def test_members_that_are_too_old_leave_an_active_group() -> None:
    run = rolling_out(size=4)
    group = group_of(run, 1.0, 0.0, Stage.RUN, Stage.RUN, Stage.QUEUED)
    aged(run, group, 0, 1, 0, 1, 0)
    groups.drop_expired(run)
    assert group.status is GroupStatus.ACTIVE
    assert group.chosen == ["g9.1"]
    assert evicted(run) == [(("g9.0",), StopReason.STALE)]
    expected = [Stage.ENDED, Stage.SCORED, Stage.CLOSING, Stage.RUN, Stage.QUEUED]
    assert stages(run, group) == expected
    assert run.state.counters.dropped == {StopReason.STALE: 1}


@pytest.mark.parametrize("published", [4, 1])
def test_what_discarded_weights_sampled_grows_old_though_versions_reach_their_number(
    published: int,
) -> None:
    """The trainer was at step 4 and is back at step 1."""
    run = rolling_out(size=2, mode="bounded")
    group = group_of(run, 1.0, 0.0)
    group.status = GroupStatus.BUFFERED
    del run.state.drawing.active[group.id]
    run.state.buffer[group.id] = None
    for name in group.members:
        run.state.trajectories[name].initiated = 2
    window = run.mode.window
    assert window == 1, "the window of the test's numbers"
    run.state.trainer.step, run.state.publication.version = 4, published
    run.state.trainer.status = TrainerStatus.STARTING
    training.on_ready(run, e.TrainerReady(epoch=0, step=1))
    assert list(run.state.buffer) == [group.id], "one step beyond the trainer's, which it shares"
    run.state.trainer.step = 2
    groups.drop_expired(run)
    assert list(run.state.buffer) == ([] if published == 4 else [group.id])


def test_members_that_are_too_old_leave_a_buffered_group() -> None:
    run = rolling_out(size=3, mode="partial")
    group = group_of(run, 1.0, 0.0, 0.5, Stage.ENDED)
    group.status, group.measures = GroupStatus.BUFFERED, Measures(ratio=1.5)
    del run.state.drawing.active[group.id]
    run.state.buffer[group.id] = None
    aged(run, group, 1, 0, 1, 0)
    groups.drop_expired(run)
    assert list(run.state.buffer) == [group.id]
    assert group.chosen == ["g9.0", "g9.2"]
    assert group.measures is None
    assert run.state.counters.dropped == {StopReason.STALE: 1}


def test_a_group_is_dropped_with_the_one_member_that_is_not_too_old() -> None:
    run = rolling_out(size=4)
    group = group_of(run, 1.0, 0.0, Stage.RUN, Stage.CLOSING)
    aged(run, group, 0, 1, 0, 1)
    groups.drop_expired(run)
    assert group.status is GroupStatus.DROPPED
    assert run.state.counters.dropped == {StopReason.STALE: 2}


def test_a_complete_group_goes_on_without_what_was_not_aborted() -> None:
    run = rolling_out(size=3, mode="partial")
    group = group_of(run, 1.0, 0.0, 0.5)
    aged(run, group, 0, 1, 1)
    groups.evaluate_group(run, group)
    assert list(run.state.buffer) == [group.id]
    assert group.chosen == ["g9.1", "g9.2"]


def test_groups_of_a_lost_step_return_to_the_buffer() -> None:
    run = rolling_out()
    whole, lost = group_of(run, 1.0, 0.0, name="g1"), group_of(run, 1.0, 0.0, name="g2")
    lost.tokens_lost = True
    run.state.drawing.active.clear()
    run.state.counters.trained = 10
    run.state.drawing.swept_for_version = 5
    groups.return_to_buffer(run, [whole.id, lost.id], trained=True)
    assert list(run.state.buffer) == ["g1"]
    assert whole.status is GroupStatus.BUFFERED
    assert run.state.counters.trained == 6
    assert run.state.counters.dropped == {StopReason.WORLD_LOST: 2}
    assert run.state.drawing.swept_for_version == -1
    whole.status = GroupStatus.TAKEN
    groups.return_to_buffer(run, [whole.id], trained=False)
    assert run.state.counters.trained == 6


def test_a_covered_group_is_forgotten_when_its_last_member_has_stopped() -> None:
    run = rolling_out()
    group = group_of(run, 1.0, 0.0, Stage.CLOSING)
    group.status = GroupStatus.TRAINED
    groups.mark_checkpointed(run, group)
    assert group.status is GroupStatus.COVERED
    assert evicted(run) == [(("g9.0", "g9.1"), "trained")]
    assert list(run.state.groups) == ["g9"]
    run.state.trajectories[group.members[2]].stage = Stage.ENDED
    groups.forget_if_stopped(run, group)
    assert run.state.groups == {}
    assert not any(name in run.state.trajectories for name in group.members)


def test_domains_are_drawn_by_weight_and_numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    run = rolling_out()
    monkeypatch.setattr(type(run.pacing), "room", lambda *_: 3)
    number = run.state.drawing.next_group
    run.state.drawing.drawn = {}
    groups.launch(run)
    drawn = of(run.out, c.DrawTask)
    assert [(one.name, one.index) for one in drawn] == [("a", 0), ("a", 1), ("b", 0)]
    assert [one.group_id for one in drawn] == [f"g{number + n}" for n in range(3)]
    assert run.state.drawing.drawn == {"a": 2, "b": 1}
    assert list(run.state.drawing.active) == [one.group_id for one in drawn]
    group = groups.draw(run, "b", 7, Purpose.EVAL)
    assert group.id == f"e{number + 3}"
    assert group.id not in run.state.drawing.active
