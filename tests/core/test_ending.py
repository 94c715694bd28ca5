"""The phases at the end of a run: each waits for what the one before began."""

import pytest

from rollweave.core import ending
from rollweave.core.run import Run
from rollweave.core.state import Evaluation, Phase, TrainerStatus
from rollweave.schema import commands as c
from rollweave.schema.base import TrajectoryId
from rollweave.schema.events import StopRequested
from tests.support.kinds import of
from tests.support.states import running


def in_phase(phase: Phase, **sections: object) -> Run:
    """A run with a trainer that is idle after the last step, and nothing in flight."""
    run = running(**sections)
    state = run.state
    state.groups.clear()
    state.trajectories.clear()
    state.drawing.active.clear()
    state.phase, state.trainer.status = phase, TrainerStatus.IDLE
    state.trainer.step = run.config.run.steps
    state.publication.version = state.publication.id = run.config.run.steps
    run.out = []
    return run


def finishes(run: Run) -> list[str]:
    return [command.error for command in of(run.out, c.Finish)]


@pytest.mark.parametrize("pool", ["init", "run", "eval", "closing"])
def test_draining_waits_for_all_that_was_started(pool: str) -> None:
    run = in_phase(Phase.DRAINING)
    getattr(run.state.pools, pool)[TrajectoryId("x")] = None
    ending.advance(run)
    assert run.state.phase is Phase.DRAINING
    getattr(run.state.pools, pool).clear()
    ending.advance(run)
    assert run.state.phase is Phase.SAVING


@pytest.mark.parametrize("status", [TrainerStatus.TRAINING, TrainerStatus.PUBLISHING])
def test_draining_waits_for_the_trainer(status: TrainerStatus) -> None:
    run = in_phase(Phase.DRAINING)
    run.state.trainer.status = status
    ending.advance(run)
    assert run.state.phase is Phase.DRAINING


def test_a_step_that_was_cut_short_is_not_saved() -> None:
    for parts_done, saves in ((0, 1), (1, 0)):
        run = in_phase(Phase.DRAINING)
        run.state.trainer.parts_done = parts_done
        ending.advance(run)
        assert sum(isinstance(command, c.SaveCheckpoint) for command in run.out) == saves


def test_a_final_checkpoint_that_failed_is_an_error() -> None:
    run = in_phase(Phase.SAVING)
    checkpoints = run.state.checkpoints
    checkpoints.failed_at, checkpoints.error, checkpoints.newest = 4, "disk full", 2
    ending.advance(run)
    assert finishes(run) == [
        "the final checkpoint of step 4 failed: disk full; last good checkpoint: step 2"
    ]
    assert run.state.phase is Phase.FINISHED


def test_saving_waits_for_the_checkpoint_and_evaluates() -> None:
    run = in_phase(Phase.SAVING)
    run.state.trainer.saving = 4
    ending.advance(run)
    assert run.state.phase is Phase.SAVING
    run.state.trainer.saving = None
    ending.advance(run)
    assert run.state.phase is Phase.EVALUATING
    planned = run.state.evaluations.current
    assert (planned.final, planned.version) == (True, 4)
    ending.advance(run)
    assert run.state.evaluations.current is planned
    assert finishes(run) == []


@pytest.mark.parametrize("reason", ["skipped", "done", "none configured"])
def test_a_run_finishes_without_a_final_evaluation_to_make(reason: str) -> None:
    sections = {"eval": {"final_episodes": 0}} if reason == "none configured" else {}
    run = in_phase(Phase.EVALUATING, **sections)
    run.state.skip_final_eval = reason == "skipped"
    run.state.evaluations.final_done = reason == "done"
    run.state.pools.closing[TrajectoryId("x")] = None
    ending.advance(run)
    assert finishes(run) == []
    run.state.pools.closing.clear()
    ending.advance(run)
    assert finishes(run) == [""]
    assert run.state.phase is Phase.FINISHED


def test_the_final_evaluation_waits_for_published_weights() -> None:
    run = in_phase(Phase.EVALUATING)
    run.state.trainer.status = TrainerStatus.PUBLISHING
    ending.advance(run)
    assert run.state.evaluations.current is None
    run.state.trainer.status = TrainerStatus.IDLE
    run.state.publication.id = -1
    ending.advance(run)
    assert run.state.evaluations.current is None
    run.state.publication.id = 0
    ending.advance(run)
    assert run.state.evaluations.current is not None


