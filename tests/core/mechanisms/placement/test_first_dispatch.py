"""First turns wait for the prediction of their length, but not for long."""

from collections.abc import Mapping

import pytest

from rollweave.core.core import Core
from rollweave.core.mechanisms.placement.first_dispatch import WAIT_S
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId, TrajectoryId
from tests.support.core import config
from tests.support.hand import Hand
from tests.support.random_world import World

NAMES = tuple(TrajectoryId(name) for name in ("g0.0", "g0.1", "g1.0", "g1.1"))


class Asked(Hand):
    """Two engines for steps of two groups of two; the test answers for the
    predictor.
    """

    def __init__(self, scheduling: str, **rollout: object) -> None:
        self.asked: dict[tuple[TrajectoryId, int], c.Predict] = {}
        self.timer = 0.0
        rollout = {"groups_per_step": 2, "group_size": 2, "max_running": 4} | rollout
        super().__init__(
            config(
                "sync",
                steps=2,
                engines={"count": 2},
                tasks=[{"env": "a"}],
                eval={"final_episodes": 0},
                rollout={"scheduling": scheduling, **rollout},
            ),
            slots=4,
        )

    def answer(self, command: c.Command) -> list[e.Event]:
        if isinstance(command, c.Predict):
            self.asked[command.trajectory_id, command.turn] = command
        elif isinstance(command, c.SetTimer):
            self.timer = command.at
        return super().answer(command)

    def predict(self, lengths: Mapping[TrajectoryId, float], *, turn: int = 0) -> None:
        for name, length in lengths.items():
            attempt = self.asked[name, turn].attempt
            self.feed(
                e.PredictionReady(
                    trajectory_id=name, attempt=attempt, turn=turn, remaining_tokens=length
                )
            )

    def fire(self) -> None:
        self.now = self.timer
        self.feed(e.TimerFired())

    @property
    def places(self) -> dict[TrajectoryId, EngineId]:
        return {name: turn.engine_id for name, turn in self.turns.items()}

    @property
    def plans(self) -> int:
        return self.core.state.counters.scheduling.plans

    def end_step(self) -> None:
        """End the step: each trajectory has one turn."""
        for name in list(self.turns):
            self.end(name)
        self.train()


LENGTHS = dict(zip(NAMES, (10.0, 90.0, 10.0, 90.0), strict=True))


def test_the_batch_is_planned_once_by_all_its_predictions() -> None:
    """The first dispatch follows the plan (Heddle §5.2)."""
    hand = Asked("heddle")
    *early, last = NAMES
    hand.predict({name: LENGTHS[name] for name in early})
    assert (hand.places, hand.plans) == ({}, 0)
    hand.predict({last: LENGTHS[last]})
    assert hand.plans == 1
    short, long = hand.places[NAMES[0]], hand.places[NAMES[1]]
    assert short != long
    assert hand.places == dict(zip(NAMES, (short, long, short, long), strict=True))


def test_the_next_batch_has_a_plan_of_its_own() -> None:
    hand = Asked("heddle")
    hand.predict(LENGTHS)
    hand.end_step()
    assert (hand.places, hand.plans) == ({}, 1)
    following = [TrajectoryId(name) for name in ("g2.0", "g2.1", "g3.0", "g3.1")]
    hand.predict(dict.fromkeys(following, 5.0))
    assert hand.plans == 2
    assert list(hand.places) == following


def test_ours_waits_for_no_other_trajectory() -> None:
    hand = Asked("trajectory")
    for count, name in enumerate(NAMES, 1):
        hand.predict({name: LENGTHS[name]})
        assert len(hand.places) == count


@pytest.mark.parametrize("scheduling", ["heddle", "trajectory"])
def test_a_silent_predictor_is_waited_for_once(scheduling: str) -> None:
    hand = Asked(scheduling)
    assert hand.timer == WAIT_S
    hand.fire()
    assert set(hand.places) == set(NAMES)
    hand.end_step()
    assert len(hand.places) == 4, "nothing was waited for in the second step"


