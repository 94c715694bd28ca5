"""Hosts that come and go, and the number of rollout workers."""

import msgspec

from rollweave.core.mechanisms.cluster.worker_count import Peak
from rollweave.core.state import State
from rollweave.schema.base import EngineId

NAME = "cluster"
"""Key of the part in `State.mechanisms`."""


class Scaling(msgspec.Struct):
    """The number of rollout workers that there should be, if it changes."""

    peaks: list[Peak] = []  # of the need for workers (mechanisms/cluster/worker_count)
    target: int = 0  # workers that there should be
    start_s: float = 0.0  # seconds of the longest start so far
    starts: int = 0  # of workers, because they were needed
    worker_s: float = 0.0  # seconds in which workers had a process, summed until `at`
    at: float = 0.0


class Cluster(msgspec.Struct):
    """The part of the state."""

    scaling: Scaling = msgspec.field(default_factory=Scaling)
    displaced: list[EngineId] = []  # engines that replace those of a host that is gone
    # displaced engine → host that has joined, to which it moves once it may drain
    returning: dict[EngineId, int] = {}


def cluster_of(state: State) -> Cluster:
    """Return the part of the state; a run without it has no workers."""
    part = state.mechanisms.get(NAME)
    return part if isinstance(part, Cluster) else Cluster()
