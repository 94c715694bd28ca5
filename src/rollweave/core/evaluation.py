"""Held-out evaluation: greedy episodes on tasks that training never sees, all on one
weight version.

While an evaluation has started, engines keep its version, and its episodes go first
into the pools; training continues beside it. Periodic evaluations choose the best
checkpoint and may end the run; the final one, on separate tasks, is the result.

An evaluation that is under way when the controller is lost is suspended: it continues
once its version is to be evaluated again, with the results that it has. If another
version is to be, it is abandoned.

A task domain is measured by its success rate if its environment defines success,
otherwise by its mean reward. Success is never derived from a reward: only the
environment knows what a reward of 0.3 means.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from rollweave.core import groups, trajectories
from rollweave.core.run import Run
from rollweave.core.state import (
    Best,
    EngineStatus,
    Evaluation,
    Group,
    GroupStatus,
    Stage,
    Trajectory,
)
from rollweave.schema.commands import MarkBest, RecordEvaluation
from rollweave.schema.config.training import FINAL_TASKS_FROM
from rollweave.schema.work import Purpose, StopReason

Rates = Mapping[str, float]
"""A number for each task domain."""


def measure(success: Rates, reward: Rates, defining: Collection[str]) -> float:
    """Return the mean over the task domains in `reward`: the success rate of domains in
    `defining` (0 if absent), the reward of other domains. Raises ValueError without a
    domain.
    """
    if not reward:
        raise ValueError("reward must have at least one task domain, got none")
    return sum(
        success.get(name, 0.0) if name in defining else value for name, value in reward.items()
    ) / len(reward)


def is_better(new: float, best: float | None) -> bool:
    """True if an evaluation of measure `new` replaces the best one so far.

    Of equal evaluations the newest is the best.
    """
    return best is None or new >= best


def reaches(success: Rates, tasks: Sequence[str], target: float) -> bool:
    """True if every task domain has a success rate, and none is below `target`."""
    return all(success.get(name, -1.0) >= target for name in tasks)


def is_due(run: Run, step: int) -> bool:
    """True if version `step` is to be evaluated, and has not been.

    The last version always is, so that it can be the best.
    """
    every = run.config.eval.every
    if not every or not run.config.eval.episodes or run.state.evaluations.newest_version == step:
        return False
    return step % every == 0 or step == run.config.run.steps


def begin(run: Run, *, version: int, final: bool) -> None:
    """Plan an evaluation, or continue the suspended one of these weights; `advance`
    starts it once engines serve its version.

    If another one has not ended yet, that one continues instead.
    """
    evaluations = run.state.evaluations
    if evaluations.current is not None:
        return
    episodes = run.config.eval.final_episodes if final else run.config.eval.episodes
    first = FINAL_TASKS_FROM if final else 0
    tasks = [(task.name, first + index) for index in range(episodes) for task in run.config.tasks]
    tasks.reverse()  # the next one is the last
    saved = run.state.checkpoints.newest == version
    publication_id = run.state.publication.id
    former = evaluations.suspended
    if former is not None:
        if (former.version, former.final, former.tasks) == (version, final, tasks):
            evaluations.current, evaluations.suspended = former, None
            former.publication_id, former.checkpointed = publication_id, saved
            return
        _give_up_suspended(run, f"{len(tasks)} episodes of version {version} are wanted instead")
    evaluations.current = Evaluation(
        version=version,
        final=final,
        publication_id=publication_id,
        to_draw=list(tasks),
        tasks=tasks,
        checkpointed=saved,
    )


def holds_weights(run: Run) -> bool:
    """True while engines must keep the version that is being evaluated.

    An evaluation whose version no engine serves any longer cannot be finished: it is
    abandoned, so that engines may load again.
    """
    evaluation = run.state.evaluations.current
    if evaluation is None or not evaluation.started:
        return False
    engines = [engine for engine in run.state.engines.values() if engine.samples]
    if any(engine.version == evaluation.version and not engine.released for engine in engines):
        return True
    run.warn(
        "evaluation",
        f"of version {evaluation.version} abandoned: no engine serves that version any longer",
        count="evaluation_lost",
    )
    abandon(run)
    return False


def abandon_if_superseded(run: Run, published: int) -> None:
    """Abandon an evaluation that has not started and never will: engines load the
    published version, and the trainer has lost the evaluated one.
    """
    evaluation = run.state.evaluations.current
    if evaluation is not None and run.pacing.can_still_evaluate(run, evaluation.publication_id):
        return  # an engine loads them when it is free
    if evaluation is not None and not evaluation.started and evaluation.version != published:
        run.warn(
            "evaluation",
            f"of version {evaluation.version} abandoned: its weights are lost",
            count="evaluation_lost",
        )
        abandon(run)


def advance(run: Run) -> None:
    """Start the evaluation when every engine that has weights serves its version (with
    independent updates: when one does); then keep the pools filled.
    """
    state, evaluation = run.state, run.state.evaluations.current
    if evaluation is None:
        return
    if not evaluation.started:
        sampling = [engine for engine in state.engines.values() if engine.samples]
        serving = [engine for engine in sampling if engine.status is EngineStatus.SERVING]
        loads = EngineStatus.LOADING  # the version that it is loading may be an earlier one
        with_weights = [
            engine for engine in sampling if engine.version >= 0 or engine.status is loads
        ]
        met = [engine for engine in serving if engine.version == evaluation.version]
        if not met or (met != with_weights and not run.pacing.evaluates_on_one_engine):
            return
        evaluation.started = True
    while evaluation.to_draw and len(evaluation.pending) < run.places.alive:
        name, index = evaluation.to_draw.pop()
        evaluation.pending[groups.draw(run, name, index, Purpose.EVAL).id] = None
    owed = state.trainer.save_pending and state.trainer.step == evaluation.version
    saving = owed or state.trainer.saving == evaluation.version
    # the best version must have a checkpoint
    if not evaluation.pending and not saving:
        _conclude(run, evaluation)


def wants_members(run: Run, group: Group) -> bool:
    """True while another attempt at the group's episode could still be of use."""
    return group.status is GroupStatus.ACTIVE


