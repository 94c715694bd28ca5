"""Evaluations: the last weights are evaluated, the best version is chosen among all,
and a reached target is recorded as the end of the run.
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.core import evaluation, training
from rollweave.core.evaluation import is_better, measure, reaches
from rollweave.core.mechanisms.versions import binding
from rollweave.core.run import Run
from rollweave.core.state import Best, EngineStatus, GroupStatus, Trajectory
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import TaskId, TrajectoryId
from rollweave.schema.config.training import FINAL_TASKS_FROM
from rollweave.schema.work import StopReason, Task
from tests.support.core import MODES, config
from tests.support.kinds import of
from tests.support.properties import examples
from tests.support.random_world import World
from tests.support.states import E0, E1, running


class Judge(World):
    """A world in which environment `a` defines success, and `b` gives rewards of any
    sign without success.
    """

    def score(self, trajectory_id: str) -> tuple[float, bool | None]:
        name = self.core.state.groups[self.core.state.trajectories[trajectory_id].group_id].name
        if name == "b":
            return self.random.choice([-3.0, -0.5, 0.25]), None
        return 7.0, self.random.random() < 0.5  # a reward that would outweigh everything


@settings(max_examples=examples(40))
@given(
    seed=st.integers(0, 2**16),
    mode=st.sampled_from(MODES),
    every=st.integers(1, 9),
    steps=st.integers(1, 6),
)
def test_the_best_is_the_newest_of_the_best_and_the_last_weights_are_evaluated(
    seed: int, mode: str, every: int, steps: int
) -> None:
    """The reference sorts all evaluations by what each domain defines."""
    world = Judge(config(mode, steps=steps, eval={"every": every, "episodes": 3}), seed=seed)
    assert world.run().error == ""
    periodic = [evaluation for evaluation in world.evaluations if not evaluation.final]
    versions = [evaluation.version for evaluation in periodic]
    assert versions == sorted(set(versions))
    # one is left out while another is under way
    assert {*versions} <= {*range(0, steps, every), steps}
    assert versions[-1] == steps
    assert all(
        set(evaluation.success) == {"a"} and set(evaluation.reward) == {"a", "b"}
        for evaluation in world.evaluations
    )
    best = max(
        periodic,
        key=lambda evaluation: (
            evaluation.success["a"] + evaluation.reward["b"],
            evaluation.version,
        ),
    )
    assert world.core.state.evaluations.best_step == best.version
    marked = [command.step for command in world.sent(c.MarkBest)]
    assert marked[-1] == best.version
    assert world.evaluations[-1].final
    assert world.evaluations[-1].version == best.version


def test_without_periodic_evaluations_the_last_weights_are_the_result_and_there_is_no_best() -> (
    None
):
    world = World(config(steps=3), seed=2)
    world.run()
    assert [(evaluation.version, evaluation.final) for evaluation in world.evaluations] == [
        (3, True)
    ]
    assert world.core.state.evaluations.best_step is None
    assert not world.sent(c.MarkBest)


def test_a_version_not_evaluated_in_every_domain_is_not_the_best() -> None:
    world = World(config(steps=2, eval={"every": 1, "episodes": 2}), seed=4)
    start, score = world.start, world.score

    def poor(trajectory_id: str) -> tuple[float, bool | None]:
        name = world.core.state.groups[world.core.state.trajectories[trajectory_id].group_id].name
        return (0.0, False) if name == "b" else score(trajectory_id)

    world.score = poor  # type: ignore[method-assign]
    start()
    lost: set[str] = set()
    while world.finish is None:  # at step 2 every attempt at b fails: what is left would look best
        state = world.core.state
        evaluation = state.evaluations.current
        if evaluation is not None and evaluation.version == 2 and not evaluation.final:
            for group_id in list(evaluation.pending):
                group = state.groups[group_id]
                running = [name for name in group.members if name in state.pools.run]
                if group.name == "b" and running:
                    lost.add(group_id)
                    trajectory = state.trajectories[running[0]]
                    world.feed(
                        e.TrajectoryEnded(
                            trajectory_id=trajectory.id,
                            attempt=trajectory.attempt,
                            stop_reason="time_budget",
                            error="late",
                        )
                    )
        world.step()
    assert len(lost) == 2
    assert world.core.state.evaluations.best_step in (0, 1)


@pytest.mark.parametrize("reached", [True, False])
def test_the_record_names_the_evaluation_that_reached_the_target(reached: bool) -> None:
    world = World(config(steps=30, eval={"every": 2, "stop_at": 0.5}), seed=23)
    world.score = lambda trajectory_id: (1.0, reached)  # type: ignore[method-assign]
    world.run()
    reaching = [evaluation.version for evaluation in world.evaluations if evaluation.target_reached]
    assert reaching == ([0] if reached else [])
    assert world.core.state.evaluations.target_step == (0 if reached else None)
    assert (world.core.state.trainer.step < 30) is reached


def test_a_target_without_a_success_rate_is_reported_once_and_never_reached() -> None:
    world = World(config(steps=4, eval={"every": 1, "stop_at": 0.0}), seed=23)
    world.score = lambda trajectory_id: (1.0, None)  # type: ignore[method-assign]
    world.run()
    assert world.core.state.trainer.step == 4
    assert all(evaluation.success == {} for evaluation in world.evaluations)
    [message] = [warning.message for warning in world.warnings if "stop_at" in warning.message]
    assert (
        "no episode of a, b has reported one so far" in message
        or "no episode of b, a has reported one so far" in message
    )


# By hand.


def evaluating(**sections: Any) -> Run:
    """A run whose two engines serve version 4, without trajectories."""
    run = running(**sections)
    for engine in run.state.engines.values():
        engine.status, engine.version, engine.publication_id = EngineStatus.SERVING, 4, 7
    run.state.publication.id = 7
    run.state.groups.clear()
    run.fleet_changed()
    run.out = []
    return run


def drawn(run: Run) -> list[tuple[str, int]]:
    return [(one.name, one.index) for one in of(run.out, c.DrawTask)]


@pytest.mark.parametrize(
    ("step", "every", "newest", "due"),
    [
        (2, 2, -1, True),
        (3, 2, -1, False),
        (4, 3, -1, True),  # the last one
        (4, 3, 4, False),
        (2, 0, -1, False),
        (4, 0, -1, False),
    ],
)
def test_when_a_version_is_to_be_evaluated(step: int, every: int, newest: int, due: bool) -> None:
    run = evaluating(eval={"every": every})
    assert run.config.run.steps == 4
    run.state.evaluations.newest_version = newest
    assert evaluation.is_due(run, step) is due


def test_an_evaluation_draws_held_out_tasks_of_every_domain() -> None:
    run = evaluating(eval={"every": 2})
    run.state.checkpoints.newest = 4
    evaluation.begin(run, version=4, final=False)
    planned = run.state.evaluations.current
    assert (planned.version, planned.publication_id, planned.checkpointed) == (4, 7, True)
    evaluation.begin(run, version=5, final=True)
    assert run.state.evaluations.current is planned, "the one under way continues"
    evaluation.advance(run)
    assert drawn(run) == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert planned.started
    evaluation.advance(run)
    assert len(drawn(run)) == 4


def test_a_final_evaluation_draws_tasks_that_no_periodic_one_has_seen() -> None:
    run = evaluating()
    evaluation.begin(run, version=4, final=True)
    evaluation.advance(run)
    first = FINAL_TASKS_FROM
    assert drawn(run) == [(name, first + n) for n in range(3) for name in ("a", "b")]
    assert not run.state.evaluations.current.checkpointed


def test_no_more_episodes_are_drawn_than_may_run() -> None:
    run = evaluating(rollout={"max_running": 4})
    evaluation.begin(run, version=4, final=True)
    evaluation.advance(run)
    assert len(drawn(run)) == 4


@pytest.mark.parametrize(
    ("change", "starts"),
    [
        ({}, True),
        ({"version": 3}, False),
        ({"status": EngineStatus.LOADING}, False),
        ({"status": EngineStatus.LOADING, "version": -1}, False),
        ({"status": EngineStatus.STARTING, "version": -1}, True),
        ({"status": EngineStatus.STALE}, False),
    ],
)
def test_an_evaluation_waits_for_every_engine_with_weights(
    change: dict[str, Any], starts: bool
) -> None:
    run = evaluating()
    for name, value in change.items():
        setattr(run.state.engines[E1], name, value)
    evaluation.begin(run, version=4, final=False)
    evaluation.advance(run)
    assert bool(drawn(run)) is starts


def test_an_evaluation_whose_version_is_gone_is_abandoned() -> None:
    run = evaluating()
    assert not evaluation.holds_weights(run)
    evaluation.begin(run, version=4, final=False)
    assert not evaluation.holds_weights(run), "it has not started"
    evaluation.advance(run)
    assert evaluation.holds_weights(run)
    run.state.engines[E0].version = 5
    assert evaluation.holds_weights(run), "one engine has it"
    run.state.engines[E1].version = 5
    assert not evaluation.holds_weights(run)
    assert run.state.evaluations.current is None
    assert run.state.counters.watchdog == {"evaluation_lost": 1}


@pytest.mark.parametrize(
    ("retained", "loaded", "abandoned"),
    [(True, False, False), (False, True, False), (False, False, True)],
)
def test_with_one_version_for_a_trajectory_an_evaluation_waits_for_weights_that_exist(
    retained: bool, loaded: bool, abandoned: bool
) -> None:
    run = evaluating(mode="decoupled")
    evaluation.begin(run, version=4, final=False)
    run.state.publication.version, run.state.publication.id = 5, 8
    run.state.publication.retained = {7: 4, 8: 5} if retained else {8: 5}
    for engine in run.state.engines.values():
        engine.version, engine.publication_id = 5, 8
    if loaded:
        run.state.engines[E1].publication_id = 7
    if retained:
        evaluation.abandon_if_superseded(run, 5)
    binding.abandon_if_lost(run)
    assert (run.state.evaluations.current is None) is abandoned


def test_episodes_of_an_abandoned_evaluation_are_forgotten() -> None:
    run = evaluating()
    evaluation.begin(run, version=4, final=False)
    evaluation.advance(run)
    group = next(iter(run.state.groups.values()))
    others = [one for one in run.state.groups.values() if one is not group]
    others[0].status = GroupStatus.ACTIVE
    evaluation.abandon(run)
    assert others[0].status is GroupStatus.DROPPED
    run.state.groups[group.id] = group
    late = Trajectory(id=TrajectoryId(f"{group.id}.0"), group_id=group.id, member=0, reward=1.0)
    evaluation.member_scored(run, group, late)
    assert group.id not in run.state.groups
    assert run.state.evaluations.current is None


@pytest.mark.parametrize(
    ("final", "step", "published", "continues"),
    [
        (False, 4, 4, True),
        (False, 3, 3, False),
        (True, 4, 4, True),
        (True, 4, 2, True),  # the best checkpoint is published later
        (True, 3, 3, False),
    ],
)
def test_a_suspended_evaluation_continues_if_its_version_comes_again(
    final: bool, step: int, published: int, continues: bool
) -> None:
    run = evaluating(run={"steps": 4})
    evaluation.begin(run, version=4, final=final)
    evaluation.advance(run)
    before = run.state.evaluations.current
    before.rewards["a"] = [1.0]
    evaluation.suspend(run)
    assert not before.started
    run.state.trainer.step = step
    evaluation.drop_if_not_resumed(run, published)
    assert (run.state.evaluations.suspended is before) is continues
    assert run.state.counters.watchdog.get("evaluation_lost", 0) == (not continues)
    assert all(group_id in run.state.groups for group_id in before.pending) is continues


@pytest.mark.parametrize(("version", "final", "same"), [(4, False, True), (5, False, False)])
def test_an_evaluation_continues_the_suspended_one_of_its_weights(
    version: int, final: bool, same: bool
) -> None:
    run = evaluating(eval={"every": 1, "episodes": 3})
    evaluation.begin(run, version=4, final=False)
    evaluation.advance(run)
    before = run.state.evaluations.current
    assert before is not None
    evaluation.suspend(run)
    run.state.publication.id, run.out = 9, []
    evaluation.begin(run, version=version, final=final)
    current = run.state.evaluations.current
    assert (current is before, current.publication_id) == (same, 9)
    assert run.state.evaluations.suspended is None
    for engine in run.state.engines.values():
        engine.version = version
    evaluation.advance(run)
    assert len(drawn(run)) == (0 if same else 6), "episodes are drawn once"
    assert len(run.state.groups) == 6


@pytest.mark.parametrize("change", ["fewer", "others"])
def test_a_suspended_evaluation_of_other_episodes_starts_over(change: str) -> None:
    """The run was resumed with another `eval.episodes`, or with as many episodes of
    other tasks.
    """
    run = evaluating(eval={"every": 1, "episodes": 3})
    evaluation.begin(run, version=4, final=False)
    before = run.state.evaluations.current
    assert before is not None
    if change == "fewer":
        before.tasks.pop()
    else:
        before.tasks[0] = ("former", before.tasks[0][1])
    evaluation.suspend(run)
    evaluation.begin(run, version=4, final=False)
    current = run.state.evaluations.current
    assert (current is before, len(current.tasks)) == (False, 6)
    assert current.to_draw == current.tasks


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("spare_final", [True, False])
def test_only_a_final_evaluation_may_outlast_the_end_of_training(
    final: bool, spare_final: bool
) -> None:
    run = evaluating()
    evaluation.begin(run, version=4, final=final)
    evaluation.suspend(run)
    evaluation.abandon(run, spare_final=spare_final)
    assert (run.state.evaluations.suspended is not None) is (final and spare_final)


def test_lost_checkpoints_take_the_best_with_them() -> None:
    run = evaluating()
    evaluation.begin(run, version=4, final=False)
    current, evaluations = run.state.evaluations.current, run.state.evaluations
    assert current is not None
    evaluation.checkpoint_saved(run, 3)
    assert not current.checkpointed
    evaluation.checkpoint_saved(run, 4)
    assert current.checkpointed
    evaluations.best = Best(step=4, success={}, reward={"a": 1.0})
    evaluation.checkpoints_lost(run, 4)
    assert current.checkpointed
    assert evaluations.best_step == 4
    evaluation.checkpoints_lost(run, 3)
    assert not current.checkpointed
    assert evaluations.best_step is None


@pytest.mark.parametrize("saving", ["owed", "being written"])
def test_an_evaluation_ends_when_its_checkpoint_is_written(saving: str) -> None:
    run = evaluating()
    trainer = run.state.trainer
    trainer.step = 4
    evaluation.begin(run, version=4, final=False)
    current = run.state.evaluations.current
    current.to_draw.clear()
    trainer.save_pending, trainer.saving = saving == "owed", 4 if saving != "owed" else None
    evaluation.advance(run)
    assert run.state.evaluations.current is current
    trainer.save_pending, trainer.saving = False, 3
    evaluation.advance(run)
    assert run.state.evaluations.current is None
    assert run.state.evaluations.newest_version == 4


def test_episodes_are_counted_by_their_domain() -> None:
    run = evaluating(rollout={"max_running": 64})
    evaluation.begin(run, version=4, final=True)
    evaluation.advance(run)
    run.state.evaluations.defines_success["a"] = None
    groups = list(run.state.groups.values())
    assert [group.name for group in groups] == ["a", "b"] * 3
    outcomes = [(1.0, True), (0.25, None), (0.5, False), (0.75, None)]
    for group, (reward, success) in zip(groups, outcomes, strict=False):
        seed = 3 if group.name == "a" else group.index
        group.task = Task(id=TaskId(group.id), env="nim", seed=seed)
        scored = Trajectory(
            id=TrajectoryId(f"{group.id}.0"),
            group_id=group.id,
            member=0,
            reward=reward,
            success=success,
            started=True,
        )
        evaluation.member_scored(run, group, scored)
    evaluation.abandon_episode(run, groups[5], "its task was not drawn")
    assert run.state.evaluations.current.last_failure == "its task was not drawn"
    run.state.last_failure = "env_error: no map"
    evaluation.member_ended(run, groups[4], scored, StopReason.ENV_ERROR)
    assert run.state.groups == {}
    counters = run.state.counters
    assert (counters.eval_scored, counters.eval_dropped) == (4, 1)
    evaluation.advance(run)
    (record,) = of(run.out, c.RecordEvaluation)
    assert record.episodes == {"a": 2, "b": 2}
    assert record.distinct == {"a": 1, "b": 2}
    assert record.success == {"a": 0.5}
    assert record.reward == {"a": 0.75, "b": 0.5}
    assert record.failed == {"a": 1, "b": 1}
    assert record.last_failure == "env_error: no map"
    assert (record.final, record.version) == (True, 4)
    assert run.state.evaluations.final_done
    evaluation.reopen(run)
    assert not run.state.evaluations.final_done


def test_a_trainer_that_comes_back_earlier_has_lost_later_checkpoints() -> None:
    for step, kept in ((4, 4), (3, None)):
        run = evaluating()
        run.state.evaluations.best = Best(step=4, success={}, reward={"a": 1.0})
        run.state.checkpoints.newest = 4
        training.on_ready(run, e.TrainerReady(epoch=run.state.trainer.epoch, step=step))
        assert run.state.evaluations.best_step == kept


def test_without_episodes_no_evaluation_is_due() -> None:
    run = running(5, eval={"every": 1, "episodes": 2})
    assert evaluation.is_due(run, 1)
    assert not evaluation.is_due(running(5, eval={"every": 1, "episodes": 0}), 1)


SHARES = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])
EVALUATION = st.fixed_dictionaries({"a": SHARES, "b": SHARES})


@given(
    evaluations=st.lists(st.tuples(EVALUATION, EVALUATION), min_size=1, max_size=9),
    defining=st.sets(st.sampled_from("ab")),
)
def test_the_best_is_the_newest_of_the_greatest(
    evaluations: list[tuple[dict[str, float], dict[str, float]]], defining: set[str]
) -> None:
    best: float | None = None
    chosen = -1
    for number, (success, reward) in enumerate(evaluations):
        measured = measure(success, reward, defining)
        if is_better(measured, best):
            best, chosen = measured, number
    figures = [
        sum((success if name in defining else reward)[name] for name in "ab")
        for success, reward in evaluations
    ]
    assert chosen == max(range(len(figures)), key=lambda number: (figures[number], number))


def test_a_domain_that_never_reports_success_has_not_succeeded() -> None:
    assert measure({}, {"a": 5.0}, {"a"}) == 0.0
    assert measure({}, {"a": -5.0}, ()) == -5.0
    with pytest.raises(ValueError, match="at least one task domain"):
        measure({}, {}, ())


def test_a_target_needs_the_success_of_every_domain() -> None:
    assert reaches({"a": 0.5, "b": 0.6}, ["a", "b"], 0.5)
    assert not reaches({"a": 0.4, "b": 1.0}, ["a", "b"], 0.5)
    assert not reaches({"a": 1.0}, ["a", "b"], 0.0)
