"""Where the time goes: seconds of engines and trainer by what they did or waited for. Kept exactly, from event to event."""

from rollweave.core.run import Run
from rollweave.core.state import Engine, EngineStatus, Phase, TrainerStatus


def account(run: Run) -> None:
    """Charge the time since the last event to the causes that held during it. Called before the event changes anything."""
    state, idle = run.state, run.state.idle
    if idle.clock is None or run.now <= idle.clock or state.phase is Phase.FINISHED:
        idle.clock = run.now if idle.clock is None else max(idle.clock, run.now)
        return
    elapsed = run.now - idle.clock
    idle.clock = run.now
    for engine in state.engines.values():
        cause = _engine_cause(run, engine)
        idle.engines[cause] = idle.engines.get(cause, 0.0) + elapsed
    cause = _trainer_cause(run)
    idle.trainer[cause] = idle.trainer.get(cause, 0.0) + elapsed


def _engine_cause(run: Run, engine: Engine) -> str:
    state = run.state
    match engine.status:
        case EngineStatus.STARTING:
            return "starting"
        case EngineStatus.STALE | EngineStatus.SUSPENDING | EngineStatus.LOADING:
            return "weights"
        case EngineStatus.SERVING:
            pass
    if engine.active:
        return "busy"
    if state.in_run or state.in_init:
        return "environment"
    if state.in_eval or state.eval_queue:
        return "reward"
    return "window"  # the mode admits nothing: rollouts may not run further ahead of training


def _trainer_cause(run: Run) -> str:
    match run.state.trainer.status:
        case TrainerStatus.STARTING:
            return "starting"
        case TrainerStatus.TRAINING:
            return "busy"
        case TrainerStatus.PUBLISHING:
            return "publishing"
        case TrainerStatus.SAVING:
            return "saving"
        case TrainerStatus.IDLE:
            return "batch" if run.training else "evaluation"
