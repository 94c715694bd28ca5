"""Training: measuring and taking groups from the buffer, steps, publications,
checkpoints, and the loss of the trainer.

Invariant: a group is taken by one step of the surviving lineage only. Steps since the
last checkpoint but one stay in `lineage`, so that a restored trainer's lost steps give
their groups back (docs/decisions/0007), even if the last checkpoint turns out to be
damaged. A version is published once its step is complete.
"""

from rollweave.core import continuation, evaluation, groups, lifecycle, weights
from rollweave.core.policy.modes import acceptable, staleness
from rollweave.core.run import Run, TrainerMove
from rollweave.core.state import EngineStatus, Group, GroupStatus, Phase, TrainerStatus
from rollweave.schema.commands import (
    GroupRef,
    MeasureGroups,
    PublishWeights,
    RestartTrainer,
    SaveCheckpoint,
    TrainStep,
    Warn,
)
from rollweave.schema.events import (
    CheckpointCopied,
    CheckpointFailed,
    CheckpointSaved,
    GroupsMeasured,
    StepTrained,
    TrainerLost,
    TrainerReady,
    TrainFailed,
    WeightsPublished,
)

CHECKPOINT_S = 30.0
"""Minimum seconds between checkpoints by time."""

COST_SHARE = 0.05
"""Maximum share of the time spent writing checkpoints."""


def checkpoint_is_due(since_s: float, *, every_s: float, last_s: float) -> bool:
    """True if a checkpoint is due `since_s` seconds after the last checkpoint was
    requested, which took `last_s` to write. `every_s` is the wanted interval; 0 asks
    for no checkpoints. Raises ValueError for negative seconds.
    """
    for name, seconds in (("every_s", every_s), ("last_s", last_s)):
        if seconds < 0:
            raise ValueError(f"{name} must be at least 0, got {seconds}")
    return every_s > 0 and since_s >= max(every_s, last_s / COST_SHARE)


def enter(run: Run, status: TrainerStatus) -> None:
    trainer = run.state.trainer
    trainer.status, trainer.since = status, run.now
    if status is not TrainerStatus.MEASURING:
        trainer.measuring = []


def makes_model(run: Run) -> bool:
    """Return whether the trainer builds the model and warms it up, so that the starts
    of engines, which read it, have not begun.
    """
    state = run.state
    return (
        run.config.model.scratch is not None
        and not state.serving
        and state.trainer.status is TrainerStatus.STARTING
        and state.checkpoints.newest is None
        and state.publication.next_id == 0  # a trainer that was ready had the model
    )


def on_ready(run: Run, event: TrainerReady) -> None:
    """The trainer is at `event.step`. Steps beyond it are lost; their groups go back to
    the buffer if still fresh.

    A trainer that could not read its last checkpoint is back at the one before, and the
    last one no longer counts.
    """
    state, trainer = run.state, run.state.trainer
    if event.epoch != trainer.epoch or trainer.status is not TrainerStatus.STARTING:
        return
    if makes_model(run):
        for engine in state.engines.values():
            if engine.status is EngineStatus.STARTING:
                engine.since = run.now  # it can read the model from now on
    damaged = state.checkpoints.newest is not None and event.step < state.checkpoints.newest
    if damaged:
        evaluation.checkpoints_lost(run, event.step)
        state.checkpoints.newest, state.checkpoints.previous = event.step, None
        weights.keep_checkpoints(run, but=range(event.step + 1))
    lost, before = max(0, trainer.step - event.step), _discarded(run)
    trainer.step, trainer.parts_done = event.step, 0
    enter(run, TrainerStatus.IDLE)
    if state.publication.version > event.step:  # which is discarded
        continuation.restored(run, event.step)
    for step in [step for step in state.checkpoints.lineage if step >= event.step]:
        groups.return_to_buffer(run, state.checkpoints.lineage.pop(step), trained=True)
    groups.drop_expired(run)
    lifecycle.settle(run)  # so that all that is dropped by now is counted
    dropped = _discarded(run) - before
    text = (
        f"{lost} later steps are trained again, {dropped} rollouts do not fit its weights and are "
        "dropped"
    )
    if damaged:
        run.warn(
            "trainer",
            f"back at checkpoint {event.step}: {event.note}; {text}",
            count="checkpoint_damaged",
        )
    elif lost or dropped:
        run.emit(Warn(component="trainer", message=f"continues from step {event.step}: {text}"))
    publish(run)


def _discarded(run: Run) -> int:
    """The number of training trajectories that were dropped or cancelled so far."""
    return run.state.counters.cancelled + sum(run.state.counters.dropped.values())


