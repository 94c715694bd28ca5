"""Evaluations: the last weights are evaluated, the best version is chosen among all,
and a reached target is recorded as the end of the run.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.schema import commands as c
from rollweave.schema import events as e
from tests.core.world import World
from tests.support.core import MODES, config
from tests.support.properties import examples


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
    assert not any(
        isinstance(command, c.MarkBest) for commands in world.commands for command in commands
    )


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
