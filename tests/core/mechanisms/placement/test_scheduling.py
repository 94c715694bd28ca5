"""Turns run when and where they should, seen from outside the core: what was requested,
what was started, and what it waited for.
"""

import itertools

import pytest

from rollweave.core.core import Core
from rollweave.core.policy.scheduling import OVERTAKES
from rollweave.core.state import Queued
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId, TaskId
from rollweave.schema.work import Limits, Task
from tests.support.core import config
from tests.support.kinds import of
from tests.support.random_world import World

SHORT = "g0.0"

RANKED = {
    "scheduling": "trajectory",
    "policies": ["rank"],
    "groups_per_step": 2,
    "group_size": 6,
    "max_running": 12,
}


class Long(World):
    """A world in which all trajectories but one are long, and the predictor knows
    it.
    """

    def __init__(
        self, *, turns: int = 200, tool_s: float = 0.2, seed: int = 1, **sections: object
    ) -> None:
        run_config = config(
            "sync",
            steps=1,
            tasks=[{"env": "a"}],
            eval={"final_episodes": 0},
            watchdog={"turn_s": 1e6},
            **sections,
        )
        super().__init__(run_config, seed)
        self.turns, self.tool_s = turns, tool_s

    def execute(self, command: c.Command) -> None:
        """A turn takes a second, its environment `tool_s` more."""
        if not isinstance(command, c.StartTurn):
            super().execute(command)
            return
        key = {
            "trajectory_id": command.trajectory_id,
            "attempt": command.attempt,
            "turn": command.turn,
        }
        version = self.engine_version[command.engine_id]
        done = e.TurnDone(
            **key, dispatch=command.dispatch, output_tokens=3, cached_tokens=0, version=version
        )
        self.later(done, 1.0)
        self.turns_of[command.trajectory_id, command.attempt] = command.turn + 1
        self.next_turn(command.trajectory_id, command.attempt)

    def next_turn(self, trajectory_id: str, attempt: int, after: float | None = None) -> None:
        key = {"trajectory_id": trajectory_id, "attempt": attempt}
        wait = (
            0.01
            if self.turns_of[trajectory_id, attempt] == 0
            else 1.0 + self.tool_s * self.random.uniform(0.5, 1.5)
        )
        turn = self.turns_of[trajectory_id, attempt]
        if turn >= (3 if trajectory_id == SHORT else self.turns):
            self.later(e.TrajectoryEnded(**key, stop_reason="finished", turns=turn, tokens=9), wait)
        else:
            self.later(e.TurnRequested(**key, turn=turn, context_tokens=10), wait)

    def predict(self, command: c.Predict) -> None:
        remaining = 2.0 if command.trajectory_id == SHORT else 4000.0
        key = {
            "trajectory_id": command.trajectory_id,
            "attempt": command.attempt,
            "turn": command.turn,
        }
        self.later(e.PredictionReady(**key, remaining_tokens=remaining), 0.001)

    def started_turns(self) -> list[c.StartTurn]:
        return [command for commands in self.commands for command in of(commands, c.StartTurn)]


ONE_SLOT = {
    "rollout": {"scheduling": "trajectory", "groups_per_step": 1, "group_size": 6},
    "engines": {"count": 1, "max_slots": 1},
}


def test_a_short_trajectory_waits_for_long_ones_for_a_bounded_time() -> None:
    """Its turns are overtaken at most as often as the bound allows, and the engine is
    sent the rank of an overdue turn.
    """
    world = Long(**ONE_SLOT)
    assert world.run().error == ""
    started = world.started_turns()
    places = [place for place, command in enumerate(started) if command.trajectory_id == SHORT]
    assert len(places) == 3
    gaps = [after - before - 1 for before, after in itertools.pairwise(places)]
    assert max(gaps) > 10, "the long ones went first"
    assert max(gaps) <= OVERTAKES + 6, (
        "one slot may be given to others so often, and to those that are overdue too"
    )
    assert world.core.state.counters.scheduling.overdue > 0


