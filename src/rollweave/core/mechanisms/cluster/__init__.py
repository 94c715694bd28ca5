"""Hosts that join and that are lost, and the rollout workers on them."""

from rollweave.core.mechanisms.cluster import hosts, scaling, workers
from rollweave.core.mechanisms.cluster.check import check
from rollweave.core.mechanisms.cluster.workers import NAME, Cluster
from rollweave.core.run import Mechanism, Run
from rollweave.core.state import Stage
from rollweave.schema import events as e
from rollweave.schema.config.root import RunConfig


def used(config: RunConfig) -> bool:
    """True if the run may have several hosts, rollout workers, or engines that wait for
    a place.
    """
    hosts_ = config.cluster is not None or bool(config.pools) or config.weights.relays > 0
    return hosts_ or config.workers.maximum > 0 or config.allocation is not None


def _start(run: Run, event: e.RunStarted | e.WorldLost) -> None:
    hosts.start(run, event)
    workers.start(run, event.workers)


def _advance(run: Run) -> None:
    hosts.advance(run)
    workers.advance(run)


MECHANISM = Mechanism(
    name=NAME,
    used=used,
    state=Cluster,
    handlers={
        e.RunStarted: _start,
        e.WorldLost: _start,
        e.HostJoined: hosts.on_joined,
        e.HostLost: hosts.on_lost,
        e.WorkerJoined: workers.on_joined,
        e.WorkerLost: workers.on_lost,
    },
    steps={
        "place processes": _advance,
        "start attempts": scaling.resize,
        "attempt deadlines": workers.check_timeouts,
    },
    choose_worker=workers.choose,
    follows={
        Stage.INIT: workers.entered,
        Stage.RUN_QUEUED: workers.worked,
        Stage.SCORED: workers.left,
        Stage.OVER: workers.left,
    },
    waits=workers.waits,
    check=check,
)
