"""Heddle's experiments: the same batch for all workers, measurements of a run's events,
and rows with figures.
"""

import pytest

from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId, GroupId, TaskId, TrajectoryId
from rollweave.schema.work import Purpose, Task
from rollweave_papers import heddle
from rollweave_papers.heddle_runs import (
    GPUS,
    MEMBERS,
    MODELS,
    OURS,
    TASKS,
    VERL,
    Case,
    Watch,
    measure,
    rollout,
)
from rollweave_papers.results import Experiment

SMALL = Case(task="math", model="qwen3-14b", system=VERL, parts=32, steps=2)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("parts", [1, 8])
def test_a_part_of_the_cluster_has_its_part_of_the_batch(task: str, model: str, parts: int) -> None:
    setup = Case(task=task, model=model, system=VERL, parts=parts, steps=2, tp=MODELS[model]).setup
    workers = setup.rollout_gpus // setup.tp
    assert setup.rollout_gpus == GPUS // parts
    assert workers * 100 - MEMBERS < setup.batch <= workers * 100
    assert setup.batch % MEMBERS == 0


def test_the_batch_does_not_depend_on_the_size_of_workers() -> None:
    case = SMALL.but(parts=8)
    narrow, wide, free = (one.setup for one in (case, case.but(tp=8), case.but(adaptive=True)))
    assert (
        (narrow.batch, narrow.rollout_gpus)
        == (wide.batch, wide.rollout_gpus)
        == (free.batch, free.rollout_gpus)
    )
    assert narrow.slots * narrow.rollout_gpus == wide.slots  # a slot for every trajectory
    assert free.slots >= free.batch


def test_slots_are_as_requested() -> None:
    assert SMALL.but(slots=32).setup.config(steps=1).engines[0].max_slots == 32


def test_throughput_counts_sampled_tokens_of_the_entire_cluster() -> None:
    measured = rollout(SMALL)
    mean = (
        measured.tokens_per_s
        * measured.seconds
        / GPUS
        * SMALL.setup.rollout_gpus
        / SMALL.setup.batch
    )
    assert 500 < mean < 40_960  # tokens of a response


@pytest.mark.extended
def test_a_rollout_does_not_depend_on_the_idle_time_before_it() -> None:
    """New weights do not reach all engines at once, and earlier requests would go to
    the first one.
    """
    delayed = measure(SMALL.setup, steps=SMALL.steps, ready_s=200.0)
    assert rollout(SMALL).seconds == pytest.approx(delayed.seconds, rel=0.01)


@pytest.mark.extended
def test_the_core_decides_the_workers_within_the_same_gpus() -> None:
    measured = rollout(SMALL.but(system=OURS, adaptive=True))
    workers = [tuple(map(int, group.split("×"))) for group in measured.fleet.split(", ")]
    assert sum(count * degree for count, degree in workers) == SMALL.setup.rollout_gpus


# Measurements of events.


def turn_requested(member: str, turn: int) -> e.TurnRequested:
    return e.TurnRequested(
        trajectory_id=TrajectoryId(member), attempt=0, turn=turn, context_tokens=1
    )


def start_turn(member: str, turn: int) -> c.StartTurn:
    return c.StartTurn(
        trajectory_id=TrajectoryId(member),
        attempt=0,
        turn=turn,
        engine_id=EngineId("e0"),
        rank=0.0,
        dispatch=0,
    )


def done(member: str, turn: int, *, tokens: int, queue_s: float) -> e.TurnDone:
    return e.TurnDone(
        trajectory_id=TrajectoryId(member),
        attempt=0,
        turn=turn,
        dispatch=0,
        output_tokens=tokens,
        cached_tokens=0,
        version=0,
        queue_s=queue_s,
    )


def start_init(member: str) -> c.StartInit:
    return c.StartInit(
        trajectory_id=TrajectoryId(member),
        attempt=0,
        group_id=GroupId("g0"),
        member=0,
        task=Task(id=TaskId("t0"), env="math", seed=0),
        purpose=Purpose.TRAIN,
        initiated_version=0,
    )


def test_queueing_of_the_longest_sums_core_and_engines_over_all_turns() -> None:
    watch, timer = Watch(), e.TimerFired()
    watch.append(1.0, timer, [start_init("long"), start_init("short")])
    watch.append(2.0, turn_requested("long", 0), [start_turn("long", 0)])
    watch.append(2.0, turn_requested("short", 0), [])
    watch.append(9.0, done("long", 0, tokens=10, queue_s=0.5), [start_turn("short", 0)])
    watch.append(10.0, turn_requested("long", 1), [])
    watch.append(13.0, done("short", 0, tokens=15, queue_s=2.0), [start_turn("long", 1)])
    watch.append(
        20.0,
        done("long", 1, tokens=10, queue_s=0.25),
        [c.TrainStep(step=0, part=0, parts=1, groups=())],
    )
    watch.append(30.0, timer, [start_init("next")])
    assert watch.began == [1.0, 30.0]
    assert watch.tokens[0] == {"long": 20, "short": 15}
    assert watch.longest_queued_s(0) == pytest.approx(0.5 + 3.0 + 0.25)


def test_the_fleet_is_that_of_the_remaining_engines() -> None:
    watch = Watch()
    slots = tuple(e.EngineSlot(id=EngineId(f"e{number}"), degree=1) for number in range(2))
    watch.append(
        0.0, e.RunStarted(engines=slots), [c.StartEngine(engine_id=EngineId("e2"), degree=4)]
    )
    watch.append(1.0, e.TimerFired(), [c.RemoveEngine(engine_id=EngineId("e0"), reason="the plan")])
    assert watch.engines == {"e1": 1, "e2": 4}


# Rows.


@pytest.mark.slow
@pytest.mark.parametrize(
    "experiment",
    [one for one in heddle.EXPERIMENTS if one.name != "heddle-fig13"],  # test_heddle_prediction.py
    ids=lambda experiment: experiment.name,
)
def test_every_row_has_a_figure(experiment: Experiment) -> None:
    rows = experiment.rows(True)
    assert all(row.experiment == experiment.name for row in rows)
    assert all(row.ours is not None and row.ours >= 0 for row in rows)
    assert len({row.row for row in rows}) == len(rows)


@pytest.mark.slow
def test_only_the_maximum_gain_is_a_published_number() -> None:
    """Fig. 7 is a drawing, from which rows have a sign alone."""
    published = [
        row.published
        for one in heddle.EXPERIMENTS
        for row in one.rows(True)
        if isinstance(row.published, float)
    ]
    assert published == [2.5]