def test_without_priorities_turns_run_in_order_of_launch() -> None:
    rollout = {
        "groups_per_step": 1,
        "group_size": 6,
        "policies": ["round_robin", "pinned"],
    }
    world = Long(turns=20, rollout=rollout, engines={"count": 1, "max_slots": 1})
    assert world.run().error == ""
    assert world.core.state.counters.scheduling.preemptions == 0
    assert world.core.state.counters.scheduling.predictions == 0
    requested = {
        (event.trajectory_id, event.turn): now
        for now, event in world.journal
        if isinstance(event, e.TurnRequested)
    }
    times = [requested[command.trajectory_id, command.turn] for command in world.started_turns()]
    assert times == sorted(times)


def test_a_longer_trajectory_preempts_and_the_victim_is_still_answered() -> None:
    world = Long(**ONE_SLOT, turns=20, tool_s=6.0)
    assert world.run().error == ""
    counted = world.core.state.counters.scheduling
    assert counted.preemptions > 0
    assert world.core.account().trained == 6


class Mute(Long):
    """A predictor that never answers."""

    def predict(self, command: c.Predict) -> None:
        pass


class Wild(Long):
    """A predictor whose answers cannot be lengths."""

    def predict(self, command: c.Predict) -> None:
        for remaining in (float("nan"), float("inf"), -5.0, 0.0):
            key = {
                "trajectory_id": command.trajectory_id,
                "attempt": command.attempt,
                "turn": command.turn,
            }
            self.later(e.PredictionReady(**key, remaining_tokens=remaining), 0.001)


@pytest.mark.parametrize("kind", [Mute, Wild])
@pytest.mark.parametrize("placement", ["partition", "presorted"])
def test_a_failing_predictor_changes_only_the_order(kind: type[Long], placement: str) -> None:
    rollout = {
        "scheduling": "trajectory",
        "policies": [placement],
        "groups_per_step": 2,
        "group_size": 4,
    }
    world = kind(turns=6, rollout=rollout)
    assert world.run().error == ""
    counted = world.core.state.counters.scheduling
    assert world.core.account().trained == 8
    assert counted.predictions > 0
    assert (counted.predictions_late > 0) == (kind is Mute)


class Huge(Long):
    """A predictor that diverges."""

    def predict(self, command: c.Predict) -> None:
        key = {
            "trajectory_id": command.trajectory_id,
            "attempt": command.attempt,
            "turn": command.turn,
        }
        self.later(
            e.PredictionReady(**key, remaining_tokens=self.random.choice([1e12, 1e300])), 0.001
        )


def test_an_absurdly_large_prediction_counts_as_a_long_trajectory() -> None:
    """The context summed over so many tokens would not fit into a snapshot's
    integers.
    """
    world = Huge(
        turns=6, rollout={"scheduling": "trajectory", "groups_per_step": 2, "group_size": 4}
    )
    world.start()
    while world.finish is None:
        world.step()
        assert Core.restore(world.core.snapshot(), world.config).snapshot() == world.core.snapshot()
    assert world.finish.error == ""


def test_no_kv_is_kept_for_trajectories_whose_environment_hangs() -> None:
    """Two residents' environments work for minutes. Their contexts leave no room for
    others, which run all the same.
    """
    hang_s = 60.0

    class Hangs(Long):
        def join(self, name: str) -> None:
            self.engine_version.pop(name, None)
            engine = {"engine_id": EngineId(name), "epoch": self.engine_epoch[name]}
            self.later(e.EngineJoined(**engine, max_slots=3, kv_total_tokens=26))

        def next_turn(self, trajectory_id: str, attempt: int, after: float | None = None) -> None:
            turn = self.turns_of[trajectory_id, attempt]
            if turn == 3 and trajectory_id in ("g0.1", "g0.2"):
                requested = e.TurnRequested(
                    trajectory_id=trajectory_id, attempt=attempt, turn=turn, context_tokens=10
                )
                self.later(requested, hang_s)
            else:
                super().next_turn(trajectory_id, attempt, after)

        def execute(self, command: c.Command) -> None:
            if isinstance(command, c.DrawTask):
                task = Task(id=TaskId("a"), env="a", seed=0, limits=Limits(step_s=2 * hang_s))
                self.later(e.GroupSubmitted(group_id=command.group_id, task=task), 0.0)
            else:
                super().execute(command)

    world = Hangs(turns=20, rollout=ONE_SLOT["rollout"], engines={"count": 1, "max_slots": 3})
    world.start()
    waited_s = 0.0
    while world.finish is None:
        state = world.core.state
        idle = bool(state.turns.queue) and not any(
            engine.active for engine in state.engines.values()
        )
        before = world.now
        world.step()
        waited_s += idle * (world.now - before)
    assert world.finish.error == ""
    assert world.core.account().trained == 6
    assert waited_s < hang_s / 4, "turns wait beside an engine that does nothing"


