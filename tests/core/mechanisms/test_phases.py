"""Prefill and decoding apart: a turn whose prompt another engine computes, in worlds in
which everything may fail meanwhile.
"""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.core.core import Core
from rollweave.core.mechanisms import phases as phases
from rollweave.core.mechanisms.costs import REMEMBERED
from rollweave.core.mechanisms.costs.rates import Spent
from rollweave.core.policy.routing import LEAST_TOKENS, TRIAL
from rollweave.core.state import OnEngine, Trajectory, Turn
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId, TaskId, TrajectoryId
from rollweave.schema.work import Limits, Task
from tests.support import core
from tests.support.kinds import of
from tests.support.properties import examples
from tests.support.random_world import World

P0, D1, D2 = EngineId("e0"), EngineId("e1"), EngineId("e2")
PROMPT = 1000
"""Tokens of a group's prompt."""


class Controlled:
    """A run of one group, whose only turns are those that a test requests and answers.

    Engine 0 computes prompts; engines 1 and 2 sample.
    """

    def __init__(self, mode: str = "sync", **sections: Any) -> None:
        self.core = Core(
            core.config(
                mode,
                rollout={"groups_per_step": 1, "group_size": 2, **sections.pop("rollout", {})},
                tasks=[{"env": "a"}],
                engine_groups=core.SPLIT,
                watchdog={"turn_s": 60.0, "restarts": 9, **sections.pop("watchdog", {})},
                **sections,
            )
        )
        self.now = 0.0
        self.trajectories: list[TrajectoryId] = []
        slots = tuple(e.EngineSlot(id=EngineId(f"e{n}"), group=min(n, 1)) for n in range(3))
        self.feed(e.RunStarted(engines=slots))
        for slot in slots:
            self.join(slot.id)
        self.feed(e.TrainerReady(epoch=0, step=0))
        # prompts are computed ten times as fast there
        self.core.state.mechanisms["costs"].sampling[""] = {1: Spent(seconds=10.0, tokens=100.0)}
        self.core.state.mechanisms["phases"].prefill[""] = {1: Spent(seconds=1.0, tokens=100.0)}

    def join(self, engine_id: EngineId, epoch: int = 0, *, moves_kv: bool = True) -> None:
        self.feed(
            e.EngineJoined(
                engine_id=engine_id,
                epoch=epoch,
                max_slots=3,
                kv_total_tokens=10_000,
                moves_kv=moves_kv,
            )
        )

    def feed(self, event: e.Event) -> list[c.Command]:
        """Return the commands about turns; all others are answered."""
        about_turns = list[c.Command]()
        for command in self.core.handle(self.now, event):
            if isinstance(
                command, c.StartTurn | c.AbortTurn | c.Migrate | c.RestartEngine | c.Warn | c.Finish
            ):
                about_turns.append(command)
            else:
                for answer in self.answers(command):
                    about_turns += self.feed(answer)
        self.core.check()
        return about_turns

    def answers(self, command: c.Command) -> Iterable[e.Event]:
        match command:
            case c.DrawTask():
                task = Task(id=TaskId("t"), env="a", seed=0, limits=Limits(step_s=1e6))
                yield e.GroupSubmitted(group_id=command.group_id, task=task)
            case c.StartInit(trajectory_id=name, attempt=attempt):
                self.trajectories.append(name)
                yield e.EnvReady(trajectory_id=name, attempt=attempt, prompt_tokens=PROMPT)
            case c.CancelTrajectory(trajectory_id=name, attempt=attempt, reason=reason):
                yield e.TrajectoryEnded(trajectory_id=name, attempt=attempt, stop_reason=reason)
            case c.PublishWeights():
                yield e.WeightsPublished(
                    epoch=self.core.state.trainer.epoch,
                    version=command.version,
                    publication_id=command.publication_id,
                )
            case c.SuspendEngine(engine_id=engine_id):
                yield e.EngineSuspended(
                    engine_id=engine_id, epoch=self.core.state.engines[engine_id].epoch
                )
            case c.LoadWeights(engine_id=engine_id):
                yield e.WeightsLoaded(
                    engine_id=engine_id,
                    epoch=self.core.state.engines[engine_id].epoch,
                    version=command.version,
                    publication_id=command.publication_id,
                )
            case _:
                pass

    def trajectory(self, member: int = 0) -> Trajectory:
        return self.core.state.trajectories[self.trajectories[member]]

    @property
    def turn(self) -> Turn:
        return self.trajectory().open_turn

    def key(self, member: int = 0) -> dict[str, Any]:
        trajectory = self.trajectory(member)
        return {"trajectory_id": trajectory.id, "attempt": trajectory.attempt}

    def request(self, tokens: int = PROMPT, *, member: int = 0) -> list[c.Command]:
        turn = self.trajectory(member).turns_requested
        return self.feed(e.TurnRequested(**self.key(member), turn=turn, context_tokens=tokens))

    def answer(self, command: c.StartTurn, tokens: int = 10) -> list[c.Command]:
        key = {
            "trajectory_id": command.trajectory_id,
            "attempt": command.attempt,
            "turn": command.turn,
            "dispatch": command.dispatch,
        }
        if command.prefill:
            return self.feed(e.PrefillDone(**key, cached_tokens=0))
        return self.feed(e.TurnDone(**key, output_tokens=tokens, cached_tokens=0, version=0))

    def moved(self, command: c.Migrate, error: str = "") -> list[c.Command]:
        return self.feed(
            e.MigrationDone(
                number=command.number,
                trajectory_id=command.trajectory_id,
                attempt=command.attempt,
                moved_tokens=0 if error else PROMPT - 8,
                error=error,
            )
        )

    def prefilling(self) -> c.StartTurn:
        (start,) = self.request()
        assert isinstance(start, c.StartTurn)
        assert (start.engine_id, start.prefill, start.dispatch) == (P0, True, 0)
        return start

    def moving(self) -> c.Migrate:
        (migrate,) = self.answer(self.prefilling())
        assert isinstance(migrate, c.Migrate)
        return migrate


