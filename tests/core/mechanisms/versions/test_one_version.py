"""Groups of one version, `no_mixed_groups`: the members of a group begin under the
weights of the first one (Laminar §10).
"""

import pytest

from rollweave.core.mechanisms.versions.binding import weights_of
from rollweave.core.state import GroupStatus, Stage
from rollweave.schema import events as e
from rollweave.schema.base import TrajectoryId
from rollweave.schema.work import StopReason
from tests.support.hand import E0, E1, Hand, decoupled_config
from tests.support.random_world import World

ONE = {"changes": ["no_mixed_groups"]}


class WatchedWorld(World):
    """Counts the buffered groups of several versions."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.mixed, self.seen = set[str](), set[str]()

    def feed(self, event: e.Event) -> None:
        super().feed(event)
        run = self.core._run
        for group_id, group in run.state.groups.items():
            if group.status not in (GroupStatus.BUFFERED, GroupStatus.TAKEN):
                continue
            members = [run.state.trajectories[name] for name in group.chosen]
            self.seen.add(group_id)
            if len({(weights_of(run, one), one.initiated) for one in members}) > 1:
                self.mixed.add(group_id)


def walked(seed: int, *, one_version: bool, failure: float = 0.04) -> WatchedWorld:
    settings = decoupled_config(
        engines=3,
        steps=6,
        rollout={"groups_per_step": 2, "group_size": 4, "max_running": 14},
        run={"checkpoint_every": 2},
        eval={"every": 3, "episodes": 2},
        watchdog={"turn_s": 60.0, "train_s": 600.0, "restarts": 50},
        weights={"relays": 2 * (seed % 2)},
        ablation=ONE if one_version else {},
    )
    world = WatchedWorld(settings, seed, failure=failure)
    world.run()
    return world


@pytest.mark.parametrize("failure", [0.0, 0.04])
def test_no_group_is_mixed_whatever_fails(failure: float) -> None:
    for seed in range(5):
        world = walked(seed, one_version=True, failure=failure)
        assert len(world.seen) >= 12
        assert not world.mixed
        assert "mixed_group" not in world.core.state.counters.watchdog


def test_groups_are_mixed_by_default() -> None:
    assert any(walked(seed, one_version=False).mixed for seed in range(3))


def again(hand: Hand, *, siblings_end: bool = False, lost: bool = False) -> TrajectoryId:
    """Let a member's environment fail once version 1 is published, and return the
    member. Its sibling is under way, or has ended, under version 0, whose weights may
    be `lost`, with which the member's attempt ends.
    """
    state = hand.core.state
    first, second = next(iter(state.groups.values())).members
    assert {hand.turns[first].engine_id, hand.turns[second].engine_id} == {E0, E1}
    hand.train_without([first, second])
    if siblings_end:
        hand.end(first)
    if lost:
        engine_id = hand.turns[second].engine_id
        other = E0 if engine_id == E1 else E1
        while state.engines[other].version == 0:
            hand.end(hand.on(other)[0])
        hand.refused, hand.damaged = {0}, {0}
        hand.lose(engine_id)
        hand.join(engine_id)
    else:
        key = {"trajectory_id": second, "attempt": 0, "turns": 0, "tokens": 0}
        hand.feed(e.TrajectoryEnded(**key, stop_reason=StopReason.ENV_ERROR, error="boom"))
    for _ in range(20):
        if state.trajectories[second].stage is Stage.RUN:
            return second
        hand.wait(10.0)
        if left := [name for name in hand.turns if name not in (first, second)]:
            hand.end(left[0])
    raise AssertionError(f"{state.trajectories[second]} does not begin")


def test_a_new_attempt_joins_its_sibling() -> None:
    """By default it begins with the newest weights."""
    for changes in ([], ["no_mixed_groups"]):
        hand = Hand(decoupled_config(ablation={"changes": changes}))
        name = again(hand)
        assert hand.core.state.trajectories[name].initiated == (0 if changes else 1)
        if changes:
            assert hand.core.state.engines[hand.turns[name].engine_id].version == 0


def test_a_new_attempt_waits_until_an_engine_has_loaded_the_weights_of_its_sibling() -> None:
    hand = Hand(decoupled_config(ablation=ONE))
    name = again(hand, siblings_end=True)
    state = hand.core.state
    assert state.trajectories[name].initiated == 0
    while name not in hand.turns:
        hand.end(next(iter(hand.turns)))
    assert hand.loads[-1].version == 0
    assert state.engines[hand.turns[name].engine_id].version == 0


def test_a_group_whose_weights_are_lost_is_mixed_and_counted() -> None:
    hand = Hand(decoupled_config(ablation=ONE))
    name = again(hand, siblings_end=True, lost=True)
    state = hand.core.state
    assert state.trajectories[name].initiated > 0
    assert state.counters.watchdog["mixed_group"] >= 1


def test_members_that_are_too_old_bind_no_others() -> None:
    """They leave their group."""
    hand = Hand(decoupled_config(rollout={"alpha": 0}, ablation=ONE))
    assert hand.core.state.trajectories[again(hand)].initiated > 0