# Steps.


def take_batch(run: Run) -> None:
    """Train on a (mini-)batch of acceptable groups as soon as the trainer is idle and
    the buffer holds one (step ① "get_batch" of RollArt's workflow).
    """
    state, trainer = run.state, run.state.trainer
    if not may_take(run):
        return
    wanted = run.groups_in_minibatch(trainer.parts_done)
    groups.drop_expired(run)
    if len(state.buffer) < wanted:
        return
    if unmeasured := run.pacing.unmeasured(run, wanted):
        trainer.measuring = unmeasured
        refs = _refs(run, [state.groups[group_id] for group_id in unmeasured])
        run.emit(MeasureGroups(step=trainer.step, part=trainer.parts_done, groups=refs))
        enter(run, TrainerStatus.MEASURING)
        return
    taken = [state.groups[group_id] for group_id in run.pacing.choose_batch(run, wanted)]
    if not taken:
        return
    for group in taken:
        del state.buffer[group.id]
        groups.enter(run, group, GroupStatus.TAKEN)
        trainer.batch.append(group.id)
    step, part, parts = trainer.step, trainer.parts_done, run.minibatches_per_step
    run.emit(TrainStep(step=step, part=part, parts=parts, groups=_refs(run, taken)))
    enter(run, TrainerStatus.TRAINING)


def may_take(run: Run) -> bool:
    """True if the trainer may take a (mini-)batch, once the buffer holds one."""
    state, trainer = run.state, run.state.trainer
    if (
        trainer.status is not TrainerStatus.IDLE
        or not run.training
        or trainer.step >= run.config.run.steps
    ):
        return False
    if state.publication.version != trainer.step and trainer.parts_done == 0:
        return False  # the weights of the last step are still to be published
    evaluation = state.evaluations.current
    # engines must load the version to be evaluated before there is a newer one
    return evaluation is None or evaluation.started or run.pacing.evaluates_on_one_engine


def _refs(run: Run, batch: list[Group]) -> tuple[GroupRef, ...]:
    return tuple(
        GroupRef(
            id=group.id,
            name=group.name,
            trajectory_ids=tuple(group.chosen),
            restored_to={
                one: step
                for one in group.chosen
                if (step := run.state.trajectories[one].past.restored_to) is not None
            },
        )
        for group in batch
    )


def on_measured(run: Run, event: GroupsMeasured) -> None:
    """Record the measures, which hold until the next weights are published. Those of
    groups that have left the buffer are ignored.
    """
    state, trainer = run.state, run.state.trainer
    expected = (trainer.epoch, trainer.step, trainer.parts_done)
    if (
        trainer.status is not TrainerStatus.MEASURING
        or (event.epoch, event.step, event.part) != expected
    ):
        return
    if [measured.id for measured in event.groups] != trainer.measuring:
        return  # a duplicate of an earlier answer
    for measured in event.groups:
        if measured.id in state.buffer:
            state.groups[measured.id].measures = measured.measures
    enter(run, TrainerStatus.IDLE)


def on_trained(run: Run, event: StepTrained) -> None:
    state, trainer = run.state, run.state.trainer
    expected = (trainer.epoch, trainer.step, trainer.parts_done)
    if (
        trainer.status is not TrainerStatus.TRAINING
        or (event.epoch, event.step, event.part) != expected
    ):
        return
    _count_trained(run)
    state.checkpoints.lineage.setdefault(trainer.step, []).extend(trainer.batch)
    trainer.batch = []
    trainer.parts_done += 1
    enter(run, TrainerStatus.IDLE)
    if trainer.parts_done == run.minibatches_per_step:
        trainer.step += 1
        trainer.parts_done = 0
        run.follow(TrainerMove.TRAINED)
        groups.learn_spare_groups(run)
        publish(run)


def _count_trained(run: Run) -> None:
    state, trainer = run.state, run.state.trainer
    counters = state.counters
    for group_id in trainer.batch:
        group = state.groups[group_id]
        groups.enter(run, group, GroupStatus.TRAINED)
        counters.trained += len(group.chosen)
        for member in group.chosen:
            origin = state.trajectories[member].origin
            assert acceptable(origin, trainer.step, run.mode.window), "staleness is bounded"
            age = staleness(origin, trainer.step)
            counters.staleness[age] = counters.staleness.get(age, 0) + 1