def sampled(commands: list[c.Command], engine_id: EngineId = D1) -> c.StartTurn:
    """Return the only command, which begins a turn on that engine."""
    starts = of(commands, c.StartTurn)
    assert [(one.engine_id, one.prefill) for one in starts] == [(engine_id, False)], commands
    return starts[0]


def kinds(commands: list[c.Command]) -> list[str]:
    return [type(command).__name__ for command in commands]


def test_a_turn_is_two_dispatches_with_a_move_between() -> None:
    run = Controlled()
    migrate = run.moving()
    assert (migrate.source, migrate.target) == (P0, D1)
    assert run.turn.place == OnEngine(engine=D1, given=1), "it has its engine from the beginning"
    run.now = 5.0
    start = sampled(run.moved(migrate))
    assert (start.dispatch, start.turn) == (1, 0)
    assert run.answer(start) == []
    counted = run.core.state.counters.scheduling
    assert counted.split_s == 5.0
    assert (counted.split_turns, counted.split_tokens, counted.split_failed) == (1, PROMPT, 0)
    assert run.trajectory().engine == D1


def test_a_short_suffix_stays_where_its_prefix_is() -> None:
    run = Controlled()
    run.answer(sampled(run.moved(run.moving())))
    assert not sampled(run.request(PROMPT + 10 + LEAST_TOKENS - 1)).prefill


def test_a_long_suffix_is_computed_elsewhere() -> None:
    run = Controlled()
    run.answer(sampled(run.moved(run.moving())))
    run.request(PROMPT, member=1)  # a turn beside it, which would be delayed
    (start,) = run.request(2 * PROMPT)
    assert isinstance(start, c.StartTurn)
    assert start.prefill


def test_a_member_of_a_group_finds_its_prompt() -> None:
    run = Controlled()
    run.answer(sampled(run.moved(run.moving())))
    assert not sampled(run.request(PROMPT, member=1)).prefill


