"""Every second of an engine and of the trainer has one cause."""

import pytest

from rollweave.core import idle
from rollweave.core.run import Run
from rollweave.core.state import EngineStatus, Phase, TrainerStatus
from rollweave.schema.base import TrajectoryId
from tests.support.states import E0, E1, members, running


def laid_out(*statuses: EngineStatus) -> Run:
    """A run at second 10, last charged at second 4, whose engines have these
    statuses.
    """
    run = running(5)
    for engine, status in zip(run.state.engines.values(), statuses, strict=True):
        engine.status = status
    run.fleet_changed()
    run.state.idle.clock, run.now = 4.0, 10.0
    run.state.idle.engines, run.state.idle.trainer = {}, {}
    return run


SERVING = (EngineStatus.SERVING, EngineStatus.SERVING)


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        *((EngineStatus.STARTING, "starting"), (EngineStatus.STALE, "weights")),
        *((EngineStatus.SUSPENDING, "weights"), (EngineStatus.LOADING, "weights")),
    ],
)
def test_an_engine_that_does_not_serve(status: EngineStatus, cause: str) -> None:
    run = laid_out(status, status)
    idle.charge(run)
    assert run.state.idle.engines == {cause: 12.0}, "two engines for six seconds"
    assert run.state.idle.clock == 10.0


def test_engines_with_turns_are_busy_and_so_are_those_that_drain() -> None:
    run = laid_out(*SERVING)
    (only,) = members(run)
    assert only.turn is not None
    run.fleet.occupy(run.state.engines[E0], only.id, only.turn)
    idle.charge(run)
    assert run.state.idle.engines == {"busy": 6.0, "window": 6.0}
    run.state.engines[E1].draining = True
    run.fleet_changed()
    run.now = 11.0
    idle.charge(run)
    assert run.state.idle.engines == {"busy": 8.0, "window": 6.0}


@pytest.mark.parametrize(
    ("pools", "queued", "cause"),
    [
        *((["init"], 0, "environment"), (["init", "eval"], 0, "environment")),
        *((["run"], 0, "environment"), (["run"], 1, "stragglers")),
        *((["run", "eval"], 1, "stragglers"), (["eval"], 0, "reward")),
        *((["eval_queued"], 0, "reward"), ([], 0, "window")),
    ],
)
def test_why_an_engine_waits(pools: list[str], queued: int, cause: str) -> None:
    """A running trajectory without a turn waits for its environment."""
    run = laid_out(*SERVING)
    for pool in pools:
        setattr(run.state.pools, pool, {TrajectoryId("x"): None})
    run.state.turns.queue = {TrajectoryId("x"): 0} if queued else {}
    idle.charge(run)
    assert run.state.idle.engines == {cause: 12.0}


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        *((TrainerStatus.STARTING, "starting"), (TrainerStatus.MEASURING, "measuring")),
        *((TrainerStatus.TRAINING, "busy"), (TrainerStatus.PUBLISHING, "publishing")),
        *((TrainerStatus.SAVING, "saving"), (TrainerStatus.IDLE, "batch")),
    ],
)
def test_what_the_trainer_does(status: TrainerStatus, cause: str) -> None:
    run = laid_out(*SERVING)
    run.state.trainer.status = status
    idle.charge(run)
    run.now = 11.0
    idle.charge(run)
    assert run.state.idle.trainer == {cause: 7.0}


def test_after_training_the_trainer_waits_for_the_evaluation() -> None:
    run = laid_out(*SERVING)
    run.state.trainer.status, run.state.phase = TrainerStatus.IDLE, Phase.EVALUATING
    idle.charge(run)
    assert run.state.idle.trainer == {"evaluation": 6.0}


def test_nothing_is_charged_before_the_first_event_after_the_end_or_backwards() -> None:
    run = laid_out(*SERVING)
    run.state.idle.clock = None
    idle.charge(run)
    assert run.state.idle.clock == 10.0
    run.now = 9.0
    idle.charge(run)
    assert run.state.idle.clock == 10.0
    run.now, run.state.phase = 12.0, Phase.FINISHED
    idle.charge(run)
    assert run.state.idle.clock == 12.0
    assert run.state.idle.engines == run.state.idle.trainer == {}
