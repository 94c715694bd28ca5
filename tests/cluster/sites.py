"""Hosts at two sites that a slow link joins, and what crosses it.

Two hosts are at the trainer's site and two at the other site; the trainer is on the
first host.
"""

from typing import NamedTuple

from benchmarks.cluster.run import ClusterRun
from benchmarks.runs import endless
from rollweave.core.mechanisms.relays.state import part_of
from rollweave.envs.tasks import rules_of
from rollweave.record.journal import Replay
from rollweave.schema.commands import FetchWeights
from rollweave.schema.config.root import RunConfig
from rollweave.schema.events import WeightsFetched
from tests.cluster.agents import HostsByHand

PORT = 7400

HOSTS, FAR = 4, 2
"""Number of hosts, and of those at the other site."""

SETTINGS = (
    "model.scratch.hidden=256",
    "model.scratch.layers=4",
    "warmup.steps=2",
    "rollout.groups_per_step=2",
    "rollout.group_size=4",
    "rollout.max_running=32",
    "trainer.lr=1e-4",
    "trainer.pool=trainer",
    "pools.trainer.resource=trainer",
    "pools.near.resource=near",
    "pools.far.resource=far",
    "engines=[{pool='near', count=2, max_slots=16}, {pool='far', count=2, max_slots=16}]",
    "eval={final_episodes=16}",
    "run.checkpoint_every=0",
    "run.sinks=[]",
)


class Crossing(NamedTuple):
    """The traffic over the link: the versions that reached the other site, the most
    bytes that a relay there received for a version, and the fetches over the link.
    """

    versions: int
    version_bytes: int
    fetches: int


def config_of(settings: tuple[str, ...], hosts: HostsByHand) -> RunConfig:
    """Return the configuration of a run on these hosts. Raises ConfigError."""
    cluster = f'cluster={{address="{hosts.controller}:{PORT}", hosts={HOSTS}}}'
    return endless("frozenlake_fixed.toml", [cluster, *settings])


def start_agents(hosts: HostsByHand) -> None:
    """Start the agents of all hosts in their pools: the trainer's is the first host
    alone, so that the order in which relays join decides the chain.
    """
    for number in range(HOSTS):
        pools = ["far" if number >= HOSTS - FAR else "near", *(["trainer"] if not number else [])]
        options = [text for pool in pools for text in ("--resource", f"{pool}=1")]
        hosts.start(number, port=PORT, options=options)


def crossing_of(run: ClusterRun) -> Crossing:
    """Return what crossed the link during a run that is over, from its journal."""
    replay = Replay(run.run.journal, run.config, rules=rules_of(run.config))
    state = replay.core.state
    versions: set[int] = set()
    most = fetches = 0

    def is_far(relay_id: str | None) -> bool:
        part = part_of(state)
        relay = part.relays.get(relay_id or "") if part is not None else None
        return relay is not None and "far" in state.hosts.up[relay.host].pools

    for _, event, commands in replay:
        fetches += sum(
            isinstance(command, FetchWeights)
            and is_far(command.relay_id)
            and not is_far(command.source)
            for command in commands
        )
        if isinstance(event, WeightsFetched) and is_far(event.relay_id):
            versions.add(event.publication_id)
            most = max(most, event.nbytes)
    return Crossing(len(versions), most, fetches)