@pytest.mark.parametrize("reason", ["not computed", "refused", "late"])
def test_a_prompt_that_does_not_come_is_computed_by_the_engine_of_the_turn(reason: str) -> None:
    run = Controlled()
    if reason == "not computed":
        start = run.prefilling()
        key = {**run.key(), "turn": 0, "dispatch": start.dispatch}
        commands = run.feed(e.TurnFailed(**key, error="the engine has no room"))
    elif reason == "refused":
        commands = run.moved(run.moving(), error="publication_id of the KV must be 1, got 0")
    else:
        run.prefilling()
        run.now += 61.0
        commands = run.feed(e.TimerFired())
        assert kinds(commands)[:1] == ["AbortTurn"]
    start = sampled(commands)
    assert start.dispatch == 1
    assert [command.message.count("prompt") for command in of(commands, c.Warn)]
    assert run.turn.failures == 0
    assert run.core.state.counters.scheduling.split_failed == 1
    run.answer(start)
    assert run.core.state.counters.turns == 1


def test_late_answers_change_nothing() -> None:
    run = Controlled()
    start = run.prefilling()
    migrate = run.answer(start)[0]
    assert isinstance(migrate, c.Migrate)
    key = {**run.key(), "turn": 0, "dispatch": start.dispatch}
    assert run.answer(start) == []
    assert run.feed(e.TurnFailed(**key, error="late")) == []
    sampled(run.moved(migrate))
    assert run.answer(start) == []
    assert run.feed(e.TurnFailed(**key, error="late")) == []
    assert run.moved(migrate) == []
    assert run.turn.dispatch == 1


def test_a_lost_prefill_engine_costs_no_attempt() -> None:
    run = Controlled()
    run.prefilling()
    commands = run.feed(e.EngineLost(engine_id=P0, epoch=0, error="killed"))
    assert sampled(commands).dispatch == 1
    assert run.turn.failures == 0
    restart = of(commands, c.RestartEngine)[0]
    run.join(P0, restart.epoch)
    run.answer(sampled(of(commands, c.StartTurn)))
    (start,) = run.request(3 * PROMPT)
    assert isinstance(start, c.StartTurn)
    assert start.prefill, "it is used again"


def test_a_prefill_engine_lost_while_kv_moves_is_the_end_of_the_transfer() -> None:
    run = Controlled()
    migrate = run.moving()
    assert "StartTurn" not in kinds(run.feed(e.EngineLost(engine_id=P0, epoch=0, error="killed")))
    sampled(run.moved(migrate, error="e0 is not running"))


@pytest.mark.parametrize("moves", [False, True])
def test_the_turn_of_a_lost_engine_goes_elsewhere(moves: bool) -> None:
    run = Controlled()
    migrate = run.moving() if moves else run.prefilling()
    commands = run.feed(e.EngineLost(engine_id=D1, epoch=0, error="killed"))
    aborted = [command.engine_id for command in of(commands, c.AbortTurn)]
    assert aborted == ([] if moves else [P0])
    starts = of(commands, c.StartTurn)
    assert len(starts) == 1
    assert isinstance(run.turn.place, OnEngine)
    assert run.turn.place.engine == D2
    if isinstance(migrate, c.Migrate):
        assert run.moved(migrate, error="e1 ended during the migration") == []


@pytest.mark.parametrize("moves", [False, True])
def test_a_cancelled_attempt_leaves_nothing(moves: bool) -> None:
    run = Controlled()
    migrate = run.moving() if moves else run.prefilling()
    name = run.trajectories[0]
    commands = run.feed(e.TurnWithdrawn(**run.key(), turn=0))
    aborted = [command.engine_id for command in of(commands, c.AbortTurn)]
    assert aborted == ([] if moves else [P0])
    assert run.core.state.trajectories[name].turn is None
    assert not run.core.state.engines[P0].active
    if isinstance(migrate, c.Migrate):
        assert run.moved(migrate) == []
        assert run.core.state.mechanisms["placement"].migrations.open == {}


def test_weights_that_change_meanwhile_make_the_kv_useless() -> None:
    run = Controlled()
    start = run.prefilling()
    run.core.state.engines[P0].publication_id += 1
    run.core._run.fleet_changed()
    assert sampled(run.answer(start)).dispatch == 1
    assert run.core.state.mechanisms["placement"].migrations.open == {}


def test_only_an_engine_with_the_same_weights_gets_a_prompt() -> None:
    run = Controlled()
    run.core.state.engines[P0].publication_id += 1
    run.core._run.fleet_changed()
    sampled(run.request())


