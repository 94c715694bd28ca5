"""Every wait ends at its limit, and not before."""

from dataclasses import dataclass

import pytest

from rollweave.core import training, watchdog
from rollweave.core.run import Run
from rollweave.core.state import (
    EngineStatus,
    Group,
    GroupStatus,
    OnEngine,
    Phase,
    Publication,
    Stage,
    TrainerStatus,
    Trajectory,
    Turn,
)
from rollweave.core.trajectories import on_delayed
from rollweave.core.turns import CHECKS_PER_LIMIT, MIN_PERIOD_S
from rollweave.core.watchdog import DRAW_S, GRACE_S
from rollweave.schema import commands as c
from rollweave.schema.base import GroupId, TaskId
from rollweave.schema.events import AttemptDelayed, CheckpointFailed, TrainerReady
from rollweave.schema.work import Limits, Purpose, StopReason, Task
from tests.support.states import E0, members, running

STEP_S = 20.0


@dataclass
class Checked:
    run: Run
    out: list[c.Command]

    def of(self, kind: type[c.Command]) -> list[c.Command]:
        return [command for command in self.out if isinstance(command, kind)]

    @property
    def counted(self) -> dict[str, int]:
        return self.run.state.counters.watchdog


def ready() -> Run:
    run = running(5)
    state = run.state
    for engine in state.engines.values():
        engine.status, engine.since = EngineStatus.SERVING, 0.0
    state.trainer.status = TrainerStatus.IDLE
    (only,) = members(run)
    only.turn, only.since = None, 0.0
    state.pools.run[only.id] = None
    state.groups[only.group_id].task = Task(
        id=TaskId("t"), env="a", seed=0, limits=Limits(step_s=STEP_S)
    )
    state.groups[only.group_id].members = [only.id]
    for group_id in list(state.groups):
        if group_id != only.group_id:
            del state.groups[group_id]
    run.fleet_changed()
    state.counters.watchdog.clear()
    return run


def check_at(run: Run, seconds: float) -> Checked:
    run.now, run.out = seconds, []
    watchdog.check_deadlines(run)
    return Checked(run, run.out)


def in_stage(run: Run, stage: Stage) -> Trajectory:
    (only,) = members(run)
    pools = run.state.pools
    pools.run.clear()
    only.stage = stage
    {Stage.INIT: pools.init, Stage.EVAL: pools.eval, Stage.CLOSING: pools.closing}.get(
        stage, pools.run
    )[only.id] = None
    return only


@pytest.mark.parametrize(
    ("stage", "reason"),
    [
        (Stage.INIT, StopReason.ENV_HANG),
        (Stage.RUN, StopReason.ENV_HANG),
        (Stage.EVAL, StopReason.REWARD_HANG),
    ],
)
def test_an_environment_has_its_limit_and_some_grace(stage: Stage, reason: StopReason) -> None:
    run = ready()
    only = in_stage(run, stage)
    assert check_at(run, STEP_S + GRACE_S).counted == {}
    checked = check_at(run, STEP_S + GRACE_S + 0.1)
    assert checked.counted == {reason: 1}
    assert [one.trajectory_id for one in checked.of(c.CancelTrajectory)] == [only.id]  # type: ignore[attr-defined]
    assert only.closing is reason


@pytest.mark.parametrize("stage", [Stage.INIT, Stage.RUN, Stage.EVAL])
def test_what_an_attempt_waits_for_is_not_the_fault_of_its_environment(stage: Stage) -> None:
    run = ready()
    only = in_stage(run, stage)
    run.now = STEP_S
    on_delayed(run, AttemptDelayed(trajectory_id=only.id, attempt=only.attempt + 1))
    assert only.since == 0.0
    on_delayed(run, AttemptDelayed(trajectory_id=only.id, attempt=only.attempt))
    assert check_at(run, 2 * STEP_S + GRACE_S).counted == {}
    assert sum(check_at(run, 2 * STEP_S + GRACE_S + 0.1).counted.values()) == 1


