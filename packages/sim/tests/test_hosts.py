"""Simulated hosts: pools of other hardware, hosts that are lost and that join."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollweave.core.core import Core
from rollweave.core.mechanisms.membership.members import next_id
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError
from rollweave_sim.cost import EngineCost
from rollweave_sim.hardware import gpu, model
from rollweave_sim.hosts import SimHosts
from rollweave_sim.run import SimMetrics
from rollweave_sim.world import World, costs_of
from tests.support.properties import checked_every
from tests.support.simulation import config, decode_step

POOLS: dict[str, Any] = {
    "compute": {"resource": "H800"},
    "bandwidth": {"resource": "H20", "fallback": ["compute"]},
}
TASKS: dict[str, str | None] = {"frozenlake": "compute", "gem-math": "bandwidth", "webshop": None}


def pooled(
    tmp_path: Path,
    counts: tuple[int, int] = (3, 2),
    *,
    degree: int = 4,
    relayed: bool = False,
    **sections: Any,
) -> RunConfig:
    """Engines of two pools, with two engines on a host, and three task domains."""
    plain = config(tmp_path).model_dump(exclude_unset=True)
    (task,), engines = plain.pop("tasks"), plain.pop("engines")
    del task["tag"]
    group = {**engines, "degree": degree, "max_slots": 8}
    return RunConfig.model_validate(
        {
            **plain,
            "pools": POOLS,
            "tasks": [{**task, "env": env, "pool": pool} for env, pool in TASKS.items()],
            "engines": [
                {**group, "count": count, "pool": pool}
                for count, pool in zip(counts, POOLS, strict=True)
            ],
            **({"cluster": {"address": "127.0.0.1:0", "hosts": 1}} if relayed else {}),
            **sections,
        }
    )


class Journal:
    def __init__(self) -> None:
        self.lines: list[tuple[float, e.Event, list[c.Command]]] = []

    def append(self, now: float, event: e.Event, commands: Sequence[c.Command]) -> None:
        self.lines.append((now, event, list(commands)))


def begun(run_config: RunConfig) -> tuple[World, Journal]:
    journal, metrics = Journal(), SimMetrics()
    world = World(run_config, observer=metrics, journal=journal)
    metrics.watch(world)
    world.each_event = lambda: None if world.events % checked_every() else world.core.check()
    world.start()
    return world, journal


def finish(world: World) -> None:
    while world.over is None:
        world.step()
    assert world.over == ""
    world.core.check()
    assert world.core.account().balanced


def replayed(run_config: RunConfig, journal: Journal) -> Core:
    core = Core(run_config)
    for now, event, commands in journal.lines:
        assert core.handle(now, event) == commands, event
    return core


def test_a_pool_has_as_many_hosts_as_its_engines_need(tmp_path: Path) -> None:
    hosts = SimHosts(pooled(tmp_path, (3, 2)))
    assert [(one.name, one.pools) for one in hosts.first] == [
        ("compute-0", ("compute",)),
        ("compute-1", ("compute",)),
        ("bandwidth-2", ("bandwidth",)),
    ]
    assert {one.devices for one in hosts.first} == {tuple(range(8))}


def test_engines_have_the_gpus_of_their_pool(tmp_path: Path) -> None:
    engines, _ = costs_of(pooled(tmp_path))
    shape = model("qwen3-8b")
    for pool, name in (("compute", "h800"), ("bandwidth", "h20")):
        expected = EngineCost(gpu=gpu(name), model=shape, tp=4)
        assert decode_step(engines[pool, 4], 8, 8000) == decode_step(expected, 8, 8000)
        assert engines[pool, 4].kv_tokens == expected.kv_tokens
    unnamed = {**POOLS, "bandwidth": {"resource": "far"}}
    other, _ = costs_of(pooled(tmp_path, pools=unnamed, sim={"model": "qwen3-8b", "gpu": "a100"}))
    expected = EngineCost(gpu=gpu("a100"), model=shape, tp=4)
    assert decode_step(other["bandwidth", 4], 8, 8000) == decode_step(expected, 8, 8000)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {
                "pools": {**POOLS, "compute": {"resource": "fast"}},
                "sim": {"model": "qwen3-8b", "gpu": "h8000"},
            },
            r"sim.gpu must be one of .*, got 'h8000' \(did you mean h800\?\)",
        ),
        (
            {"pools": {"h20": {"resource": "H20"}}, "engines": {}, "tasks": [{"env": "webshop"}]},
            "engines.0.pool must be given",
        ),
    ],
)
def test_pools_that_cannot_be_simulated_are_refused(
    sections: dict[str, Any], message: str, tmp_path: Path
) -> None:
    run_config = pooled(tmp_path, **sections)
    with pytest.raises(ConfigError, match=message):
        World(run_config, observer=SimMetrics())


def test_sites_are_joined_by_the_link_of_the_weights(tmp_path: Path) -> None:
    """Two hosts are at the trainer's site and one at another; Ethernet has a sixteenth
    of the speed of eight adapters.
    """
    pools = {**POOLS, "bandwidth": {**POOLS["bandwidth"], "site": "elsewhere"}}
    hosts = SimHosts(
        pooled(tmp_path, relayed=True, pools=pools, sim={"model": "qwen3-8b", "link": "ethernet"})
    )
    assert [hosts.pool_of(number) for number in range(3)] == ["compute", "compute", "bandwidth"]
    assert hosts.slowdown(0, 1) == hosts.slowdown(2, 2) == 1.0
    assert hosts.slowdown(0, 2) == hosts.slowdown(2, 0) == 16.0


@pytest.mark.extended
def test_task_domains_run_on_the_engines_of_their_pools(tmp_path: Path) -> None:
    run_config = pooled(tmp_path)
    world, journal = begun(run_config)
    state, used = world.core.state, Counter[tuple[str, str]]()
    pools = {slot.id: slot.pool for slot in world.slots}
    finish(world)
    domains: dict[str, str] = {}
    begun_at = max(now for now, event, _ in journal.lines if isinstance(event, e.EngineJoined))
    for now, _, commands in journal.lines:
        for command in commands:
            if isinstance(command, c.StartInit):
                domains[command.trajectory_id] = command.task.env
            elif isinstance(command, c.StartTurn) and now > begun_at + 60:
                used[domains[command.trajectory_id], pools[command.engine_id]] += 1
    assert used["frozenlake", "bandwidth"] == used["gem-math", "compute"] == 0
    assert all(used[env, pool] for env, pool in TASKS.items() if pool is not None)
    assert used["webshop", "compute"] and used["webshop", "bandwidth"]  # noqa: PT018
    assert set(world.pools_busy()) == {*POOLS}
    assert replayed(run_config, journal).snapshot() == world.core.snapshot()
    assert state.hosts.up == {host.number: host for host in world.hosts.first}


@pytest.mark.parametrize("relayed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_host_is_lost_and_another_joins(relayed: bool, tmp_path: Path) -> None:
    """While the only host of a pool is gone, the fallback's engines run its turns.
    There is room for one engine in place of the two of that host; the other one waits.
    """
    run_config = pooled(tmp_path, (3, 2), relayed=relayed)
    world, journal = begun(run_config)
    state = world.core.state
    while state.trainer.step < 1:
        world.step()
    assert world.lose_host(2, "no power") == "bandwidth"
    assert world.lose_host(2, "no power") is None
    while any(one.seat.host == 2 for one in state.engines.values()):
        world.step()
    assert [*state.engines][3:] == ["e5"]
    stand_in = state.engines["e5"]  # type: ignore[index]
    assert (stand_in.seat.pool, len(state.hosts.unplaced)) == ("compute", 1)
    while stand_in.version < 0:
        world.step()
    world.join_host("bandwidth")
    while stand_in.id in state.engines:
        world.step()
    assert {node.sharing for node in world.fleet.nodes.values()} == {1}
    assert [one.seat.pool for one in state.engines.values()][-2:] == ["bandwidth", "bandwidth"]
    finish(world)
    assert not relayed or (world.events, round(world.clock.now, 3)) == (5511, 325.565)
    assert ("relays" in state.mechanisms) == relayed
    assert replayed(run_config, journal).snapshot() == world.core.snapshot()


@pytest.mark.extended
def test_the_controller_is_lost_on_hosts_of_pools(tmp_path: Path) -> None:
    """The restored core starts the engines on the hosts of their pools again."""
    run_config = pooled(tmp_path)
    world, journal = begun(run_config)
    while world.core.state.trainer.step < 1:
        world.step()
    places = {one.id: (one.host, one.devices, one.pool) for one in world.slots}
    world.revive(Core.restore(world.core.snapshot(), run_config), journal)
    assert {one.id: (one.host, one.devices, one.pool) for one in world.slots} == places
    finish(world)
    assert replayed(run_config, journal).snapshot() == world.core.snapshot()


@pytest.mark.slow
def test_an_engine_that_joins_gets_a_place_in_its_pool(tmp_path: Path) -> None:
    world, _ = begun(pooled(tmp_path, (3, 2)))
    state = world.core.state
    while state.trainer.step < 1:
        world.step()
    world.post(e.EngineRegistered(engine=e.EngineSlot(id=next_id(state), degree=4, group=0)))
    while len(state.engines) < 6 or state.engines["e5"].version < 0:  # type: ignore[index]
        world.step()
    joined = world.fleet.nodes["e5"]  # type: ignore[index]
    assert (joined.host, joined.devices, joined.sharing) == (1, (4, 5, 6, 7), 1)
    assert joined.engine is not None
    assert joined.engine.cost is world.fleet.nodes[world.slots[0].id].engine.cost  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_cluster_without_pools_has_a_relay_on_each_host(tmp_path: Path) -> None:
    plain = config(tmp_path, sim={}).model_dump(exclude_unset=True)
    run_config = RunConfig.model_validate(
        {**plain, "cluster": {"address": "127.0.0.1:0", "hosts": 3}}
    )
    world, _ = begun(run_config)
    assert [slot.host for slot in world.slots] == [0, 1, 2]
    finish(world)
    assert len(world.core.state.mechanisms["relays"].relays) == 3
