"""Commands that are one call of one part: who is called, with what."""

import typing
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rollweave.runtime.effects import Effects
from rollweave.schema.base import EngineId, TrajectoryId
from rollweave.schema.commands import (
    Command,
    DrawTask,
    Finish,
    Migrate,
    Predict,
    RerankTurn,
    SetTimer,
)

ID, A, B = TrajectoryId("t"), EngineId("a"), EngineId("b")
MIGRATE = Migrate(number=3, trajectory_id=ID, attempt=1, source=A, target=B)
RERANK = RerankTurn(trajectory_id=ID, attempt=1, turn=2, engine_id=A, dispatch=0, rank=4.0)


@pytest.mark.parametrize("context", [(5, 6, 7), None])
async def test_kv_moves_of_the_context_that_the_pipeline_knows(
    context: tuple[int, ...] | None,
) -> None:
    calls: list[tuple[Any, ...]] = []

    def context_of(*key: Any) -> tuple[int, ...] | None:
        calls.append(key)
        return context

    execute(
        MIGRATE,
        pipeline=SimpleNamespace(context_of=context_of),
        fleet=SimpleNamespace(migrate=lambda *a: calls.append(a)),
    )
    assert calls == [(ID, 1), (MIGRATE, context)]


async def test_ranks_are_the_pipelines() -> None:
    calls: list[Command] = []
    execute(RERANK, pipeline=SimpleNamespace(rerank=calls.append), fleet=None)
    assert calls == [RERANK]


class Recorder:
    """Stands for any part: notes each call of any of its methods."""

    def __init__(self, calls: list[object]) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self._calls.append(next(iter(arguments), None))


READ = (SetTimer, Finish, DrawTask, Migrate, Predict)
"""Commands of which `Effects` itself reads a field."""


@pytest.mark.parametrize("kind", [kind for kind in typing.get_args(Command) if kind not in READ])
async def test_every_command_is_one_call_of_one_part(kind: type[Any]) -> None:
    """None is dropped, none is executed twice."""
    calls: list[object] = []
    command = kind(**dict.fromkeys(kind.__struct_fields__))
    execute(command, pipeline=Recorder(calls), fleet=Recorder(calls), others=Recorder(calls))
    assert calls == [command]


def execute(command: Command, *, pipeline: Any, fleet: Any, others: Any = None) -> None:
    effects = Effects(
        pipeline=pipeline,
        fleet=fleet,
        seat=others,
        relays=others,
        predictor=others,
        draws=others,
        listener=others,
        tasks=others,
        post=others,
        clock=others,
        finish=others,
    )
    effects.execute(command)