def test_an_attempt_that_does_not_close_gives_its_slot_back() -> None:
    run = ready()
    only = in_stage(run, Stage.CLOSING)
    only.closing = StopReason.CANCELLED
    assert check_at(run, GRACE_S).counted == {}
    assert check_at(run, GRACE_S + 0.1).counted == {"stuck_closing": 1}
    assert run.state.pools.closing == {}


def test_an_engine_that_does_not_get_ready_is_restarted() -> None:
    limits = ready().config.watchdog
    for status, limit in (
        (EngineStatus.STARTING, limits.start_s),
        (EngineStatus.SUSPENDING, limits.weights_s),
        (EngineStatus.LOADING, limits.weights_s),
        (EngineStatus.STALE, None),
        (EngineStatus.SERVING, None),
    ):
        run = ready()
        run.state.pools.run.clear()
        run.state.engines[E0].status = status
        run.fleet_changed()
        if limit is None:
            assert check_at(run, 1e9).of(c.RestartEngine) == []
            continue
        assert check_at(run, limit).of(c.RestartEngine) == []
        (restart,) = check_at(run, limit + 0.1).of(c.RestartEngine)
        assert isinstance(restart, c.RestartEngine)
        assert restart.engine_id == E0


@pytest.mark.parametrize("purpose", [Purpose.TRAIN, Purpose.EVAL])
def test_a_task_that_is_not_drawn_is_given_up(purpose: Purpose) -> None:
    run = ready()
    group = Group(id=GroupId("g8"), name="a", index=3, purpose=purpose, since=0.0)
    assert group.status is GroupStatus.DRAWING
    run.state.groups[group.id] = group
    run.state.pools.run.clear()
    check_at(run, DRAW_S)
    assert group.id in run.state.groups
    assert check_at(run, DRAW_S + 0.1).counted == {"draw_hang": 1}
    assert group.id not in run.state.groups


def test_a_service_draws_no_tasks_and_has_no_trainer() -> None:
    run = ready()
    run.state.serving = True
    run.state.pools.run.clear()
    group = Group(id=GroupId("g8"), name="a", index=3, purpose=Purpose.TRAIN, since=0.0)
    run.state.groups[group.id] = group
    run.state.trainer.status = TrainerStatus.TRAINING
    assert check_at(run, 1e9).counted == {}


@pytest.mark.parametrize("late", [1, 2])
def test_an_engine_is_restarted_after_two_turns_without_an_answer(late: int) -> None:
    run = ready()
    run.state.pools.run.clear()
    (only,) = members(run)
    engine = run.state.engines[E0]
    engine.failures.consecutive_timeouts = late - 1
    only.turn = Turn(number=0, context_tokens=0, since=0.0)
    only.turn.place = OnEngine(engine=E0, given=0)
    run.fleet.occupy(engine, only.id, only.turn)
    checked = check_at(run, 1e6)
    assert len(checked.of(c.AbortTurn)) == 1
    assert len(checked.of(c.RestartEngine)) == late - 1


def test_a_checkpoint_that_cannot_be_written_is_reported() -> None:
    run = ready()
    run.state.trainer.saving, run.out = 1, []
    event = CheckpointFailed(epoch=run.state.trainer.epoch, step=1, error="the disk is full")
    training.on_checkpoint_failed(run, event)
    (warning,) = Checked(run, run.out).of(c.Warn)
    assert isinstance(warning, c.Warn)
    assert warning.message == "checkpoint of step 1 failed: the disk is full"
    assert run.state.trainer.saving is None
    training.on_checkpoint_failed(run, event)
    assert len(run.out) == 1, "it is no longer awaited"


def test_nothing_is_restarted_in_a_run_that_is_over() -> None:
    run = ready()
    run.state.phase, run.out = Phase.FINISHED, []
    training.restart(run, "lost")
    assert run.out == []
    assert run.state.trainer.restarts == 0


def test_a_trainer_that_does_not_answer_is_restarted() -> None:
    run = ready()
    run.state.pools.run.clear()
    limit = run.config.watchdog.train_s
    run.state.trainer.since = 1.0
    assert check_at(run, 1e9).of(c.RestartTrainer) == [], "an idle one is not asked"
    run.state.trainer.status = TrainerStatus.TRAINING
    assert check_at(run, 1.0 + limit).of(c.RestartTrainer) == []
    assert len(check_at(run, 1.0 + limit + 0.1).of(c.RestartTrainer)) == 1