def test_an_engine_that_cannot_move_kv_gets_none() -> None:
    run = Controlled()
    run.core.state.engines[P0].abilities.moves_kv = False
    sampled(run.request())


def test_the_last_engine_that_samples_ends_the_run() -> None:
    run = Controlled(watchdog={"restarts": 0})
    run.prefilling()
    run.feed(e.EngineLost(engine_id=D1, epoch=0, error="killed"))
    run.feed(e.EngineLost(engine_id=D2, epoch=0, error="killed"))
    assert "no engine is left" in run.core.state.error


def test_one_turn_in_many_goes_the_other_way() -> None:
    run = Controlled()
    ways = []
    for number in range(2 * TRIAL):
        (start,) = run.request(PROMPT * (number + 1))
        assert isinstance(start, c.StartTurn)
        ways.append(start.prefill)
        if start.prefill:
            (migrate,) = run.answer(start)
            assert isinstance(migrate, c.Migrate)
            start = sampled(run.moved(migrate))
        run.answer(start)
    assert 0 < sum(ways) < len(ways)
    assert run.core.state.mechanisms["phases"].decisions == len(ways)


def test_a_move_costs_its_mean_seconds_for_each_token() -> None:
    run = Controlled().core._run
    phases.learn_move(run, 3.0, 100)
    phases.learn_move(run, 1.0, 60)
    moved = run.state.mechanisms["phases"].moved
    assert moved.tokens == REMEMBERED * 100 + 60
    assert moved.seconds == REMEMBERED * 3.0 + 1.0


@pytest.mark.timeout(900)
@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 10_000),
    mode=st.sampled_from(core.MODES),
    failure=st.sampled_from([0.0, 0.02, 0.1]),
    hang=st.sampled_from([0.0, 0.0, 0.01]),
    restless=st.sampled_from([0.0, 0.0, 0.01]),
    every=st.sampled_from([0, 1, 2]),
    scheduling=st.sampled_from(sorted(core.SCHEDULINGS)),
    slots=st.sampled_from([1, 3]),
    prefill=st.integers(1, 2),
    kills=st.lists(st.integers(1, 200), max_size=2),
)
def test_any_world_with_prefill_engines_ends_accounted_for(
    seed: int,
    mode: str,
    failure: float,
    hang: float,
    restless: float,
    every: int,
    scheduling: str,
    slots: int,
    prefill: int,
    kills: list[int],
) -> None:
    settings_ = core.config(
        mode,
        rollout=core.SCHEDULINGS[scheduling],
        engines={"max_slots": slots},
        engine_groups=[{**core.SPLIT[0], "count": prefill}, core.SPLIT[1]],
        eval={"every": every},
        watchdog={"restarts": 100},
    )
    world = World(settings_, seed, failure=failure, hang=hang, restless=restless)
    with core.always_split():
        if kills:
            core.run_with_lost_controllers(world, kills)
        else:
            world.run()
    account = world.core.account()
    assert account.balanced
    assert account.in_flight == 0


def test_prompts_are_split_in_a_random_world() -> None:
    """The worlds above would prove nothing if they split no turn."""
    counted = 0
    for seed in range(1, 4):
        world = World(core.config("bounded", engine_groups=core.SPLIT), seed)
        with core.always_split():
            world.run()
        counted += world.core.state.counters.scheduling.split_turns
    assert counted > 50


def test_a_replayed_run_gives_identical_commands() -> None:
    run_config = core.config("bounded", engine_groups=core.SPLIT)
    world = World(run_config, 5, failure=0.05)
    world.run()
    again = Core(run_config)
    for (now, event), commands in zip(world.journal, world.commands, strict=True):
        assert again.handle(now, event) == commands


def test_a_snapshot_restores_a_turn_whose_prompt_is_computed() -> None:
    run = Controlled()
    start = run.prefilling()
    restored = Core.restore(run.core.snapshot(), run.core._run.config)
    restored.check()
    key = {**run.key(), "turn": 0, "dispatch": start.dispatch}
    event = e.PrefillDone(**key, cached_tokens=0)
    assert restored.handle(1.0, event) == run.core.handle(1.0, event)
    assert restored.snapshot() == run.core.snapshot()
