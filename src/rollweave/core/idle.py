"""Account for time: seconds of engines and of the trainer by what they did or waited
for, exact to the event.
"""

from rollweave.core.run import Run
from rollweave.core.state import Phase, TrainerStatus


def charge(run: Run) -> None:
    """Charge the time since the last event to the causes that held during it.

    Call before the event changes anything.
    """
    state, idle = run.state, run.state.idle
    if idle.clock is None or run.now <= idle.clock or state.phase is Phase.FINISHED:
        idle.clock = run.now if idle.clock is None else max(idle.clock, run.now)
        return
    elapsed = run.now - idle.clock
    idle.clock = run.now
    fleet = run.fleet
    prefilling = sum(bool(state.engines[name].active) for name in fleet.prefill)
    for cause, count in (
        ("starting", fleet.starting),
        ("weights", fleet.updating),
        ("training", fleet.released),
        ("busy", fleet.busy + prefilling + fleet.draining),
        ("prompts", len(fleet.prefill) - prefilling),
    ):
        if count:
            idle.engines[cause] = idle.engines.get(cause, 0.0) + elapsed * count
    waiting = len(fleet.loads) - fleet.busy
    if waiting:
        cause = cause_of_waiting(run)
        idle.engines[cause] = idle.engines.get(cause, 0.0) + elapsed * waiting
    cause = _trainer_cause(run)
    idle.trainer[cause] = idle.trainer.get(cause, 0.0) + elapsed


def cause_of_waiting(run: Run) -> str:
    """The reason why serving engines have no turns."""
    state, turns = run.state, run.state.turns
    waiting = len(turns.queue) + len(turns.suspects)
    if state.pools.init or len(state.pools.run) > run.fleet.active + waiting:
        return "environment"
    if state.pools.run:
        # all turns are on other engines, or wait for one that is loading weights
        return "stragglers"
    if state.pools.eval or state.pools.eval_queued:
        return "reward"
    return "window"  # the mode admits no launch: rollouts may not run further ahead of training


def _trainer_cause(run: Run) -> str:
    match run.state.trainer.status:
        case TrainerStatus.STARTING:
            return "starting"
        case TrainerStatus.MEASURING:
            return "measuring"
        case TrainerStatus.TRAINING:
            return "busy"
        case TrainerStatus.PUBLISHING:
            return "publishing"
        case TrainerStatus.SAVING:
            return "saving"
        case TrainerStatus.IDLE:
            return "batch" if run.training else "evaluation"