def test_a_predictor_that_answers_again_is_waited_for_again() -> None:
    hand = Asked("trajectory", max_running=2)
    hand.fire()
    assert list(hand.places) == [*NAMES[:2]]
    hand.predict({NAMES[0]: 10.0})
    for name in NAMES[:2]:
        hand.end(name)
    assert hand.places == {}
    hand.predict({NAMES[2]: 10.0})
    assert list(hand.places) == [NAMES[2]]


def test_a_batch_is_not_waited_for_longer_than_a_prediction() -> None:
    hand = Asked("heddle")
    hand.predict({NAMES[0]: 10.0, NAMES[1]: 90.0})
    hand.now = hand.timer / 2
    hand.feed(e.TimerFired())
    assert hand.places == {}
    assert hand.timer == WAIT_S, "a timer that fires early is set again"
    hand.fire()
    assert set(hand.places) == set(NAMES)


@pytest.mark.parametrize("scheduling", ["heddle", "trajectory"])
def test_a_wait_ends_when_its_timer_fires_whatever_the_rounding(scheduling: str) -> None:
    """At 1.84 s, the time of the timer minus 1.84 s is a little less than the wait."""
    hand = Asked(scheduling)
    hand.predict(LENGTHS)
    hand.fire()
    hand.now = 1.84
    assert hand.now + WAIT_S - hand.now < WAIT_S
    hand.end_step()
    while not hand.places and hand.now < 1.84 + WAIT_S:
        hand.fire()
    assert len(hand.places) == 4


def test_a_first_turn_that_is_cancelled_while_it_waits_is_forgotten() -> None:
    hand = Asked("heddle")
    name = NAMES[3]
    hand.feed(e.TurnWithdrawn(trajectory_id=name, attempt=0, turn=0))
    hand.predict({other: LENGTHS[other] for other in NAMES[:3]})
    assert set(hand.places) == {*NAMES[:3]}
    assert hand.core.state.mechanisms["placement"].held == {}


@pytest.mark.parametrize("seed", range(6))
def test_a_snapshot_restores_turns_that_wait(seed: int) -> None:
    """The restored core answers every later event as the first one does."""
    run_config = config(
        "bounded",
        steps=3,
        engines={"count": 2},
        rollout={"scheduling": "heddle", "groups_per_step": 2, "group_size": 3, "alpha": 1},
    )
    world = World(run_config, seed)
    copies: list[Core] = []
    original = world.core.handle

    def handle(now: float, event: e.Event) -> list[c.Command]:
        held = world.core.state.mechanisms.get("placement")
        if not copies and held is not None and held.held:
            copies.append(Core.restore(world.core.snapshot(), run_config))
        commands = original(now, event)
        for copy in copies:
            assert copy.handle(now, event) == commands
        return commands

    world.core.handle = handle  # type: ignore[method-assign]
    assert world.run().error == ""
    assert copies, "no turn ever waited"


def test_a_turn_that_follows_a_withdrawn_one_is_queued_once() -> None:
    """An agent program drops its first call while it waits, and calls again."""
    hand = Asked("trajectory")
    name = NAMES[0]
    hand.feed(e.TurnWithdrawn(trajectory_id=name, attempt=0, turn=0))
    hand.feed(hand.requests(name))
    hand.predict({name: 10.0}, turn=1)
    assert hand.places.keys() == {name}
    hand.fire()
    assert set(hand.places) == set(NAMES)
    hand.end(name)


def test_a_withdrawn_turn_does_not_make_the_predictor_silent() -> None:
    hand = Asked("trajectory", max_running=1)
    name = NAMES[0]
    hand.feed(e.TurnWithdrawn(trajectory_id=name, attempt=0, turn=0))
    hand.fire()
    part = hand.core.state.mechanisms["placement"]
    assert (part.held, part.silent) == ({}, False)


def test_nothing_is_held_in_a_new_world() -> None:
    hand = Asked("trajectory")
    hand.feed(e.WorldLost(engines=()))
    part = hand.core.state.mechanisms["placement"]
    assert (part.held, part.silent) == ({}, False)


def test_an_overdue_timer_is_not_put_off() -> None:
    hand = Asked("trajectory", max_running=1)
    due = hand.timer
    hand.predict({NAMES[0]: 10.0})
    hand.now = due + 0.5
    hand.end(NAMES[0])
    assert list(hand.core.state.mechanisms["placement"].held) == [NAMES[1]]
    assert hand.timer == due
