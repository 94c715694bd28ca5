"""Invariants of rollout workers."""

from rollweave.core.mechanisms.cluster import scaling
from rollweave.core.mechanisms.cluster.scaling import GONE
from rollweave.core.mechanisms.cluster.workers import PROCESSLESS, Cluster
from rollweave.core.run import Run
from rollweave.core.state import ALIVE, Phase, Stage, WorkerStatus


def check(run: Run) -> None:
    """Assert that every attempt under way has one worker, which is ready, or no worker
    if attempts run in the controller. Until the run is over, no worker may be on a host
    that is gone.
    """
    state = run.state
    held: dict[str, str] = {}
    for worker in state.workers.values():
        assert not worker.attempts or worker.status in (
            WorkerStatus.READY,
            WorkerStatus.DRAINING,
            WorkerStatus.RETIRING,
        ), worker
        assert (
            worker.host in state.hosts.up
            or worker.status in PROCESSLESS
            or state.phase is Phase.FINISHED
        ), worker
        for trajectory_id in worker.attempts:
            assert trajectory_id not in held, f"{trajectory_id} is with two workers"
            held[trajectory_id] = worker.id
    for trajectory in state.trajectories.values():
        assert held.get(trajectory.id, "") == trajectory.worker, trajectory
        with_worker = trajectory.stage in ALIVE or trajectory.stage is Stage.EVAL_QUEUED
        assert with_worker or not trajectory.worker, trajectory
        assert not with_worker or bool(trajectory.worker) == bool(state.workers), trajectory
    _check_scaling(run)


def _check_scaling(run: Run) -> None:
    """Assert that there are as many workers as there should be, none too many, and that
    no attempt waits for a worker that is not on its way.
    """
    state, wanted, part = run.state, run.config.workers, run.part(Cluster).scaling
    statuses = [worker.status for worker in state.workers.values()]
    if not wanted.elastic:
        assert WorkerStatus.STOPPED not in statuses, statuses
        assert WorkerStatus.RETIRING not in statuses, statuses
        return
    if state.phase is Phase.FINISHED or not part.peaks:
        return
    here = sum(status not in GONE for status in statuses)
    failed = statuses.count(WorkerStatus.FAILED)
    assert here == min(part.target, wanted.maximum - failed), (here, part)
    assert wanted.first <= part.target <= wanted.maximum, part
    if scaling.waiting(run):
        assert here, "attempts wait, and no worker is on its way"
