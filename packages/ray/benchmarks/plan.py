"""The hosts, the runs and the extent of bench `cluster`."""

from dataclasses import dataclass

from benchmarks.runs import endless
from packages.ray.benchmarks.ray_hosts import RayHosts
from rollweave.schema.config.root import RunConfig

RESOURCES = ({"training": 1}, {"generation": 1}, {"generation": 1})
"""Resources that each host offers beside a CPU."""

HOSTS = len(RESOURCES)

ENGINES = 2
"""Number of engines: one per host for engines."""

POOLS = (
    'pools.training={resource="training", fallback=["generation"]}',
    'pools.generation={resource="generation", fallback=["training"]}',
    "trainer.pool=training",
    "engines.pool=generation",
)

FIXED, LONGTAIL = "frozenlake_fixed.toml", "longtail.toml"

UNBOUNDED = 1_000_000
"""Steps of a run whose end is set later."""

FIGURES = (
    "success",
    "success_longtail",
    "wall_over_one_host",
    "wall_over_one_host_longtail",
    "host_loss_detected_s",
    "host_loss_recovered_s",
    "lost_trajectories",
    "unaccounted",
    "leftovers",
    "exposed_over_transfer",
    "controller_ms_per_turn",
    "controller_bytes_share",
    "bytes_per_host_over_needed",
    "trajectories_at_once",
)


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """Length of the bench: `pairs` runs of the fixed lake on one host and on all, each
    of `steps` steps; as many of the long-tailed one as `tails`, of `tail_steps` steps;
    `losses` losses of a host in a run that has no other end.

    With `steps_after`, the runs of the fixed lake on all hosts lose the trainer's host
    after their steps, and train so many further ones.
    """

    settings: tuple[str, ...]
    pairs: int
    steps: int
    tails: int
    tail_steps: int
    losses: int
    trained_first: int
    """Steps that are trained before the first loss, and between two of them."""
    steps_after: int = 0


FULL = ClusterPlan(
    settings=("run.checkpoint_every=5",),
    pairs=5,
    steps=30,
    tails=1,
    tail_steps=80,
    losses=4,
    trained_first=6,
)
QUICK_SETTINGS = (
    "run.checkpoint_every=2",
    "model.scratch.hidden=32",
    "model.scratch.layers=1",
    "warmup.steps=5",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "rollout.max_running=32",
    "eval={final_episodes=16}",
)
"""Settings of a run whose steps take about a second."""

QUICK = ClusterPlan(
    settings=QUICK_SETTINGS,
    pairs=1,
    steps=4,
    tails=0,
    tail_steps=0,
    losses=0,
    trained_first=0,
    steps_after=3,
)


def config_of(name: str, settings: tuple[str, ...], hosts: RayHosts | None) -> RunConfig:
    """Return the configuration of an example with two engines, on the hosts or, if
    there are none, on this machine alone, that does not end on success. Raises
    ConfigError.
    """
    engines, cluster = f"engines={{count={ENGINES}, max_slots=16}}", []
    if hosts is not None:
        address = f'cluster={{launcher="ray:{hosts.cluster}", hosts={HOSTS}}}'
        cluster = [address, *POOLS]
    return endless(name, [engines, *cluster, *settings])
