"""Commands that are one call of one part: who is called, with what."""

from types import SimpleNamespace
from typing import Any

import pytest

from rollweave.live.effects import Effects
from rollweave.schema.base import EngineId, TrajectoryId
from rollweave.schema.commands import Command, Migrate, RerankTurn

ID, A, B = TrajectoryId("t"), EngineId("a"), EngineId("b")
MIGRATE = Migrate(number=3, trajectory_id=ID, attempt=1, source=A, target=B)
RERANK = RerankTurn(trajectory_id=ID, attempt=1, turn=2, engine_id=A, try_number=0, rank=4.0)


@pytest.mark.parametrize("context", [(5, 6, 7), None])
async def test_kv_moves_of_the_context_that_the_pipeline_knows(context: tuple[int, ...] | None) -> None:
    calls: list[tuple[Any, ...]] = []

    def context_of(*key: Any) -> tuple[int, ...] | None:
        calls.append(key)
        return context

    execute(MIGRATE, pipeline=SimpleNamespace(context_of=context_of), fleet=SimpleNamespace(migrate=lambda *a: calls.append(a)))
    assert calls == [(ID, 1), (MIGRATE, context)]


async def test_ranks_are_the_pipelines() -> None:
    calls: list[Command] = []
    execute(RERANK, pipeline=SimpleNamespace(rerank=calls.append), fleet=None)
    assert calls == [RERANK]


def execute(command: Command, *, pipeline: Any, fleet: Any) -> None:
    nobody: Any = None
    effects = Effects(
        pipeline=pipeline,
        fleet=fleet,
        seat=nobody,
        relays=nobody,
        predictor=nobody,
        draws=nobody,
        listener=nobody,
        tasks=nobody,
        post=nobody,
        clock=nobody,
        finish=nobody,
    )
    effects.execute(command)
