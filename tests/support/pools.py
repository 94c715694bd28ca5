"""A random world whose engines are in two pools, which task domains name."""

from typing import Any

from rollweave.core.core import Core
from rollweave.core.state import Queued, State
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.config.root import RunConfig
from rollweave.schema.hosts import HostSlot
from tests.support.core import config
from tests.support.random_world import World

POOLS = {
    "compute": {"resource": "H800"},
    "bandwidth": {"resource": "H20", "fallback": ["compute"]},
}
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
        ablation={"changes": placement.split()},
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

    @property
    def learns(self) -> bool:
        return self.config.rollout.affinity == "learned"

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
            if not BINDING & {*self.config.ablation.changes}:
                assert command.engine_id in allowed, f"{command} of {domain}, not on {allowed}"
            pool = {"a": "compute", "b": "bandwidth"}.get(domain)
            engine = self.core.state.engines[command.engine_id]
            self.elsewhere += pool is not None and engine.seat.pool != pool
        super().execute(command)

    def feed(self, event: e.Event) -> None:
        """Assert, too, that no slot stays free while a turn waits that may run there.
        With the placement "earliest" and learned costs, a turn may wait for another
        engine that takes turns, for any but those that have failed it, or behind a turn
        that only engines of another pool may run.
        """
        super().feed(event)
        state = self.core.state
        if BINDING & {*self.config.ablation.changes} or self.finish is not None:
            return
        loads = self.core._run.fleet.loads
        free = {load.id for load in loads.values() if load.active < load.slots}
        may_wait = "earliest" in self.config.ablation.changes and self.learns
        for trajectory_id in state.turns.queue:
            trajectory = state.trajectories[trajectory_id]
            turn, others = trajectory.open_turn, free
            if may_wait and isinstance(turn.place, Queued):
                queue = turn.place.engine, turn.place.pool, turn.place.resident
                head = self.core._run.turn_queues.first(state, queue)
                waits = turn.place.engine in loads or head is None or head.turn is not turn
                others = set() if waits else free - {*turn.avoid}
            domain = state.groups[trajectory.group_id].name
            allowed = allowed_engines(self.config, state, domain, trajectory.pool)
            assert not others & {*allowed}, f"a turn of {domain} waits, and {others} are free"

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
        of_pool = [engine.id for engine in able if engine.seat.pool == pool]
        if of_pool:
            return of_pool
    return [engine.id for engine in able]
