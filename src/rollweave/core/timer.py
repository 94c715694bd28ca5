"""The timer after which the watchdog checks the deadlines."""

from rollweave.core.run import Run
from rollweave.schema.commands import SetTimer

MIN_PERIOD_S = 1.0
"""Minimum seconds between two checks of the deadlines."""

CHECKS_PER_LIMIT = 60
"""Checks within the shortest limit: a late answer is noticed at most a sixtieth of the
limit late.
"""


def set_timer(run: Run) -> None:
    """Set the timer for the next check, or for the first engine that has rested."""
    rests = [until for engine in run.state.engines.values() for until in engine.barred.values()]
    run.emit(SetTimer(at=min([run.now + _period_s(run), *rests])))


def _period_s(run: Run) -> float:
    limits = run.config.watchdog
    waits = [
        limits.start_s,
        limits.turn_s,
        limits.weights_s,
        limits.train_s,
        *(task.step_s for task in run.tasks.values()),
    ]
    return min(max(MIN_PERIOD_S, min(waits) / CHECKS_PER_LIMIT), run.pacing.check_s)