def on_train_failed(run: Run, event: TrainFailed) -> None:
    """A non-finite loss ends the run with the last good checkpoint; any other error
    restarts the trainer.
    """
    state, trainer = run.state, run.state.trainer
    expected = (trainer.epoch, trainer.step)
    working = trainer.status in (TrainerStatus.MEASURING, TrainerStatus.TRAINING)
    if not working or (event.epoch, event.step) != expected:
        return
    names = ", ".join(trainer.batch or trainer.measuring)
    taken, trainer.batch = trainer.batch, []
    groups.return_to_buffer(run, taken, trained=False)
    enter(run, TrainerStatus.IDLE)
    if event.nonfinite:
        good = f"step {state.checkpoints.newest}"
        if trainer.saving is not None:
            good = f"step {trainer.saving}, which is being written"
        text = f"step {event.step}: {event.error}; batch of groups {names}"
        state.error = state.error or f"{text}; last good checkpoint: {good}"
    else:
        restart(run, f"step {event.step} failed: {event.error}")


# Publication and checkpoints.


def publish(run: Run, from_checkpoint: int | None = None) -> None:
    """Publish the trainer's weights, or those of the checkpoint of this step."""
    trainer = run.state.trainer
    run.emit(
        PublishWeights(
            version=trainer.step if from_checkpoint is None else from_checkpoint,
            publication_id=weights.take_id(run),
            from_checkpoint=from_checkpoint,
            keep=weights.needed(run),
            release=run.colocated,
        )
    )
    enter(run, TrainerStatus.PUBLISHING)


def on_published(run: Run, event: WeightsPublished) -> None:
    state, trainer = run.state, run.state.trainer
    expected = (trainer.epoch, state.publication.next_id - 1)
    if (
        trainer.status is not TrainerStatus.PUBLISHING
        or (event.epoch, event.publication_id) != expected
    ):
        return
    weights.publish(run, event.version, event.publication_id)
    for group_id in state.buffer:
        state.groups[group_id].measures = None  # they were measured under other weights
    if event.version in (state.checkpoints.newest, state.evaluations.best_step):
        # it was restored from that checkpoint
        weights.mark_checkpointed(run, event.version, event.publication_id)
    evaluation.abandon_if_superseded(run, event.version)
    evaluation.drop_if_not_resumed(run, event.version)
    enter(run, TrainerStatus.IDLE)
    run.follow(TrainerMove.PUBLISHED)
    if not run.training:
        return
    evaluate = evaluation.is_due(run, trainer.step)
    every = run.config.run.checkpoint_every
    due = state.checkpoints.newest is None or evaluate or (every and trainer.step % every == 0)
    if due or (trainer.saving is None and _is_due_by_time(run)):
        save(run)
    if evaluate:
        evaluation.begin(run, version=trainer.step, final=False)


def _is_due_by_time(run: Run) -> bool:
    trainer, every = run.state.trainer, run.config.run.checkpoint_every
    every_s = 0.0 if every == 0 else CHECKPOINT_S
    return checkpoint_is_due(
        run.now - trainer.save_requested_at, every_s=every_s, last_s=trainer.last_save_s
    )


def save(run: Run) -> None:
    """Request a checkpoint of this step. If another one is still being written, the
    trainer first waits for it.

    The last checkpoint of a run, and those that an evaluation may find best, have an
    export; one that was written without is written again.
    """
    state, trainer = run.state, run.state.trainer
    ends = state.phase is Phase.SAVING or trainer.step >= run.config.run.steps
    export = ends or evaluation.is_due(run, trainer.step)
    if state.checkpoints.newest == trainer.step and (
        state.checkpoints.exported == trainer.step or not export
    ):
        return
    if trainer.saving == trainer.step and (trainer.exports or not export):
        return
    enter(run, TrainerStatus.SAVING)
    if trainer.saving is not None:
        trainer.save_pending = True
        return
    trainer.save_pending = False
    trainer.saving, trainer.save_requested_at, trainer.exports = trainer.step, run.now, export
    trainer.saving_publication_id = (
        state.publication.id if state.publication.version == trainer.step else -1
    )
    evaluations, checkpoints = state.evaluations, state.checkpoints
    evaluated = evaluations.current.version if evaluations.current is not None else None
    steps = (evaluations.best_step, checkpoints.newest, evaluated)
    keep = {step for step in steps if step is not None} | run.pacing.needed_checkpoints(run)
    weights.keep_checkpoints(run, but=keep - {trainer.step})
    checkpoints.newest_requested = max(checkpoints.newest_requested, trainer.step)
    run.emit(SaveCheckpoint(step=trainer.step, keep=tuple(sorted(keep)), export=export))


def on_checkpoint_copied(run: Run, event: CheckpointCopied) -> None:
    """Continue training: a copy is in memory, and is written in the background."""
    trainer = run.state.trainer
    expected = (trainer.epoch, trainer.saving)
    if (
        (event.epoch, event.step) == expected
        and trainer.status is TrainerStatus.SAVING
        and not trainer.save_pending
    ):
        enter(run, TrainerStatus.IDLE)


