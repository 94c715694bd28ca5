"""The present waits of a run for hosts, engines, rollout workers and the trainer, each
with what the component does.
"""

from collections.abc import Iterator, Mapping

from rollweave.core.policy.waiting import Wait
from rollweave.core.run import Run
from rollweave.core.state import Engine, EngineStatus, Phase, State
from rollweave.core.state import TrainerStatus as Status
from rollweave.core.turns import RESTS


def waits(
    run: Run, received: Mapping[str, tuple[int, int]], *, start_s: float = 0.0
) -> Iterator[Wait]:
    """Yield the present waits, those of the mechanisms, too.

    `received` has, for each fetching relay, the bytes that have arrived and the size of
    the version, as far as they are known. A component starts within `start_s`, if that
    is given.
    """
    state = run.state
    if state.phase is Phase.FINISHED:
        return
    for engine in state.engines.values():
        name = f"engine {engine.id}{on_host(state, engine.seat.host)}"
        if what := _engine(state, engine):
            limit_s = start_s if engine.status is EngineStatus.STARTING else 0.0
            yield Wait(component=name, what=what, since=engine.since, limit_s=limit_s)
        elif engine.staging.id >= 0:
            what = f"receiving {version_name(state, engine.staging.id)} while it serves"
            yield Wait(component=name, what=what, since=engine.staging.since)
    for mechanism in run.mechanisms:
        if mechanism.waits is not None:
            yield from mechanism.waits(run, received, start_s)
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
            return f"loading {version_name(state, engine.loading.id)}"
        case EngineStatus.SERVING if RESTS in engine.barred:
            return f"gave turns back, gets no others until {engine.barred[RESTS]:.0f} s"
        case EngineStatus.SERVING:
            return ""


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


def on_host(state: State, number: int) -> str:
    name = _host_name(state, number)
    return f" on {name}" if name else ""


def _host_name(state: State, number: int) -> str:
    """Return the host's name; "" for a run on one machine, whose hosts have none."""
    host = state.hosts.up.get(number)
    return f"host {host.name}" if host is not None and host.name else ""


def version_name(state: State, publication_id: int) -> str:
    version = state.publication.retained.get(publication_id)
    return f"weights {publication_id}" if version is None else f"version {version}"
