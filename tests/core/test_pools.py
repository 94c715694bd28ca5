"""Turns of task domains that name a pool run on its engines (RollArt §5.2)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.core.core import Core
from rollweave.core.state import Engine, EngineStatus
from rollweave.schema import events as e
from tests.support.pools import PooledWorld, pooled
from tests.support.properties import examples
from tests.support.random_world import World

PLACEMENTS = (
    "affinity",
    "earliest",
    "least_load",
    "pinned",
    "partition",
    "partition gain longest_first",
)


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 2**16),
    mode=st.sampled_from(["sync", "one_step", "stream", "partial", "bounded"]),
    placement=st.sampled_from(PLACEMENTS),
    failure=st.sampled_from([0.0, 0.03]),
    affinity=st.sampled_from(["declared", "learned"]),
)
def test_turns_run_in_the_pool_of_their_domain_and_a_replay_decides_the_same(
    seed: int, mode: str, placement: str, failure: float, affinity: str
) -> None:
    """The controller is lost once on the way."""
    run_config = pooled(
        mode,
        placement=placement,
        watchdog={"restarts": 1000},
        affinity=affinity,
        steps=12 if affinity == "learned" else 4,
    )
    world = PooledWorld(run_config, seed, failure=failure)
    world.start()
    for _ in range(seed % 300):
        if world.finish is None:
            world.step()
    if world.finish is None:
        world.lose_controller()
    while world.finish is None:
        assert world.handled < 60_000, f"no end: {world.core.state.phase}"
        world.step()
    assert world.core.account().balanced
    assert failure or not world.finish.error
    replayed = Core(run_config)
    for (now, event), commands in zip(world.journal, world.commands, strict=True):
        assert replayed.handle(now, event) == commands, event
    assert replayed.snapshot() == world.core.snapshot()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_domains_whose_pool_has_engines_use_no_others(placement: str) -> None:
    world = PooledWorld(pooled(placement=placement), seed=1, spread=0.01)
    world.start()
    while any(engine.version < 0 for engine in world.core.state.engines.values()):
        world.step()
    world.elsewhere = 0
    while world.finish is None:
        world.step()
    assert world.elsewhere == 0


def test_a_partition_is_planned_for_each_pool() -> None:
    world = PooledWorld(pooled(placement="partition gain", steps=12), seed=1)
    world.start()
    planned: dict[str, set[str]] = {}
    while world.finish is None:
        world.step()
        for pool, partition in world.core.state.mechanisms["placement"].partitions.items():
            planned.setdefault(pool, set()).update(one.engine_id for one in partition.shares)
    assert planned["compute"] == {"e0", "e1"}
    assert planned["bandwidth"] >= {"e2", "e3"}
    assert planned[""] == {"e0", "e1", "e2", "e3"}


def test_a_pool_without_engines_is_replaced_by_its_fallback_until_one_is_back() -> None:
    world = PooledWorld(pooled(steps=40), seed=1)
    world.start()
    while len(_serving(world, "bandwidth")) < 2:
        world.step()
    lost = _serving(world, "bandwidth")
    join, world.join = world.join, lambda name: None  # type: ignore[method-assign]
    for engine in lost:
        world.feed(e.EngineLost(engine_id=engine.id, epoch=engine.epoch, error="killed"))
    world.elsewhere = 0
    while world.elsewhere < 5:
        world.step()
    world.join = join  # type: ignore[method-assign]
    for engine in lost:
        world.join(engine.id)
    while not _serving(world, "bandwidth"):
        world.step()
    world.elsewhere = 0
    for _ in range(300):
        world.step()
    assert world.elsewhere == 0


def _serving(world: World, pool: str) -> list[Engine]:
    engines = world.core.state.engines.values()
    return [one for one in engines if one.seat.pool == pool and one.status is EngineStatus.SERVING]
