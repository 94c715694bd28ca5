"""Groups whose members pairwise judges compare."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.core.state import GroupStatus, Stage
from rollweave.core.watchdog import GRACE_S
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import GroupId, TrajectoryId
from rollweave.schema.work import Purpose, StopReason
from tests.support.core import (
    MODES,
    config,
    restart_controller,
    run_with_lost_controllers,
    until,
)
from tests.support.kinds import of
from tests.support.properties import examples
from tests.support.random_world import World

JUDGE = {
    "name": "duel",
    "tasks": ["a"],
    "timeout_s": 30.0,
    "url": "http://judge/v1",
    "judge": {"model": "m", "rubric": "x", "pairwise": True},
}


def compared_config(mode: str = "bounded", **rollout: Any) -> Any:
    run = {"rewards": [JUDGE], "watchdog": {"restarts": 100}}
    return config(mode, rollout={"group_size": 3, **rollout}, **run)


def trained_groups(world: World) -> set[str]:
    return {name.partition(".")[0] for names in world.trained.values() for name in names}


@settings(max_examples=examples(20), deadline=None)
@given(
    seed=st.integers(0, 2**16),
    mode=st.sampled_from(MODES),
    failure=st.sampled_from([0.0, 0.1]),
    hang=st.sampled_from([0.0, 0.05]),
    kills=st.lists(st.integers(1, 150), max_size=2),
)
def test_runs_with_comparisons_end_and_balance(
    seed: int, mode: str, failure: float, hang: float, kills: list[int]
) -> None:
    world = World(compared_config(mode), seed, failure=failure, hang=hang)
    run_with_lost_controllers(world, kills)
    if not failure and not hang and not kills:
        commands = [command for commands in world.commands for command in commands]
        asked = {one.group_id for one in of(commands, c.CompareGroup)}
        judged = {
            one.group_id
            for one in of(commands, c.DrawTask)
            if one.name == "a" and one.purpose is Purpose.TRAIN
        }
        trained = trained_groups(world)
        assert trained & judged, "groups of domain a were trained on"
        assert trained & judged <= asked <= judged, "all of these were compared, and no others"
        assert world.core.state.error == ""


class Comparing:
    """A core with a group of domain `a` whose members are to be compared."""

    def __init__(self, **rollout: Any) -> None:
        self.world = World(compared_config(**rollout), 1)
        self.world.start()
        command = until(self.world, c.CompareGroup)
        self.command, self.core = command, self.world.core
        self.names = list(command.rewards)

    @property
    def group(self) -> Any:
        return self.core.state.groups.get(self.command.group_id)

    def answer(self, rewards: dict[TrajectoryId, float]) -> list[c.Command]:
        commands = self.core.handle(
            self.world.now,
            e.GroupCompared(
                group_id=self.command.group_id, rewards=rewards, error="judge: no verdict"
            ),
        )
        self.core.check()
        return commands


def test_only_a_complete_group_of_a_judged_domain_is_compared() -> None:
    comparing = Comparing()
    assert comparing.group.name == "a"
    assert comparing.group.status is GroupStatus.COMPARING
    assert comparing.command.pairs == ((0, 1), (0, 2), (1, 2))
    assert comparing.group.id not in comparing.core.state.buffer


def test_the_rewards_of_the_comparison_replace_those_before() -> None:
    comparing = Comparing()
    comparing.answer(dict(zip(comparing.names, (1.0, 2.5, 3.0), strict=True)))
    trajectories = comparing.core.state.trajectories
    assert [trajectories[name].reward for name in comparing.names] == [1.0, 2.5, 3.0]
    assert comparing.group.status in (GroupStatus.BUFFERED, GroupStatus.TAKEN)
    comparing.answer({})  # a second answer changes nothing
    assert len(comparing.group.chosen) == 3


def test_a_member_without_a_verdict_leaves_its_group() -> None:
    comparing = Comparing()
    commands = comparing.answer(dict.fromkeys(comparing.names[:2], 1.0))
    assert comparing.group.chosen == [n for n in comparing.group.chosen if n in comparing.names[:2]]
    assert comparing.core.state.counters.dropped["reward_unavailable"] == 1
    assert comparing.core.state.trajectories[comparing.names[2]].stage is Stage.ENDED
    gone = of(commands, c.Evict)
    assert [(one.trajectory_ids, one.reason) for one in gone] == [
        ((comparing.names[2],), "reward_unavailable")
    ]
    assert comparing.core.account().balanced


def test_a_spare_member_that_still_stops_is_not_waited_for() -> None:
    comparing = Comparing(spare_members=1)
    members = [comparing.core.state.trajectories[name] for name in comparing.group.members]
    assert [one.stage for one in members if one.id not in comparing.names] == [Stage.CLOSING]
    comparing.answer(dict.fromkeys(comparing.names[:2], 1.0))
    assert comparing.group.status in (GroupStatus.BUFFERED, GroupStatus.TAKEN)
    assert set(comparing.group.chosen) == set(comparing.names[:2])


def test_a_group_of_which_too_few_have_verdicts_is_dropped() -> None:
    comparing = Comparing()
    comparing.answer({comparing.names[0]: 1.0})
    dropped = comparing.core.state.counters.dropped
    assert (dropped["reward_unavailable"], dropped["incomplete_group"]) == (2, 1)
    assert comparing.core.state.last_failure == "reward_unavailable: judge: no verdict"
    assert comparing.core.account().balanced


def test_dynamic_sampling_judges_the_rewards_after_the_comparison() -> None:
    comparing = Comparing(dynamic_sampling=True)
    comparing.answer(dict.fromkeys(comparing.names, 1.0))
    assert comparing.core.state.counters.dropped["filtered"] == 3


@pytest.mark.parametrize("starting", [False, True])
def test_a_comparison_without_an_answer_is_given_up_and_named(starting: bool) -> None:
    """A judge that has never answered may be starting."""
    comparing = Comparing()
    core, group = comparing.core, comparing.group
    core.state.mechanisms["comparison"].answered = not starting
    late = group.since + 30.0 + GRACE_S + (900.0 if starting else 0.0)
    commands = core.handle(late, e.TimerFired())
    assert not of(commands, c.CancelComparison)
    commands = core.handle(late + 0.1, e.TimerFired())
    assert c.CancelComparison(group_id=GroupId(group.id)) in commands
    assert any(
        isinstance(one, c.Warn)
        and f"have not been compared for {late - group.since:.0f} s" in one.message
        for one in commands
    )
    assert core.state.counters.dropped[StopReason.REWARD_HANG] == 3
    core.check()


def test_a_wait_for_the_groups_before_it_is_no_hang() -> None:
    comparing = Comparing(group_size=16)  # 96 requests, of which 64 are asked at once
    comparing.core.state.mechanisms["comparison"].answered = True
    since = comparing.group.since
    commands = comparing.core.handle(since + 60.0 + GRACE_S, e.TimerFired())
    assert not of(commands, c.CancelComparison)
    commands = comparing.core.handle(since + 60.1 + GRACE_S, e.TimerFired())
    assert c.CancelComparison(group_id=comparing.command.group_id) in commands


@settings(max_examples=examples(10), deadline=None)
@given(seed=st.integers(0, 2**16), mode=st.sampled_from(MODES), dynamic=st.booleans())
def test_groups_end_without_comparison_once_their_judge_is_removed(
    seed: int, mode: str, dynamic: bool
) -> None:
    world = World(compared_config(mode, dynamic_sampling=dynamic), seed)
    world.start()
    command = until(world, c.CompareGroup)
    seen = len(world.commands)
    world.config = config(mode, rollout={"group_size": 3, "dynamic_sampling": dynamic})
    restart_controller(world)
    group = world.core.state.groups.get(command.group_id)
    assert group is None or group.status is not GroupStatus.COMPARING
    world.run_on()
    assert world.core.account().balanced
    later = [one for commands in world.commands[seen:] for one in commands]
    assert not of(later, c.CompareGroup | c.CancelComparison)
    if not dynamic:
        assert world.core.state.error == ""
        assert command.group_id in trained_groups(world), "its members were not rolled out in vain"