def member_scored(run: Run, group: Group, trajectory: Trajectory) -> None:
    """Record the episode's reward, unless its evaluation was abandoned."""
    evaluation = _take_pending(run, group)
    run.state.counters.eval_scored += 1
    if evaluation is not None:
        assert trajectory.reward is not None, "a scored trajectory has a reward"
        assert group.task is not None, "its episode was played"
        evaluation.rewards.setdefault(group.name, []).append(trajectory.reward)
        evaluation.scored.setdefault(group.name, {})[group.task.content] = None
        evaluation.successes[group.name] = evaluation.successes.get(group.name, 0) + bool(
            trajectory.success
        )
    groups.forget(run, group)


def member_ended(run: Run, group: Group, trajectory: Trajectory, reason: StopReason) -> None:
    """Count the episode as failed."""
    run.state.counters.eval_dropped += trajectory.started
    failure = run.state.last_failure
    abandon_episode(run, group, failure if failure.startswith(f"{reason}:") else reason)


def abandon_episode(run: Run, group: Group, failure: str) -> None:
    """Do without the episode: it is reported as failed, and counts neither as a success
    nor as a miss of the agent.
    """
    evaluation = _take_pending(run, group)
    if evaluation is not None:
        evaluation.failed[group.name] = evaluation.failed.get(group.name, 0) + 1
        evaluation.last_failure = failure
    groups.forget(run, group)


def _take_pending(run: Run, group: Group) -> Evaluation | None:
    """Return the evaluation for which the episode is rolled out, which then does not
    wait for it any longer; None if that was abandoned.
    """
    evaluations = run.state.evaluations
    for evaluation in (evaluations.current, evaluations.suspended):
        if evaluation is not None and evaluation.pending.pop(group.id, 0) is None:
            return evaluation
    return None


def _conclude(run: Run, evaluation: Evaluation) -> None:
    state = run.state
    state.evaluations.current = None
    state.evaluations.newest_version = evaluation.version
    counts = {name: len(rewards) for name, rewards in evaluation.rewards.items()}
    rates = {name: evaluation.successes.get(name, 0) / count for name, count in counts.items()}
    defining = state.evaluations.defines_success
    success = {name: rate for name, rate in rates.items() if name in defining}
    reward = {name: sum(rewards) / counts[name] for name, rewards in evaluation.rewards.items()}
    stop_at = run.config.eval.stop_at
    reached = (
        not evaluation.final and stop_at is not None and reaches(success, list(run.tasks), stop_at)
    )
    run.emit(
        RecordEvaluation(
            version=evaluation.version,
            final=evaluation.final,
            success=success,
            reward=reward,
            episodes=counts,
            distinct={name: len(tasks) for name, tasks in evaluation.scored.items()},
            failed=dict(evaluation.failed),
            last_failure=evaluation.last_failure,
            target_reached=reached,
        )
    )
    if evaluation.final:
        state.evaluations.final_done = True
        return
    if reached:
        state.evaluations.target_step = evaluation.version
    elif stop_at is not None:
        _warn_undefined_success(run, counts)
    if evaluation.checkpointed and len(reward) == len(run.tasks) and _is_best(run, rates, reward):
        state.evaluations.best = Best(step=evaluation.version, success=rates, reward=reward)
        run.emit(MarkBest(step=evaluation.version))