def on_checkpoint_saved(run: Run, event: CheckpointSaved) -> None:
    state, trainer = run.state, run.state.trainer
    if (event.epoch, event.step) != (trainer.epoch, trainer.saving):
        return
    checkpoints = state.checkpoints
    if checkpoints.newest != event.step:
        checkpoints.newest, checkpoints.previous = event.step, checkpoints.newest
    checkpoints.requested_at = trainer.save_requested_at
    if trainer.exports:
        checkpoints.exported = event.step
    weights.mark_checkpointed(run, event.step, trainer.saving_publication_id)
    if checkpoints.failed_at == event.step:
        checkpoints.failed_at = -1
    evaluation.checkpoint_saved(run, event.step)
    covered = [
        step
        for step in checkpoints.lineage
        if checkpoints.previous is not None and step < checkpoints.previous
    ]
    for step in covered:
        for group_id in checkpoints.lineage.pop(step):
            groups.mark_checkpointed(run, state.groups[group_id])
    _finish_save(run)


def on_checkpoint_failed(run: Run, event: CheckpointFailed) -> None:
    """Continue training: the earlier checkpoint is intact, and the next one may find
    room again.
    """
    state, trainer = run.state, run.state.trainer
    if (event.epoch, event.step) != (trainer.epoch, trainer.saving):
        return
    run.warn(
        "trainer",
        f"checkpoint of step {event.step} failed: {event.error}",
        count="checkpoint_failed",
    )
    state.checkpoints.failed_at, state.checkpoints.error = event.step, event.error
    _finish_save(run)


def _finish_save(run: Run) -> None:
    trainer = run.state.trainer
    trainer.saving, trainer.last_save_s = None, run.now - trainer.save_requested_at
    if trainer.save_pending:
        save(run)
    elif trainer.status is TrainerStatus.SAVING:
        enter(run, TrainerStatus.IDLE)


# Loss of the trainer.


def on_lost(run: Run, event: TrainerLost) -> None:
    if event.epoch != run.state.trainer.epoch:
        return
    run.state.trainer.saving = None  # a checkpoint that was being written is lost with its trainer
    if event.hopeless:
        run.state.error = run.state.error or f"the trainer cannot continue: {event.error}"
    else:
        restart(run, f"lost: {event.error}")


def restart(run: Run, reason: str) -> None:
    """Restart the trainer from the last checkpoint.

    The batch in training goes back to the buffer. If a host of its ranks is lost, that
    is not counted as a failure of the trainer.
    """
    state, trainer = run.state, run.state.trainer
    if state.phase is Phase.FINISHED:
        return
    taken, trainer.batch = trainer.batch, []
    groups.return_to_buffer(run, taken, trained=False)
    trainer.parts_done = 0
    trainer.saving, trainer.save_pending = None, False
    host_lost = any(rank.host not in state.hosts.up for rank in state.hosts.ranks)
    if trainer.restarts >= run.config.watchdog.restarts and not host_lost:
        enter(run, TrainerStatus.STARTING)
        state.error = (
            state.error or f"the trainer failed {trainer.restarts + 1} times; last: {reason}"
        )
        return
    run.warn(
        "trainer",
        f"restarted from checkpoint {state.checkpoints.newest}: {reason}",
        count="trainer_restarted",
    )
    trainer.restarts += not host_lost
    start_process(run, reason)


def start_process(run: Run, reason: str) -> None:
    trainer = run.state.trainer
    weights.trainer_lost(run)
    trainer.saving, trainer.save_pending = None, False
    trainer.epoch += 1
    enter(run, TrainerStatus.STARTING)
    start(run, reason)


def start(run: Run, reason: str) -> None:
    """Start the trainer, if there is a place for each of its ranks."""
    state, trainer = run.state, run.state.trainer
    run.follow(TrainerMove.STARTING, reason)
    if trainer.unplaced:
        return
    trainer.since = run.now
    run.emit(
        RestartTrainer(
            ranks=tuple(state.hosts.ranks),
            epoch=trainer.epoch,
            step=state.checkpoints.newest,
            fallback=state.checkpoints.previous,
            reason=reason,
        )
    )


def give_up_place(run: Run, why: str) -> None:
    """End the run, whose trainer has no place."""
    state = run.state
    state.error = state.error or (
        f"no host has room for the trainer, {why}; last: {state.trainer.unplaced}; last "
        f"checkpoint: step {state.checkpoints.newest}"
    )
