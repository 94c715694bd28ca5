"""The end of a run: drain, final checkpoint, final evaluation, finish.

An error shortens it, and every trajectory is still accounted for.
"""

from rollweave.core import evaluation, groups, lifecycle, serving, training, trajectories
from rollweave.core.run import Run
from rollweave.core.state import Phase, TrainerStatus
from rollweave.schema.commands import Finish
from rollweave.schema.events import StopRequested
from rollweave.schema.work import StopReason


def on_stop_requested(run: Run, event: StopRequested) -> None:
    if run.state.phase is Phase.SERVING:
        serving.stop(run, drain=event.drain)
    elif run.state.trainer.unplaced:
        training.give_up_place(run, "and the run was stopped")
    elif run.state.phase is Phase.RUNNING:
        run.state.skip_final_eval = True
        _drain(run)
    elif run.state.phase is Phase.EVALUATING:
        run.state.skip_final_eval = True
        evaluation.abandon(run)


def advance(run: Run) -> None:
    """Move to the next phase when this one is over. Several may end at once."""
    state = run.state
    if state.error and state.phase is not Phase.FINISHED:
        if state.trainer.saving is not None:
            # a checkpoint that is being written is worth waiting for: the watchdog
            # bounds it
            _drain(run)
            return
        _finish_with_error(run)
    serving.advance(run)
    if _has_lost_steps(run):
        state.phase = Phase.RUNNING
        evaluation.abandon(run)
    if state.phase is Phase.RUNNING:
        _end_of_training(run)
    if (
        state.phase is Phase.DRAINING
        and not _in_flight(run)
        and state.trainer.status is TrainerStatus.IDLE
    ):
        state.phase = Phase.SAVING
        # A streamed step that was cut short is not saved: its mini-batches belong to a
        # step that never became whole.
        if state.trainer.parts_done == 0:
            training.save(run)
    if (
        state.phase is Phase.SAVING
        and state.trainer.status is TrainerStatus.IDLE
        and state.trainer.saving is None
    ):
        if state.checkpoints.failed_at == state.trainer.step:
            state.error = (
                f"the final checkpoint of step {state.trainer.step} failed: "
                f"{state.checkpoints.error}; last good checkpoint: step {state.checkpoints.newest}"
            )
            _finish_with_error(run)
            return
        state.phase = Phase.EVALUATING
        best = state.evaluations.best
        if not _skips_final_eval(run) and best is not None and best.step != state.trainer.step:
            training.publish(run, from_checkpoint=best.step)
    if state.phase is Phase.EVALUATING:
        _final_evaluation(run)


def _has_lost_steps(run: Run) -> bool:
    """True if training was over, and the trainer has since come back at an earlier
    checkpoint.
    """
    state = run.state
    ending = state.phase in (Phase.DRAINING, Phase.SAVING, Phase.EVALUATING)
    wanted = not (state.skip_final_eval or state.evaluations.target_step is not None)
    return (
        ending
        and wanted
        and state.trainer.status is not TrainerStatus.STARTING
        and state.trainer.step < run.config.run.steps
    )


def _end_of_training(run: Run) -> None:
    state = run.state
    if (
        state.trainer.step >= run.config.run.steps
        and state.trainer.status is not TrainerStatus.STARTING
    ):
        groups.drop_unfinished(run)
        if state.evaluations.current is None and state.trainer.status is TrainerStatus.IDLE:
            if state.publication.version == state.trainer.step and evaluation.is_due(
                run, state.trainer.step
            ):
                # an earlier one was still under way
                evaluation.begin(run, version=state.trainer.step, final=False)
            else:
                _drain(run)
    elif state.evaluations.target_step is not None:
        _drain(run)


def _drain(run: Run) -> None:
    run.state.phase = Phase.DRAINING
    groups.drop_unfinished(run)
    evaluation.abandon(run, spare_final=not _skips_final_eval(run))


def _in_flight(run: Run) -> bool:
    pools = run.state.pools
    return bool(pools.init or pools.run_queued or pools.run or pools.eval or pools.closing)


def _skips_final_eval(run: Run) -> bool:
    return run.state.skip_final_eval or run.config.eval.final_episodes == 0


def _final_evaluation(run: Run) -> None:
    state = run.state
    if state.trainer.status is TrainerStatus.PUBLISHING:
        return
    if _skips_final_eval(run) or state.evaluations.final_done:
        evaluation.abandon(run)
        if not _in_flight(run):
            _finish(run)
    elif state.publication.id >= 0:
        evaluation.begin(run, version=state.publication.version, final=True)


def _finish(run: Run) -> None:
    run.state.phase = Phase.FINISHED
    run.emit(Finish(error=run.state.error))


def _finish_with_error(run: Run) -> None:
    """Finish without waiting: what still runs is accounted for as cancelled, and the
    world kills it.
    """
    state = run.state
    taken, state.trainer.batch = state.trainer.batch, []
    groups.return_to_buffer(run, taken, trained=False)
    groups.drop_unfinished(run)
    evaluation.abandon(run)
    state.phase = Phase.FINISHED
    for trajectory_id in list(state.pools.closing):
        trajectory = state.trajectories[trajectory_id]
        trajectories.end_attempt(run, trajectory, trajectory.closing or StopReason.CANCELLED)
    lifecycle.settle(run)
    run.emit(Finish(error=state.error))


def reopen(run: Run) -> None:
    """Continue a run that had ended, with more steps or after an error, once the
    controller is restarted.
    """
    state = run.state
    over = (
        state.phase is Phase.FINISHED
        and not state.error
        and state.trainer.step >= run.config.run.steps
    )
    if over and (state.evaluations.final_done or run.config.eval.final_episodes == 0):
        run.emit(Finish(error=""))
        return
    state.phase, state.error = Phase.RUNNING, ""
    state.skip_final_eval = False
    evaluation.reopen(run)
    state.checkpoints.failed_at = -1
