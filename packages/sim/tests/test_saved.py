"""Simulated engines read weights only from existing checkpoints, in the time that the
drive needs.
"""

from pathlib import Path

from rollweave.core.state import EngineStatus
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId
from rollweave.schema.events import Event
from rollweave_sim.run import SimMetrics
from rollweave_sim.world import World
from tests.support.simulation import config

E0, E1 = EngineId("e0"), EngineId("e1")


def started_world(directory: Path) -> World:
    """Return a run in mode decoupled whose engines have weights, and a first
    checkpoint.
    """
    world = World(config(directory, mode="decoupled"), observer=SimMetrics())
    world.start()
    state = world.core.state
    while state.checkpoints.newest is None or any(
        engine.status is not EngineStatus.SERVING for engine in state.engines.values()
    ):
        world.step()
    return world


def load(world: World, engine_id: EngineId, step: int) -> None:
    world.fleet.load(
        c.LoadWeights(engine_id=engine_id, version=step, publication_id=0, from_checkpoint=step)
    )


def answers(world: World, count: int) -> list[tuple[float, Event]]:
    """Return the answers to loads, without the core."""
    events: list[tuple[float, Event]] = []
    while len(events) < count:
        assert world.clock.step()
        loads = [
            event
            for event in world.inbox
            if isinstance(event, e.WeightsLoaded | e.WeightsLoadFailed)
        ]
        events += [(world.clock.now, event) for event in loads]
        world.inbox.clear()
    return events


def test_all_engines_read_a_checkpoint_from_one_drive(tmp_path: Path) -> None:
    world = started_world(tmp_path)
    assert world.trainer.checkpoints == {0}
    world.inbox.clear()
    began = world.clock.now
    load(world, E0, 0)
    load(world, E1, 0)
    first, second = answers(world, 2)
    assert isinstance(first[1], e.WeightsLoaded)
    assert isinstance(second[1], e.WeightsLoaded)
    # float32 from a drive of 4 GB/s: 8.2 B parameters take 8 s, and twice that where
    # two read.
    first_s = first[0] - began
    assert 8.0 < first_s < 8.5
    assert abs(second[0] - began - 2 * first_s) < 1e-6


def test_refuses_a_missing_checkpoint(tmp_path: Path) -> None:
    world = started_world(tmp_path)
    world.inbox.clear()
    load(world, E0, 3)
    ((_, event),) = answers(world, 1)
    assert isinstance(event, e.WeightsLoadFailed)
