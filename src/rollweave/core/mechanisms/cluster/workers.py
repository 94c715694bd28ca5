"""Rollout workers: the processes that run INIT, RUN and EVAL of attempts (RollArt
§6.1).

An attempt stays with one worker from its start until it is scored. The loss of a worker
ends its attempts; the infrastructure is blamed, and they start again in any worker,
where they may continue with their recorded turns (`core/continuation`). The worker is
restarted on its host or, if that host is lost or given up, on another host as soon as
one has room. From there it moves to a host that joins later, after its attempts are
over and one worker at a time. Without workers, attempts run in the controller.

If the number of workers changes, `cluster/scaling` decides it. A worker that is not
needed retires: it stops once its attempts are over, unless it is needed again before.
There are as many workers as are needed to give every attempt a place (Heddle §3, the
tool manager). More workers start as soon as more attempts do, and a worker ends only
after there have been too many workers for a whole window. Therefore a worker lives for
at least the window, so that the number never flaps; a short gap between two bursts ends
no worker.
"""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from rollweave.core import attempts, continuation, trajectories
from rollweave.core.mechanisms.membership import bindings
from rollweave.core.policy.waiting import Wait
from rollweave.core.reading.waits import on_host
from rollweave.core.run import Run
from rollweave.core.state import ALIVE, Phase, State, Trajectory, Worker, WorkerStatus
from rollweave.schema.base import EngineId, TrajectoryId
from rollweave.schema.commands import RemoveWorker, RestartWorker
from rollweave.schema.config.engines import WorkersConfig
from rollweave.schema.events import WorkerJoined, WorkerLost, WorkerSlot
from rollweave.schema.work import StopReason


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """A number of workers, and the last time `until` at which it was needed."""

    workers: int
    until: float


