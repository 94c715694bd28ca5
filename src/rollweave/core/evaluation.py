"""Held-out evaluation: greedy episodes on tasks that training never sees, all on one weight version.

While an evaluation has begun, engines keep its version, and its episodes go first into the pools; training goes on beside it.
Periodic evaluations choose the best checkpoint and may end the run; the final one, on tasks of its own, is the result.
"""

from rollweave.core import groups, pace, trajectories, weights
from rollweave.core.run import Run
from rollweave.core.state import EngineStatus, Evaluation, Group, GroupStatus, Stage, TrainerStatus, Trajectory
from rollweave.schema.commands import MarkBest, RecordEvaluation
from rollweave.schema.work import Purpose, StopReason

FINAL_TASKS_FROM = 1_000_000
"""Index of the final evaluation's first task: the periodic ones, which choose the checkpoint, never see these."""


def is_due(run: Run, step: int) -> bool:
    """True if version `step` is to be evaluated, and has not been."""
    every = run.config.eval.every
    return bool(every) and run.config.eval.episodes > 0 and step % every == 0 and run.state.evaluated_version != step


def begin(run: Run, *, version: int, final: bool) -> None:
    """Plan an evaluation; `advance` starts it once engines serve. One that has not ended yet goes on instead."""
    if run.state.evaluation is not None:
        return
    episodes = run.config.eval.final_episodes if final else run.config.eval.episodes
    first = FINAL_TASKS_FROM if final else 0
    tasks = [(task.name, first + index) for index in range(episodes) for task in run.config.tasks]
    saved = run.state.checkpoint == version
    weights_id = run.state.published_id
    run.state.evaluation = Evaluation(version=version, final=final, weights_id=weights_id, to_draw=tasks[::-1], saved=saved)


def holds_weights(run: Run) -> bool:
    """True while engines must keep the version that is being evaluated.

    If no engine has it any more, nobody can finish the evaluation: it is given up, so that engines may load again.
    """
    evaluation = run.state.evaluation
    if evaluation is None or not evaluation.begun:
        return False
    if any(engine.version == evaluation.version for engine in run.state.engines.values()):
        return evaluation.version != run.state.published_version
    run.warn("evaluation", f"of version {evaluation.version} given up: no engine has it any more", count="evaluation_lost")
    abandon(run)
    return False


def forgo_lost(run: Run) -> None:
    """Each engine at its own pace: give up an evaluation of weights that no engine has, and none can load any more."""
    evaluation = run.state.evaluation
    if evaluation is None or weights.anywhere(run, evaluation.weights_id) or pace.somewhere(run, evaluation.weights_id):
        return
    run.warn("evaluation", f"of version {evaluation.version} given up: nobody has it any more", count="evaluation_lost")
    abandon(run)


def forgo(run: Run, published: int) -> None:
    """Give up an evaluation that has not begun and never will: engines take the published version, the trainer lost its own."""
    evaluation = run.state.evaluation
    if run.alone and evaluation is not None and weights.anywhere(run, evaluation.weights_id):
        return  # an engine takes them when it is free
    if evaluation is not None and not evaluation.begun and evaluation.version != published:
        run.warn("evaluation", f"of version {evaluation.version} given up: its weights are lost", count="evaluation_lost")
        abandon(run)


def advance(run: Run) -> None:
    """Begin when every engine that has weights has the same, or, each at its own pace, one has; then keep the pools filled."""
    state, evaluation = run.state, run.state.evaluation
    if evaluation is None:
        return
    if not evaluation.begun:
        serving = [engine for engine in state.engines.values() if engine.status is EngineStatus.SERVING]
        with_weights = [engine for engine in state.engines.values() if engine.version >= 0]
        met = [engine for engine in serving if engine.version == evaluation.version]
        if not met or (not run.alone and met != with_weights):
            return
        evaluation.begun = True
    while evaluation.to_draw and len(evaluation.pending) < run.config.rollout.max_running:
        name, index = evaluation.to_draw.pop()
        evaluation.pending[groups.draw(run, name, index, Purpose.EVAL).id] = None
    saving = state.trainer.status is TrainerStatus.SAVING and state.trainer.step == evaluation.version
    if not evaluation.pending and not evaluation.to_draw and not saving:  # the best must be a checkpoint that there is
        _conclude(run, evaluation)


def member_scored(run: Run, group: Group, trajectory: Trajectory) -> None:
    evaluation = run.state.evaluation
    run.state.counters.eval_scored += 1
    if evaluation is None or evaluation.pending.pop(group.id, 0) is not None:
        return
    assert trajectory.reward is not None, "a scored trajectory has a reward"
    evaluation.rewards.setdefault(group.name, []).append(trajectory.reward)
    success = trajectory.success if trajectory.success is not None else trajectory.reward > 0
    evaluation.successes[group.name] = evaluation.successes.get(group.name, 0) + success


def member_failed(run: Run, group: Group) -> None:
    """The episode could not be run. It is reported as failed, and is neither a success nor a miss of the agent."""
    evaluation = run.state.evaluation
    if evaluation is not None and evaluation.pending.pop(group.id, 0) is None:
        evaluation.failed[group.name] = evaluation.failed.get(group.name, 0) + 1


def _conclude(run: Run, evaluation: Evaluation) -> None:
    state = run.state
    state.evaluation = None
    state.evaluated_version = evaluation.version
    counts = {name: len(rewards) for name, rewards in evaluation.rewards.items()}
    success = {name: evaluation.successes.get(name, 0) / count for name, count in counts.items()}
    reward = {name: sum(rewards) / counts[name] for name, rewards in evaluation.rewards.items()}
    run.emit(
        RecordEvaluation(
            version=evaluation.version,
            final=evaluation.final,
            success=success,
            reward=reward,
            episodes=counts,
            failed=dict(evaluation.failed),
        )
    )
    if evaluation.final:
        state.final_evaluated = True
        return
    if not success:
        return
    score = sum(success.values()) / len(success)
    if score >= state.best_score and evaluation.saved:
        state.best_score, state.best_step = score, evaluation.version
        run.emit(MarkBest(step=evaluation.version))
    stop_at = run.config.eval.stop_at
    if stop_at is not None and len(success) == len(run.tasks) and min(success.values()) >= stop_at:
        state.target_reached = True


def abandon(run: Run) -> None:
    """Give up the evaluation under way and cancel its episodes."""
    state = run.state
    evaluation, state.evaluation = state.evaluation, None
    for group_id in evaluation.pending if evaluation is not None else ():
        group = state.groups[group_id]
        if group.status is GroupStatus.DRAWING:
            groups.forget(run, group)
            continue
        group.status = GroupStatus.DROPPED
        for member in [state.trajectories[member] for member in group.members]:
            if member.stage is not Stage.ENDED:
                trajectories.cancel(run, member, StopReason.CANCELLED)