@pytest.mark.parametrize(
    ("change", "continues"),
    [
        *(({}, True), ({"status": TrainerStatus.STARTING}, False), ({"step": 4}, False)),
        *(({"skip": True}, False), ({"target": 2}, False)),
    ],
)
@pytest.mark.parametrize("phase", [Phase.DRAINING, Phase.SAVING, Phase.EVALUATING])
def test_training_continues_if_the_trainer_came_back_at_an_earlier_step(
    phase: Phase, change: dict[str, object], continues: bool
) -> None:
    run = in_phase(phase)
    state = run.state
    state.trainer.step = change.get("step", 3)  # type: ignore[assignment]
    state.trainer.status = change.get("status", TrainerStatus.IDLE)  # type: ignore[assignment]
    state.skip_final_eval = bool(change.get("skip"))
    state.evaluations.target_step = change.get("target")  # type: ignore[assignment]
    state.evaluations.current = Evaluation(version=4, final=True, to_draw=[])
    ending.advance(run)
    assert (state.phase is Phase.RUNNING) is continues
    if continues:
        assert state.evaluations.current is None


def test_training_is_over_after_the_last_step_or_at_the_target() -> None:
    run = in_phase(Phase.RUNNING)
    run.state.trainer.step = 3
    ending.advance(run)
    assert run.state.phase is Phase.RUNNING
    run.state.evaluations.target_step = 3
    run.state.pools.run[TrajectoryId("x")] = None
    ending.advance(run)
    assert run.state.phase is Phase.DRAINING
    run = in_phase(Phase.RUNNING)
    run.state.pools.run[TrajectoryId("x")] = None
    run.state.trainer.status = TrainerStatus.STARTING
    ending.advance(run)
    assert run.state.phase is Phase.RUNNING
    run.state.trainer.status = TrainerStatus.IDLE
    ending.advance(run)
    assert run.state.phase is Phase.DRAINING


def test_the_last_version_is_evaluated_before_training_is_over() -> None:
    run = in_phase(Phase.RUNNING, eval={"every": 2})
    ending.advance(run)
    assert run.state.phase is Phase.RUNNING
    planned = run.state.evaluations.current
    assert (planned.final, planned.version) == (False, 4)
    ending.advance(run)
    assert run.state.phase is Phase.RUNNING


def test_an_error_ends_the_run_when_no_checkpoint_is_being_written() -> None:
    run = in_phase(Phase.RUNNING)
    run.state.error = "broken"
    run.state.trainer.saving = 4
    ending.advance(run)
    assert (run.state.phase, finishes(run)) == (Phase.DRAINING, [])
    run.state.trainer.saving = None
    ending.advance(run)
    assert (run.state.phase, finishes(run)) == (Phase.FINISHED, ["broken"])


def test_a_stop_skips_the_final_evaluation() -> None:
    run = in_phase(Phase.RUNNING)
    ending.on_stop_requested(run, StopRequested())
    assert (run.state.phase, run.state.skip_final_eval) == (Phase.DRAINING, True)
    run = in_phase(Phase.EVALUATING)
    run.state.evaluations.current = Evaluation(version=4, final=True, to_draw=[])
    ending.on_stop_requested(run, StopRequested())
    assert run.state.evaluations.current is None
    assert run.state.skip_final_eval
    run = in_phase(Phase.SAVING)
    ending.on_stop_requested(run, StopRequested())
    assert (run.state.phase, run.state.skip_final_eval) == (Phase.SAVING, False)


@pytest.mark.parametrize("final", ["done", "none configured", "missing"])
def test_a_run_that_was_over_stays_over(final: str) -> None:
    sections = {"eval": {"final_episodes": 0}} if final == "none configured" else {}
    run = in_phase(Phase.FINISHED, **sections)
    run.state.evaluations.final_done = final == "done"
    ending.reopen(run)
    assert (run.state.phase is Phase.FINISHED) is (final != "missing")
    assert finishes(run) == ([] if final == "missing" else [""])


@pytest.mark.parametrize("change", ["error", "more steps"])
def test_a_run_that_ended_early_is_opened_again(change: str) -> None:
    run = in_phase(Phase.FINISHED)
    state = run.state
    state.evaluations.final_done, state.evaluations.target_step = True, 2
    state.skip_final_eval, state.checkpoints.failed_at = True, 4
    if change == "error":
        state.error = "broken"
    else:
        state.trainer.step = 3
    ending.reopen(run)
    assert (state.phase, state.error, finishes(run)) == (Phase.RUNNING, "", [])
    assert not state.skip_final_eval
    assert not state.evaluations.final_done
    assert (state.evaluations.target_step, state.checkpoints.failed_at) == (None, -1)
