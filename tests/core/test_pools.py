"""Turns of task domains that name a pool run on its engines (RollArt §5.2)."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.core.core import Core
from rollweave.core.state import Engine, EngineStatus, State
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.config.root import RunConfig
from rollweave.schema.hosts import HostSlot
from tests.core.world import World
from tests.support.core import config
from tests.support.properties import examples

POOLS = {
    "compute": {"resource": "H800"},
    "bandwidth": {"resource": "H20", "fallback": ["compute"]},
}
PLACEMENTS = ("affinity", "least_load", "pinned", "partition", "partition gain longest_first")
BINDING = {"pinned", "partition"}
"""Placements with which a trajectory keeps its engine."""
HOSTS = (HostSlot(number=0, pools=("compute",)), HostSlot(number=1, pools=("bandwidth",)))


def pooled(
    mode: str = "bounded",
    *,
    placement: str = "affinity",
    affinity: str = "declared",
    **sections: Any,
) -> RunConfig:
    """A run with two engines of each pool, and domains that prefer either or
    neither.
    """
    plain = config(
        mode,
        tasks=[{"env": "a"}, {"env": "b"}, {"env": "c"}],
        ablation={"policies": placement.split()},
        **sections,
    ).model_dump(exclude={"allocation"}, exclude_unset=True)
    for task, pool in zip(plain["tasks"], ("compute", "bandwidth", None), strict=True):
        task["pool"] = pool
    plain["rollout"]["affinity"] = affinity
    group = {"count": 2, "max_slots": 3}
    return RunConfig.model_validate(
        {
            **plain,
            "engines": [{**group, "pool": pool} for pool in POOLS],
            "cluster": {"address": "10.0.0.1:7400", "hosts": 2},
            "pools": POOLS,
        }
    )


class PooledWorld(World):
    """A world with a host of each pool. It compares every choice of an engine with a
    slow search.
    """

    elsewhere = 0  # turns that ran outside the pool of their domain

    def slots(self) -> tuple[e.EngineSlot, ...]:
        groups = {"compute": 0, "bandwidth": 1}
        pools = ["compute", "compute", "bandwidth", "bandwidth"]
        self.engine_hosts = {f"e{number}": groups[pool] for number, pool in enumerate(pools)}
        return tuple(
            e.EngineSlot(id=f"e{number}", group=groups[pool], host=groups[pool], pool=pool)  # type: ignore[arg-type]
            for number, pool in enumerate(pools)
        )

    def start(self) -> None:
        self.begin(e.RunStarted(engines=self.slots(), hosts=HOSTS))

    def begin(self, first: e.Event) -> None:
        self.feed(first)
        for name in self.engine_epoch:
            self.join(name)
        self.later(e.TrainerReady(epoch=0, step=0))

    def lose_controller(self) -> None:
        """Start a new world on the same hosts, with the core restored from a
        snapshot.
        """
        self.heap.clear()
        self.timer = None
        self.core = Core.restore(self.core.snapshot(), self.config)
        self.engine_epoch = dict.fromkeys(self.engine_epoch, 0)
        self.engine_version.clear()
        self.begin(e.WorldLost(engines=self.slots(), hosts=HOSTS))

    def execute(self, command: c.Command) -> None:
        if isinstance(command, c.StartTurn):
            trajectory = self.core.state.trajectories[command.trajectory_id]
            domain = self.core.state.groups[trajectory.group_id].name
            allowed = allowed_engines(self.config, self.core.state, domain, trajectory.pool)
            # A trajectory may keep an engine that once stood in for its pool's.
            if not BINDING & {*self.config.ablation.policies}:
                assert command.engine_id in allowed, f"{command} of {domain}, not on {allowed}"
            pool = {"a": "compute", "b": "bandwidth"}.get(domain)
            engine = self.core.state.engines[command.engine_id]
            self.elsewhere += pool is not None and engine.pool != pool
        super().execute(command)

    def feed(self, event: e.Event) -> None:
        """Assert, too, that no slot stays free while a turn waits that may run
        there.
        """
        super().feed(event)
        state = self.core.state
        if BINDING & {*self.config.ablation.policies} or self.finish is not None:
            return
        free = {load.id for load in self.core._run.fleet.loads.values() if load.active < load.slots}
        for trajectory_id in state.turns.queue:
            trajectory = state.trajectories[trajectory_id]
            domain = state.groups[trajectory.group_id].name
            allowed = allowed_engines(self.config, state, domain, trajectory.pool)
            assert not free & {*allowed}, f"a turn of {domain} waits, and {free} are free"

    def check_retry(self, command: c.StartTurn) -> None:
        """Engines of other pools are no alternative."""
        self.open[command.trajectory_id, command.attempt, command.turn] = (
            command.engine_id,
            command.dispatch,
        )


def allowed_engines(config: RunConfig, state: State, domain: str, learned: str = "") -> list[str]:
    """The engines that may take a turn of this domain, or of an attempt that was given
    the pool `learned`, by the rule in plain words.
    """
    able = [one for one in state.engines.values() if not one.draining and one.version >= 0]
    (task,) = [task for task in config.tasks if task.name == domain]
    first = learned or task.pool
    pools = [first, *config.pools[first].fallback] if first is not None else []
    for pool in pools:
        of_pool = [engine.id for engine in able if engine.pool == pool]
        if of_pool:
            return of_pool
    return [engine.id for engine in able]


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
        for pool, partition in world.core.state.partitions.items():
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
    return [one for one in engines if one.pool == pool and one.status is EngineStatus.SERVING]