def _is_best(run: Run, success: dict[str, float], reward: dict[str, float]) -> bool:
    """True if this evaluation is the best so far. Both are compared by what is known
    now: an environment may report success for the first time in the newer one.
    """
    best, defining = run.state.evaluations.best, run.state.evaluations.defines_success
    former = measure(best.success, best.reward, defining) if best is not None else None
    return is_better(measure(success, reward, defining), former)


def _warn_undefined_success(run: Run, names: Iterable[str]) -> None:
    """Warn once that `eval.stop_at` waits for success, which no episode has reported so
    far.
    """
    silent = [name for name in names if name not in run.state.evaluations.defines_success]
    if silent and "no_success" not in run.state.counters.watchdog:
        text = (
            f"eval.stop_at needs a success rate, and no episode of {', '.join(silent)} has "
            "reported one so far: its environment must set `success` of the last Step, or of the "
            "Score; otherwise the run trains all of run.steps"
        )
        run.warn("evaluation", text, count="no_success")


def checkpoint_saved(run: Run, step: int) -> None:
    """Record that a checkpoint holds the weights of this step."""
    evaluation = run.state.evaluations.current
    if evaluation is not None and evaluation.version == step:
        evaluation.checkpointed = True


def checkpoints_lost(run: Run, newest: int) -> None:
    """Record that no checkpoint of a step after `newest` is left."""
    evaluations = run.state.evaluations
    if evaluations.best is not None and evaluations.best.step > newest:
        evaluations.best = None
    if evaluations.current is not None and evaluations.current.version > newest:
        evaluations.current.checkpointed = False


def reopen(run: Run) -> None:
    """Forget that evaluations have ended training, or were over."""
    run.state.evaluations.target_step, run.state.evaluations.final_done = None, False


def suspend(run: Run) -> None:
    """Suspend the current evaluation: the engines' weights were lost with the
    controller.
    """
    evaluations = run.state.evaluations
    if evaluations.current is not None:
        evaluations.suspended, evaluations.current = evaluations.current, None
        evaluations.suspended.started = False


def drop_if_not_resumed(run: Run, published: int) -> None:
    """Abandon a suspended evaluation whose turn will not come: the restored trainer has
    published another version, or trains on, if it is the final one.
    """
    suspended = run.state.evaluations.suspended
    if suspended is None:
        return
    trains_on = run.state.trainer.step < run.config.run.steps
    if trains_on if suspended.final else suspended.version != published:
        _give_up_suspended(run, f"the trainer continues from step {run.state.trainer.step}")


def _give_up_suspended(run: Run, why: str) -> None:
    suspended = run.state.evaluations.suspended
    assert suspended is not None, "the caller has seen one"
    run.warn(
        "evaluation", f"of version {suspended.version} abandoned: {why}", count="evaluation_lost"
    )
    _drop_suspended(run)


def _drop_suspended(run: Run) -> None:
    evaluations = run.state.evaluations
    evaluation, evaluations.suspended = evaluations.suspended, None
    if evaluation is not None:
        _cancel_episodes(run, evaluation)


def abandon(run: Run, *, spare_final: bool = False) -> None:
    """Abandon the evaluation under way, or the suspended one, and cancel its episodes.
    With `spare_final`, a suspended final one may still continue.
    """
    evaluations = run.state.evaluations
    evaluation, evaluations.current = evaluations.current, None
    if evaluation is not None:
        _cancel_episodes(run, evaluation)
    if evaluations.suspended is not None and not (spare_final and evaluations.suspended.final):
        _drop_suspended(run)


def _cancel_episodes(run: Run, evaluation: Evaluation) -> None:
    state = run.state
    for group_id in evaluation.pending:
        group = state.groups[group_id]
        if group.status is GroupStatus.DRAWING:
            groups.forget(run, group)
            continue
        groups.enter(run, group, GroupStatus.DROPPED)
        for member in [state.trajectories[member] for member in group.members]:
            if member.stage is not Stage.ENDED:
                trajectories.cancel(run, member, StopReason.CANCELLED)