def test_a_start_of_the_trainer_has_another_limit_than_a_step() -> None:
    run = ready()
    run.state.pools.run.clear()
    run.state.trainer.status, run.state.trainer.since = TrainerStatus.STARTING, 1.0
    limits = run.config.watchdog
    assert limits.start_s > limits.train_s
    assert check_at(run, 1.0 + limits.start_s).of(c.RestartTrainer) == []
    (restart,) = check_at(run, 1.0 + limits.start_s + 0.1).of(c.RestartTrainer)
    assert isinstance(restart, c.RestartTrainer)
    assert restart.reason == "not ready within 900 s"


def test_engines_start_when_a_model_from_scratch_is_there() -> None:
    run = ready()
    assert run.config.model.scratch is not None
    run.state.pools.run.clear()
    run.state.checkpoints.newest, run.state.publication = None, Publication()
    engine, trainer = run.state.engines[E0], run.state.trainer
    engine.status, trainer.status = EngineStatus.STARTING, TrainerStatus.STARTING
    trainer.since = 800.0
    assert check_at(run, 1600.0).of(c.RestartEngine) == []
    run.now = 1650.0
    training.on_ready(run, TrainerReady(epoch=trainer.epoch, step=0))
    assert check_at(run, 1650.0 + run.config.watchdog.start_s).of(c.RestartEngine) == []
    assert trainer.status is TrainerStatus.STARTING, "it did not publish, and starts again"
    late = check_at(run, 1650.1 + run.config.watchdog.start_s)
    assert len(late.of(c.RestartEngine)) == 1, "the model is there"


def test_a_checkpoint_that_is_never_written_restarts_the_trainer() -> None:
    run = ready()
    run.state.pools.run.clear()
    limit = run.config.watchdog.train_s
    run.state.trainer.saving, run.state.trainer.save_requested_at = 1, 2.0
    assert check_at(run, 2.0 + limit).of(c.RestartTrainer) == []
    assert len(check_at(run, 2.0 + limit + 0.1).of(c.RestartTrainer)) == 1


def test_the_next_check_comes_in_a_part_of_the_shortest_limit() -> None:
    run = ready()
    limits = run.config.watchdog
    shortest = min(limits.start_s, limits.turn_s, limits.weights_s, limits.train_s)
    shortest = min(shortest, *(task.step_s for task in run.tasks.values()))
    (timer,) = check_at(run, 3.0).of(c.SetTimer)
    assert isinstance(timer, c.SetTimer)
    assert timer.at == 3.0 + shortest / CHECKS_PER_LIMIT
    run.state.phase = Phase.FINISHED
    assert check_at(run, 4.0).out == []


def test_checks_are_not_more_frequent_than_needed() -> None:
    run = running(5, watchdog={"turn_s": 0.001 * MIN_PERIOD_S})
    (timer,) = check_at(run, 3.0).of(c.SetTimer)
    assert isinstance(timer, c.SetTimer)
    assert timer.at == 3.0 + MIN_PERIOD_S


@pytest.mark.parametrize("earlier", ["", "the disk is full"])
def test_a_run_without_engines_waits_for_a_host_and_ends(earlier: str) -> None:
    run = ready()
    limit = run.config.watchdog.train_s
    run.state.engines.clear()
    run.fleet_changed()
    check_at(run, 10.0)
    check_at(run, 10.0 + limit)
    assert run.state.error == ""
    run.state.error = earlier
    check_at(run, 10.1 + limit)
    assert run.state.error == earlier or "no host with a place for one" in run.state.error


def test_a_run_that_has_an_engine_again_waits_anew() -> None:
    run = ready()
    engines, run.state.engines = run.state.engines, {}
    run.fleet_changed()
    check_at(run, 10.0)
    run.state.engines = engines
    run.fleet_changed()
    check_at(run, 11.0)
    assert run.state.hosts.engineless_since is None