def needed(attempts: int, *, workers: int, at_once: int) -> int:
    """Return how many workers, at least one and at most `workers`, are needed for the
    attempts, if all workers together have places for `at_once` attempts.
    """
    share = -(-max(1, at_once) // max(1, workers))
    return min(workers, -(-attempts // share))


def observe(peaks: Sequence[Peak], need: int, *, now: float, window_s: float) -> list[Peak]:
    """Return the peaks of the last `window_s` seconds in descending order: the greatest
    need first, the present need last. A need lasts from its observation to the next
    observation. Times must not decrease.
    """
    lasting = [*peaks[:-1], *(Peak(workers=peak.workers, until=now) for peak in peaks[-1:])]
    return [
        *(peak for peak in lasting if peak.workers > need and peak.until >= now - window_s),
        Peak(workers=need, until=now),
    ]


NAME = "cluster"
"""Key of the part in `State.mechanisms`."""


class Scaling(msgspec.Struct):
    """The number of rollout workers that there should be, if it changes."""

    peaks: list[Peak] = []  # of the need for workers
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


COMING = (WorkerStatus.STARTING, WorkerStatus.RETIRING, WorkerStatus.STOPPED)
"""Statuses of workers that can be ready when they are needed."""

PROCESSLESS = (WorkerStatus.UNPLACED, WorkerStatus.FAILED, WorkerStatus.STOPPED)
"""Statuses in which a worker has no process."""


def start(run: Run, slots: tuple[WorkerSlot, ...]) -> None:
    """Record the workers of a new world, and the workers that may start later."""
    state, wanted = run.state, run.config.workers
    _charge(run)
    state.workers = {slot.id: Worker(id=slot.id, host=slot.host, since=run.now) for slot in slots}
    for name in _names(wanted) if wanted.elastic else ():
        stopped = Worker(id=name, host=0, status=WorkerStatus.STOPPED, since=run.now)
        state.workers.setdefault(name, stopped)
    part = run.part(Cluster).scaling
    part.peaks, part.target = [], wanted.first


def choose(run: Run) -> str | None:
    """Return the worker for another attempt; None if no worker can take it now."""
    workers = run.state.workers
    if not workers:
        return ""
    ready = {
        name: len(worker.attempts)
        for name, worker in workers.items()
        if worker.status is WorkerStatus.READY
    }
    awaited = sum(_is_awaited(run, worker) for worker in workers.values())
    return worker_for(ready, awaited=awaited, at_once=run.places.alive)


def worker_for(attempts: Mapping[str, int], *, awaited: int, at_once: int) -> str | None:
    """Return the worker with the fewest attempts, or the first of equals; None if there
    is no worker, or if every worker has its share. While `awaited` other workers start
    for the first time, a worker takes only its share of the `at_once` attempts that may
    run; otherwise the first worker that is ready would take all attempts.
    """
    chosen = min(attempts, key=attempts.__getitem__, default=None)
    if chosen is None or not awaited:
        return chosen
    share = -(-at_once // (len(attempts) + awaited))
    return chosen if attempts[chosen] < share else None


def _is_awaited(run: Run, worker: Worker) -> bool:
    """True if the worker should get its share of the attempts once it is ready: when it
    starts for the first time or, if the number of workers changes, when attempts need
    it.
    """
    if run.config.workers.elastic:
        return worker.status in COMING
    return worker.status is WorkerStatus.STARTING and not worker.epoch


def entered(run: Run, trajectory: Trajectory) -> None:
    """Record that its worker runs the attempt."""
    worker = run.state.workers.get(trajectory.worker)
    if worker is not None:
        worker.attempts[trajectory.id] = None


def worked(run: Run, trajectory: Trajectory) -> None:
    """Forget earlier restarts of the attempt's worker, which has done work since."""
    worker = run.state.workers.get(trajectory.worker)
    if worker is not None:
        worker.restarts = 0


def left(run: Run, trajectory: Trajectory) -> None:
    """Record that the attempt is over."""
    worker = run.state.workers.get(trajectory.worker)
    if worker is not None:
        worker.attempts.pop(trajectory.id, None)
    trajectory.worker = ""


def on_joined(run: Run, event: WorkerJoined) -> None:
    worker = _find(run, event.worker_id, event.epoch)
    if worker is not None and worker.status is WorkerStatus.STARTING:
        run.part(Cluster).scaling.start_s = max(
            run.part(Cluster).scaling.start_s, run.now - worker.since
        )
        _enter(run, worker, WorkerStatus.READY)


def on_lost(run: Run, event: WorkerLost) -> None:
    worker = _find(run, event.worker_id, event.epoch)
    if worker is None:
        return
    _end_attempts(run, worker, event.error, event.recorded)
    if worker.status is WorkerStatus.RETIRING:
        run.warn(worker.id, f"lost while it retired: {event.error}", count="worker_lost")
        _stop(run, worker, "it was lost")
    else:
        _restart(run, worker, f"lost: {event.error}")


def host_joined(run: Run, host: int) -> None:
    """Let workers whose host is gone move to this host."""
    for worker in run.state.workers.values():
        if worker.displaced:
            worker.candidates.append(host)


def advance(run: Run) -> None:
    """Move workers from hosts that are given up, and to hosts that have joined, and
    start the workers for which there is a place now.
    """
    up = run.state.hosts.up
    for worker in run.state.workers.values():
        if worker.status is WorkerStatus.UNPLACED or (
            worker.host not in up and worker.status not in PROCESSLESS
        ):
            reason = f"host {worker.host} was given up"
            _end_attempts(run, worker, reason)
            if worker.status is WorkerStatus.RETIRING:
                _stop(run, worker, reason)
            else:
                _begin(run, worker, reason)
    _move_back(run)


def wake(run: Run, worker: Worker) -> None:
    """Let a worker that retires take attempts again, or start a worker that has
    stopped, if there is a place for it.
    """
    if worker.status is WorkerStatus.RETIRING:
        _enter(run, worker, WorkerStatus.READY)
        return
    run.part(Cluster).scaling.starts += 1
    _begin(run, worker, "attempts wait for a place", moves=True)


def retire(run: Run, worker: Worker) -> None:
    """Stop the worker once its attempts are over."""
    if worker.attempts:
        _enter(run, worker, WorkerStatus.RETIRING)
    else:
        _stop(run, worker, "it was not needed")


def stop_retired(run: Run) -> None:
    """Stop the workers that retire and have no more attempts."""
    for worker in run.state.workers.values():
        if worker.status is WorkerStatus.RETIRING and not worker.attempts:
            _stop(run, worker, "it was not needed")


def _move_back(run: Run) -> None:
    """Drain the next worker that may move to a host that has joined, while the others
    take attempts, and move it once it has no attempts.
    """
    workers = run.state.workers.values()
    for worker in workers:
        if not worker.candidates:
            continue
        if any(other.status is WorkerStatus.STARTING for other in workers):
            return
        place = bindings.bind_worker(run.config, run.state, worker.id)
        stays = worker.status in PROCESSLESS or worker.status is WorkerStatus.RETIRING
        if stays or place not in worker.candidates:
            worker.candidates.clear()  # it waits for another host
            if worker.status is WorkerStatus.DRAINING:
                _enter(run, worker, WorkerStatus.READY)
            continue
        if worker.status is WorkerStatus.READY:
            _enter(run, worker, WorkerStatus.DRAINING)
        if not worker.attempts:
            _begin(run, worker, "it moves to a host that has joined", moves=True)
        return


def check_timeouts(run: Run) -> None:
    """Restart workers that are not ready in time. A service, which never gives up, also
    restarts workers that have failed.
    """
    limit = run.config.watchdog.start_s
    for worker in run.state.workers.values():
        if worker.status is WorkerStatus.STARTING and run.now - worker.since > limit:
            _restart(run, worker, f"not ready within {limit:g} s")
        elif worker.status is WorkerStatus.FAILED and run.state.serving:
            _begin(run, worker, "it had failed")


def _find(run: Run, worker_id: str, epoch: int) -> Worker | None:
    worker = run.state.workers.get(worker_id)
    return worker if worker is not None and worker.epoch == epoch else None


def processes(state: State) -> int:
    """Return the number of workers that have a process."""
    return sum(worker.status not in PROCESSLESS for worker in state.workers.values())


def _names(wanted: WorkersConfig) -> list[str]:
    return [f"w{number}" for number in range(wanted.maximum)]


def _enter(run: Run, worker: Worker, status: WorkerStatus) -> None:
    _charge(run)
    worker.status, worker.since = status, run.now


def _charge(run: Run) -> None:
    """Count the seconds of all processes since a process last started or ended."""
    part = run.part(Cluster).scaling
    part.worker_s += processes(run.state) * max(0.0, run.now - part.at)
    part.at = max(part.at, run.now)


def _stop(run: Run, worker: Worker, reason: str) -> None:
    """End the worker's process, which has no attempts."""
    worker.epoch += 1
    worker.candidates.clear()
    worker.displaced = False
    _enter(run, worker, WorkerStatus.STOPPED)
    run.emit(RemoveWorker(worker_id=worker.id, reason=reason))


def _end_attempts(
    run: Run, worker: Worker, error: str, recorded: Sequence[TrajectoryId] | None = None
) -> None:
    """End the worker's attempts. `recorded` are the attempts that have recorded turns.
    It is None if the worker's host was lost; otherwise each attempt that was running
    may be the cause.
    """
    known = set(recorded) if recorded is not None else None
    for trajectory in [run.state.trajectories[name] for name in worker.attempts]:
        attempts.note_failure(run, StopReason.WORKER_LOST, error)
        continuation.keep_if_recorded(run, trajectory, known)
        attempts.release_turn(run, trajectory)
        if known is not None and trajectory.stage in ALIVE:
            trajectories.suspect(run, trajectory)
        trajectories.end_attempt(run, trajectory, trajectory.closing or StopReason.WORKER_LOST)


def _restart(run: Run, worker: Worker, reason: str) -> None:
    """Restart the worker, or give it up after repeated failures. The run ends if no
    worker is left.
    """
    state = run.state
    if worker.restarts < run.config.watchdog.restarts:
        run.warn(worker.id, f"restarted: {reason}", count="worker_restarted")
        worker.restarts += 1
        _begin(run, worker, reason)
        return
    run.warn(
        worker.id, f"given up after {worker.restarts} restarts: {reason}", count="worker_failed"
    )
    worker.epoch += 1
    _enter(run, worker, WorkerStatus.FAILED)
    run.emit(RemoveWorker(worker_id=worker.id, reason=reason))
    failed = all(one.status is WorkerStatus.FAILED for one in state.workers.values())
    if failed and not state.serving and state.phase is not Phase.FINISHED:
        state.error = state.error or f"no worker is left; the last one ({worker.id}): {reason}"


def _begin(run: Run, worker: Worker, reason: str, *, moves: bool = False) -> None:
    """Start the next epoch of the worker on its host, or on any host with a place if
    its own is gone or the worker `moves`.
    """
    state = run.state
    if moves or worker.host not in state.hosts.up:
        place = bindings.bind_worker(run.config, state, worker.id)
        if place is None:
            if worker.status is not WorkerStatus.UNPLACED:
                run.warn(worker.id, f"waits for a host: {reason}", count="worker_unplaced")
                worker.epoch += 1
                _enter(run, worker, WorkerStatus.UNPLACED)
                run.emit(RemoveWorker(worker_id=worker.id, reason=reason))
            return
        worker.displaced = not moves and worker.status is not WorkerStatus.UNPLACED
        worker.candidates.clear()
        worker.host = place
    worker.epoch += 1
    _enter(run, worker, WorkerStatus.STARTING)
    run.emit(
        RestartWorker(worker_id=worker.id, host=worker.host, epoch=worker.epoch, reason=reason)
    )


def waits(run: Run, _received: Mapping[str, tuple[int, int]], start_s: float) -> Iterator[Wait]:
    """Yield the present waits for workers."""
    state = run.state
    for worker in state.workers.values():
        name = f"worker {worker.id}"
        if worker.status is WorkerStatus.STARTING:
            where = on_host(state, worker.host)
            yield Wait(
                component=f"{name}{where}", what="starting", since=worker.since, limit_s=start_s
            )
        elif worker.status is WorkerStatus.UNPLACED:
            yield Wait(component=name, what="no host has a place for it", since=worker.since)
        elif worker.status is WorkerStatus.DRAINING and len(state.workers) == 1:
            what = f"ending {len(worker.attempts)} attempts before it moves to another host"
            yield Wait(component=name, what=what, since=worker.since)
