"""The present waits of a run for hosts, relays, engines, rollout workers and the
trainer, each with what the component does.
"""

from collections.abc import Iterator, Mapping

from rollweave.core.policy.waiting import Wait
from rollweave.core.state import (
    Engine,
    EngineStatus,
    Phase,
    Relay,
    RelayStatus,
    State,
    WorkerStatus,
)
from rollweave.core.state import TrainerStatus as Status
from rollweave.core.weights import takes_versions

MEGABYTE = 1_000_000


def waits(
    state: State, received: Mapping[str, tuple[int, int]], *, start_s: float = 0.0
) -> Iterator[Wait]:
    """Yield the present waits.

    `received` has, for each fetching relay, the bytes that have arrived and the size of
    the version, as far as they are known. A component starts within `start_s`, if that
    is given.
    """
    if state.phase is Phase.FINISHED:
        return
    for engine in state.engines.values():
        name = f"engine {engine.id}{_on_host(state, engine.host)}"
        if what := _engine(state, engine):
            limit_s = start_s if engine.status is EngineStatus.STARTING else 0.0
            yield Wait(component=name, what=what, since=engine.since, limit_s=limit_s)
        elif engine.staging_id >= 0:
            what = f"receiving {_version(state, engine.staging_id)} while it serves"
            yield Wait(component=name, what=what, since=engine.staging_since)
    with_engines = {engine.host for engine in state.engines.values()}
    for relay in state.relays.values():
        needs = takes_versions(state, relay, with_engines)
        progress = received.get(relay.id, (0, 0))
        yield from _relay(state, relay, progress, needs=needs, start_s=start_s)
    for worker in state.workers.values():
        name = f"worker {worker.id}"
        if worker.status is WorkerStatus.STARTING:
            where = _on_host(state, worker.host)
            yield Wait(
                component=f"{name}{where}", what="starting", since=worker.since, limit_s=start_s
            )
        elif worker.status is WorkerStatus.UNPLACED:
            yield Wait(component=name, what="no host has a place for it", since=worker.since)
        elif worker.status is WorkerStatus.DRAINING and len(state.workers) == 1:
            what = f"ending {len(worker.attempts)} attempts before it moves to another host"
            yield Wait(component=name, what=what, since=worker.since)
    if count := len(state.hosts.unplaced):
        what = f"no host has a place for {count} of the engines"
        yield Wait(component="another host", what=what)
    if not state.serving:
        yield from _trainer(state, start_s)


def _engine(state: State, engine: Engine) -> str:
    match engine.status:
        case EngineStatus.STARTING:
            return "starting"
        case EngineStatus.STALE if engine.released and state.trainer.status is not Status.IDLE:
            return ""  # the trainer has the devices
        case EngineStatus.STALE:
            return "ready, without weights that it may use"
        case EngineStatus.SUSPENDING if engine.released:
            return "giving its memory back for the trainer"
        case EngineStatus.SUSPENDING:
            return "suspending its turns to load new weights"
        case EngineStatus.LOADING:
            return f"loading {_version(state, engine.loading_id)}"
        case EngineStatus.SERVING if engine.resting_until is not None:
            return f"gave turns back, gets no others until {engine.resting_until:.0f} s"
        case EngineStatus.SERVING:
            return ""


def _relay(
    state: State, relay: Relay, received: tuple[int, int], *, needs: bool, start_s: float
) -> Iterator[Wait]:
    name, since, what = f"relay {relay.id}{_on_host(state, relay.host)}", relay.since, ""
    missing, (done, whole), limit_s = state.publication.id, received, 0.0
    if relay.status is RelayStatus.STARTING:
        what, limit_s = "starting", start_s
    elif relay.fetch is not None:
        fetched, source = _version(state, relay.fetch.publication_id), relay.fetch.source
        what = f"fetching {fetched} from {source or 'the trainer'}"
        if whole:
            what += f", {done / MEGABYTE:,.0f} of {whole / MEGABYTE:,.0f} MB"
    if what:
        yield Wait(component=name, what=what, since=since, limit_s=limit_s)
    elif needs and missing in state.publication.retained and missing not in relay.versions:
        yield Wait(component=name, what=f"no source has {_version(state, missing)}")
    if relay.suspected_since is not None:
        yield Wait(
            component=f"a sign of life of {name}", what="silent", since=relay.suspected_since
        )


def _trainer(state: State, start_s: float) -> Iterator[Wait]:
    trainer, spent = state.trainer, state.idle.trainer
    steps = max(1, trainer.step)
    match trainer.status:
        case Status.IDLE | Status.SAVING:
            pass
        case Status.STARTING:
            saved = state.checkpoints.newest
            what = "starting" if saved is None else f"starting from the checkpoint of step {saved}"
            if trainer.unplaced:
                what, start_s = "no host has room for it", 0.0
            yield Wait(
                component=_trainer_name(state), what=what, since=trainer.since, limit_s=start_s
            )
        case Status.TRAINING:
            yield Wait(
                component=_trainer_name(state),
                what=f"training step {trainer.step}",
                since=trainer.since,
                usual_s=spent.get("busy", 0.0) / steps,
            )
        case Status.MEASURING | Status.PUBLISHING as status:
            yield Wait(
                component=_trainer_name(state),
                what=f"{status} at step {trainer.step}",
                since=trainer.since,
                usual_s=spent.get(status, 0.0) / steps,
            )
    if trainer.saving is not None:
        yield Wait(
            component=f"the checkpoint of step {trainer.saving}",
            what="being written",
            since=trainer.save_requested_at,
            usual_s=trainer.last_save_s,
        )


def _trainer_name(state: State) -> str:
    hosts = dict.fromkeys(rank.host for rank in state.hosts.ranks)
    names = [name for host in hosts if (name := _host_name(state, host))]
    return f"the trainer on {', '.join(names)}" if names else "the trainer"


def _on_host(state: State, number: int) -> str:
    name = _host_name(state, number)
    return f" on {name}" if name else ""


def _host_name(state: State, number: int) -> str:
    """Return the host's name; "" for a run on one machine, whose hosts have none."""
    host = state.hosts.up.get(number)
    return f"host {host.name}" if host is not None and host.name else ""


def _version(state: State, publication_id: int) -> str:
    version = state.publication.retained.get(publication_id)
    return f"weights {publication_id}" if version is None else f"version {version}"
