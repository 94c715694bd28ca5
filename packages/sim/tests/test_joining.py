"""Engines that join and leave a simulated run in mid-training: the contract holds, and
new engines serve.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from rollweave.core.mechanisms.membership.members import next_id
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId
from rollweave.schema.config.rollout import ModeName
from rollweave.schema.config.root import RunConfig
from rollweave_sim.faults import NullObserver
from rollweave_sim.world import World
from tests.support.referee import Referee
from tests.support.simulation import config
from tests.support.variants import mostly_slow


class Journal:
    """A journal in memory."""

    def __init__(self) -> None:
        self.lines: list[tuple[float, e.Event, list[c.Command]]] = []

    def append(self, now: float, event: e.Event, commands: Sequence[c.Command]) -> None:
        self.lines.append((now, event, list(commands)))


@pytest.mark.variants
@pytest.mark.parametrize("relays", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("mode", mostly_slow(ModeName, {ModeName.SYNC, ModeName.DECOUPLED}))
def test_an_engine_joins_and_another_leaves(mode: ModeName, relays: int, tmp_path: Path) -> None:
    """One joins after the first step, and the first one leaves once the new one
    serves.
    """
    run_config = RunConfig.model_validate(
        {**config(tmp_path, mode=mode).model_dump(), "weights": {"relays": relays}}
    )
    journal = Journal()
    world = World(run_config, observer=NullObserver(), journal=journal)
    world.start()
    state = world.core.state
    while state.trainer.step < 1:
        world.step()
    name = next_id(state)
    assert name == "e3"
    world.post(e.EngineRegistered(engine=e.EngineSlot(id=name)))
    while name not in state.engines or state.engines[name].version < 0:
        world.step()
    world.post(e.EngineWithdrawn(engine_id=EngineId("e0"), drain=True))
    while world.over is None:
        world.step()
    world.core.check()
    assert world.over == ""
    assert list(state.engines) == ["e1", "e2", "e3"]
    assert (state.counters.engines_joined, state.counters.engines_left) == (1, 1)
    referee = Referee()
    referee.watch(journal.lines)
    assert [owed for owed in referee.owed() if not owed.startswith("take")] == []
    turns_started = [
        turn for _, _, out in journal.lines for turn in out if isinstance(turn, c.StartTurn)
    ]
    assert sum(turn.engine_id == name for turn in turns_started) > 20, "it does its part"
