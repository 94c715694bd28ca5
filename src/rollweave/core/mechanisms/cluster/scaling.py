"""The number of rollout workers, if it changes with the attempts that want a place
(Heddle §3, the tool manager; `mechanisms/cluster/workers`).

Each worker has places for an equal share of the environments that may be alive
(`rollout.max_running`) until all of them are there. A place is wanted by each attempt
that a worker has, and by each trajectory that could start if there were a place.
Trajectories of groups whose task is still to be drawn count, too, since workers draw
the tasks. No attempt is ended to reduce the number of workers.
"""

from collections.abc import Iterator

from rollweave.core import attempts, trajectories
from rollweave.core.mechanisms.cluster import workers
from rollweave.core.mechanisms.cluster.workers import Cluster, needed, observe
from rollweave.core.policy.places import room_in_init
from rollweave.core.run import Run
from rollweave.core.state import GroupStatus, State, Worker, WorkerStatus
from rollweave.schema.work import Purpose

GONE = (WorkerStatus.RETIRING, WorkerStatus.STOPPED, WorkerStatus.FAILED)
"""Statuses of workers that do not count, because they take no attempts now or later."""

IDLE_S = 60.0
"""Seconds for which a worker is kept that has not been needed, unless a start takes
longer.
"""


def resize(run: Run) -> None:
    """Start or wake the workers that are needed, and retire workers that have not been
    needed for long.
    """
    if not run.config.workers.elastic:
        return
    state, wanted = run.state, run.config.workers
    part = run.part(Cluster).scaling
    part.peaks = observe(
        part.peaks,
        needed(_wanting(run), workers=_usable(state), at_once=run.places.alive),
        now=run.now,
        window_s=max(IDLE_S, part.start_s),
    )
    part.target = max(wanted.first, part.peaks[0].workers)
    here = [worker for worker in state.workers.values() if worker.status not in GONE]
    sleeping = [*_having(state, WorkerStatus.RETIRING), *_having(state, WorkerStatus.STOPPED)]
    for worker in sleeping[: max(0, part.target - len(here))]:
        workers.wake(run, worker)
    here.reverse()  # of equal workers, the last retires
    for worker in sorted(here, key=_cost_of_end)[: max(0, len(here) - part.target)]:
        workers.retire(run, worker)
    workers.stop_retired(run)


def waiting(run: Run) -> int:
    """Return the number of trajectories that would start if workers had a place for
    all.
    """
    queued = len(run.state.pools.queued) if trajectories.may_start(run) else 0
    return min(room_in_init(run.places, attempts.taken(run)), queued)


def _wanting(run: Run) -> int:
    """Return the number of places that are wanted."""
    state = run.state
    taken = sum(len(worker.attempts) for worker in state.workers.values())
    room = room_in_init(run.places, attempts.taken(run))
    drawn = 0 if state.serving else sum(_drawn(run))
    return max(taken + min(room, waiting(run) + drawn), 1 if drawn else 0)


def _drawn(run: Run) -> Iterator[int]:
    """Yield the size of each group whose task is still to be drawn."""
    state = run.state
    evaluation = state.evaluations.current
    for group_id in [*state.drawing.active, *(evaluation.pending if evaluation else ())]:
        group = state.groups[group_id]
        if group.status is GroupStatus.DRAWING:
            yield run.group_sizes[group.name] if group.purpose is Purpose.TRAIN else 1


def _usable(state: State) -> int:
    """Return the number of workers that take attempts, or could."""
    return sum(worker.status is not WorkerStatus.FAILED for worker in state.workers.values())


def _having(state: State, status: WorkerStatus) -> list[Worker]:
    return [worker for worker in state.workers.values() if worker.status is status]


def _cost_of_end(worker: Worker) -> tuple[bool, int]:
    """Return the key by which workers are chosen to retire, the least key first:
    workers that take no attempts yet, then workers with the fewest attempts.
    """
    return worker.status is WorkerStatus.READY, len(worker.attempts)
