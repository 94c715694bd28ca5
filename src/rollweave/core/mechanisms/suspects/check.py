"""Invariants of suspects."""

from rollweave.core.run import Run
from rollweave.core.state import Suspicion


def check(run: Run) -> None:
    """Assert that a suspect is alone on its engine, that an engine is kept only for a
    suspect that waits for it, and that losses in doubt are those of the engine's
    earlier processes.
    """
    state = run.state
    for engine in state.engines.values():
        for name in engine.active:
            turn = state.trajectories[name].open_turn
            if turn.suspicion is not None and engine.failures.isolates == name:
                assert list(engine.active) == [name], engine
        isolated = engine.failures.isolates
        assert isolated is None or isolated in {**engine.active, **state.turns.suspects}, engine
    kept = [
        engine.failures.isolates
        for engine in state.engines.values()
        if engine.failures.isolates is not None
    ]
    assert len(kept) == len(set(kept)), f"two engines are for one suspect: {kept}"
    for engine in run.state.engines.values():
        for epoch, count in engine.failures.doubted.items():
            suspicion = Suspicion(engine=engine.id, epoch=epoch)
            turns_ = [run.state.trajectories[member].turn for member in run.state.pools.run]
            open_ = sum(turn is not None and turn.suspicion == suspicion for turn in turns_)
            assert epoch < engine.epoch, engine
            assert open_ <= count, f"{engine} doubts fewer turns than are suspects"
