"""The start of a world, the first one or after the controller was lost
(docs/decisions/0007).
"""

from rollweave.core import (
    continuation,
    ending,
    engines,
    evaluation,
    groups,
    lifecycle,
    serving,
    training,
    trajectories,
    watchdog,
)
from rollweave.core.run import Run
from rollweave.core.state import ALIVE, GroupStatus, Phase, Stage
from rollweave.schema.commands import DrawTask
from rollweave.schema.events import RunStarted, WorldLost
from rollweave.schema.hosts import HostSlot
from rollweave.schema.work import StopReason


def on_started(run: Run, event: RunStarted) -> None:
    run.state.run_id, run.state.life = event.run_id, event.life
    run.state.trainer.since = run.now
    _start_hosts(run, event)
    engines.start(run, event.engines)
    run.state.serving = event.serving
    if event.serving:
        serving.begin(run)
    watchdog.check_deadlines(run)


def _start_hosts(run: Run, event: RunStarted | WorldLost) -> None:
    """Record the hosts that a new world begins with."""
    part = run.state.hosts
    alone = [HostSlot(number=number) for number in range(max(1, event.relays))]
    part.up = {host.number: host for host in event.hosts or alone}
    part.ranks = list(event.ranks)


def on_world_lost(run: Run, event: WorldLost) -> None:
    """Every process of the old world is gone; what was scored and stored survives.

    Attempts in flight end, blamed on the infrastructure, and start again; those whose
    turns are recorded may continue (`core/continuation`). The trainer comes back from
    its last checkpoint.
    """
    state = run.state
    if state.serving:
        _resume_service(run, event)
        return
    killed = state.phase is not Phase.FINISHED
    ending.reopen(run)
    if state.phase is Phase.FINISHED:
        return
    evaluation.suspend(run)
    _replace_world(run, event, killed=killed)
    taken, state.trainer.batch = state.trainer.batch, []
    groups.return_to_buffer(run, taken, trained=False)
    state.trainer.parts_done = 0
    state.trainer.restarts = 0
    state.publication.id = -1
    lost = {
        state.trajectories[member].group_id: None
        for member in event.missing
        if member in state.trajectories
    }
    for group_id in lost:
        group = state.groups[group_id]
        if group.status in (GroupStatus.ACTIVE, GroupStatus.COMPARING, GroupStatus.BUFFERED):
            groups.drop(run, group, StopReason.WORLD_LOST)
        else:
            group.tokens_lost = True  # trained: its tokens are needed only if its step is lost
    for group in state.groups.values():
        if group.status is GroupStatus.DRAWING:
            group.since = run.now
            run.emit(
                DrawTask(
                    group_id=group.id, name=group.name, index=group.index, purpose=group.purpose
                )
            )
    training.start_process(run, "the controller was restarted")
    # after that, since a group that completes is judged by the version of the next step
    for group in list(state.groups.values()):  # some are dropped
        if group.status is GroupStatus.COMPARING:
            groups.resume_comparison(run, group)
    watchdog.check_deadlines(run)


def _resume_service(run: Run, event: WorldLost) -> None:
    """Start submitted rollouts again; deliver those that were over again, unless their
    tokens are gone.
    """
    state = run.state
    killed = state.phase is not Phase.FINISHED
    state.phase = Phase.SERVING
    _replace_world(run, event, killed=killed)
    for trajectory in [
        state.trajectories[member] for member in event.missing if member in state.trajectories
    ]:
        trajectories.end_attempt(run, trajectory, StopReason.WORLD_LOST)
    lifecycle.settle(run)
    serving.begin(run)
    watchdog.check_deadlines(run)


def _replace_world(run: Run, event: WorldLost, *, killed: bool) -> None:
    """Record that engines of the new world are starting; end attempts that were under
    way, and queue them again if wanted.

    `killed`: the old world did not end in order.
    """
    state = run.state
    state.life = event.life
    state.turns.queue.clear()
    state.turns.suspects.clear()
    run.rebuild_turn_queues()
    state.publication.checkpointed.clear()
    _start_hosts(run, event)
    engines.start(run, event.engines)
    recorded = set(event.recorded)
    continuation.controller_lost(run, recorded)
    for trajectory in list(state.trajectories.values()):
        if trajectory.stage in ALIVE or trajectory.stage is Stage.EVAL_QUEUED:
            trajectory.turn = None
            if trajectory.id in recorded and trajectory.closing is None:
                continuation.keep(run, trajectory)
            if killed and trajectory.stage in ALIVE:
                trajectories.suspect(run, trajectory)
            trajectories.end_attempt(run, trajectory, trajectory.closing or StopReason.WORLD_LOST)
    lifecycle.settle(run)
