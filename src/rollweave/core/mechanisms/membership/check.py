"""Invariants of the engines that join and leave."""

from rollweave.core.mechanisms.membership.members import number_of, remaining_engines
from rollweave.core.run import Run
from rollweave.core.state import EngineStatus, Phase


def check(run: Run) -> None:
    """Assert that engine numbers are used once, that a leaving engine launches nothing,
    and that the last engine of a training run stays.
    """
    state = run.state
    if state.serving or state.phase is Phase.FINISHED:
        return
    engines = list(state.engines.values())
    assert all(number_of(engine.id) < state.membership.next_number for engine in engines), (
        state.membership.next_number
    )
    assert not {*state.membership.withdrawn} & state.engines.keys(), (
        f"{state.membership.withdrawn} were withdrawn for good"
    )
    leaving = [engine for engine in engines if engine.leaving]
    assert not leaving or remaining_engines(state, leaving[0]), f"all engines leave: {leaving}"
    for engine in leaving:
        assert not run.pacing.interchangeable or engine.draining, f"{engine} takes turns"
        assert engine.status is not EngineStatus.STARTING or not engine.active, engine
