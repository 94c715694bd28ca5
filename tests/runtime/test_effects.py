"""The tables of commands: each command has one handler, which gets the command."""

import typing
from collections.abc import Callable
from typing import Any

import pytest

from rollweave.runtime.effects import (
    TRAINING_ONLY,
    Effects,
    Handlers,
    rollout_handlers,
    training_handlers,
)
from rollweave.schema import commands as c
from rollweave.schema.base import EngineId, TrajectoryId

ID, A, B = TrajectoryId("t"), EngineId("a"), EngineId("b")
MIGRATE = c.Migrate(number=3, trajectory_id=ID, attempt=1, source=A, target=B)

BY_THE_WORLD: set[Any] = {c.Deliver, c.Finish, c.MarkBest, c.RecordEvaluation, c.Warn}
"""Commands that each world handles by itself, if it gets them."""


class Recorder:
    """Stands for any part, and records the first argument of each call."""

    def __init__(self, calls: list[object]) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self._calls.append(next(iter(arguments), None))


def tables(part: Any, pipeline: Any = None) -> tuple[Handlers, Handlers]:
    pipeline = pipeline or part
    return (
        rollout_handlers(pipeline=pipeline, engines=part, workers=part, predictor=part, timer=part),
        training_handlers(trainer=part, relays=part, comparisons=part, draw=part.draw),
    )


def test_every_command_has_one_handler() -> None:
    rollouts, training = tables(Recorder([]))
    assert not rollouts.keys() & training.keys()
    assert not (rollouts.keys() | training.keys()) & BY_THE_WORLD
    assert rollouts.keys() | training.keys() | BY_THE_WORLD == set(typing.get_args(c.Command))


def test_a_service_gets_no_command_about_training() -> None:
    _, training = tables(Recorder([]))
    assert set(TRAINING_ONLY) == training.keys() | {c.MarkBest, c.RecordEvaluation}


def test_a_world_without_a_handler_for_a_command_is_refused() -> None:
    rollouts, training = tables(Recorder([]))
    with pytest.raises(AssertionError, match="without a handler: Deliver, "):
        Effects({**rollouts, **training})


WITH_CONTEXT = (c.Migrate, c.Predict)
"""Commands that the pipeline completes."""


@pytest.mark.parametrize(
    "kind",
    [kind for table in tables(Recorder([])) for kind in table if kind not in WITH_CONTEXT],
)
def test_a_command_is_one_call_of_one_part(kind: type[Any]) -> None:
    calls: list[object] = []
    rollouts, training = tables(Recorder(calls))
    command = kind(**dict.fromkeys(kind.__struct_fields__))
    Effects({**rollouts, **training}, never=BY_THE_WORLD).execute(command)
    assert calls == [command]


@pytest.mark.parametrize("context", [(5, 6, 7), None])
def test_kv_migrates_with_the_context_of_the_pipeline(
    context: tuple[int, ...] | None,
) -> None:
    calls: list[tuple[Any, ...]] = []

    def context_of(*key: Any) -> tuple[int, ...] | None:
        calls.append(key)
        return context

    engines, pipeline = Recorder([]), Recorder([])
    engines.migrate = lambda *arguments: calls.append(arguments)  # type: ignore[attr-defined]
    pipeline.context_of = context_of  # type: ignore[attr-defined]
    rollouts, _ = tables(engines, pipeline)
    rollouts[c.Migrate](MIGRATE)
    assert calls == [(ID, 1), (MIGRATE, context)]


def test_a_prediction_is_requested_with_the_context_of_the_pipeline() -> None:
    calls: list[tuple[Any, ...]] = []
    predictor = Recorder([])
    predictor.predict = lambda *arguments: calls.append(arguments)  # type: ignore[attr-defined]
    pipeline = Recorder([])
    pipeline.length_context = lambda command: ("seen", command)  # type: ignore[attr-defined]
    rollouts, _ = tables(predictor, pipeline)
    command = c.Predict(trajectory_id=ID, attempt=1, turn=0, context=None)  # type: ignore[arg-type]
    rollouts[c.Predict](command)
    assert calls == [(command, ("seen", command))]