def test_a_turn_that_outruns_the_estimate_is_reranked_while_it_runs() -> None:
    """Turns take a second for three tokens; one of a trajectory with a short estimate
    takes minutes.
    """

    class Endless(Long):
        def execute(self, command: c.Command) -> None:
            endless = isinstance(command, c.StartTurn) and (
                command.trajectory_id,
                command.turn,
            ) == (SHORT, 1)
            self.turn_s = 300.0 if endless else 1.0
            super().execute(command)

        def later(self, event: e.Event, delay: float | None = None) -> None:
            of_turn = (
                isinstance(event, e.TurnDone | e.TurnRequested)
                and delay is not None
                and delay >= 1.0
            )
            super().later(event, (delay or 0.0) + self.turn_s - 1.0 if of_turn else delay)

    world = Endless(
        turns=60, tool_s=6.0, rollout=ONE_SLOT["rollout"], engines={"count": 1, "max_slots": 6}
    )
    world.turn_s = 1.0
    assert world.run().error == ""
    ranks = [
        command.rank
        for command in world.sent(c.RerankTurn)
        if (command.trajectory_id, command.turn) == (SHORT, 1)
    ]
    assert len(ranks) > 3, "its estimate is doubled again and again"
    assert ranks == sorted(set(ranks)), "it only rises"


def test_a_turn_waits_for_its_migrating_kv_and_the_wait_is_counted() -> None:
    class Slow(Long):
        def execute(self, command: c.Command) -> None:
            if isinstance(command, c.Migrate):
                done = e.MigrationDone(
                    number=command.number,
                    trajectory_id=command.trajectory_id,
                    attempt=command.attempt,
                    moved_tokens=5,
                )
                # longer than the environment takes, and within the limit of a transfer
                self.later(done, 13.0)
            else:
                super().execute(command)

    world = Slow(turns=10, tool_s=3.0, rollout=RANKED)
    assert world.run().error == ""
    counted = world.core.state.counters.scheduling
    assert counted.migrations > 0
    assert counted.migrations_failed == 0
    assert 0 < counted.exposed_s <= 13.0 * counted.migrations
    assert world.core.account().trained == 12


def test_a_transfer_without_an_answer_is_given_up() -> None:
    class Silent(Long):
        def execute(self, command: c.Command) -> None:
            if not isinstance(command, c.Migrate):
                super().execute(command)

    world = Silent(turns=6, tool_s=3.0, rollout=RANKED)
    assert world.run().error == ""
    assert world.core.state.counters.scheduling.migrations_failed > 0
    assert any("did not come" in warning.message for warning in world.warnings)
    assert world.core.account().trained == 12


def test_turns_are_requeued_when_their_engine_is_lost() -> None:
    """Turns that wait for a lost engine wait for another one."""
    rollout = {"scheduling": "trajectory", "groups_per_step": 2, "group_size": 6, "max_running": 12}
    world = Long(turns=8, rollout=rollout, engines={"count": 2, "max_slots": 1})
    world.start()
    while not world.core.state.turns.queue:
        world.step()

    def waited_for() -> list[EngineId | None]:
        state = world.core.state
        places = [state.trajectories[name].open_turn.place for name in state.turns.queue]
        queued = of(places, Queued)
        assert len(queued) == len(places)
        return [place.engine for place in queued]

    lost = waited_for()[0]
    assert lost is not None
    world.feed(e.EngineLost(engine_id=EngineId(lost), epoch=0, error="killed"))
    assert waited_for()
    assert lost not in waited_for()
    world.run_on()
    assert world.finish.error == ""
    assert world.core.account().trained == 12
