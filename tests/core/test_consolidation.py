"""Consolidation knows the KV and the work of each engine before it plans."""

from rollweave.core.mechanisms.lengths.index import index_of
from rollweave.core.mechanisms.lengths.state import work_of
from rollweave.core.mechanisms.versions import consolidation
from rollweave.core.mechanisms.versions.consolidation import CONSOLIDATION_S
from rollweave.core.mechanisms.versions.repack import Move
from rollweave.core.mechanisms.versions.state import batch_of
from rollweave.core.run import Run
from rollweave.core.state import Queued
from rollweave.schema.base import EngineId
from tests.support.hand import E0, E1, Hand, decoupled_config


def outdated(*, context: int, **sections: dict[str, object]) -> Run:
    """Two engines with older weights, whose trajectories all have contexts so long."""
    run = Hand(decoupled_config(**sections)).core._run
    run.state.publication.id += 1
    lengthen(run, context)
    run.now = run.state.mechanisms["versions"].consolidated_at = 0.0
    return run


def peak_of(run: Run, engine_id: EngineId) -> int | None:
    return batch_of(run, run.state.engines[engine_id]).peak_kv


def lengthen(run: Run, context: int) -> None:
    for trajectory in run.state.trajectories.values():
        trajectory.context_tokens = context


def test_an_engines_peak_is_the_most_that_it_held() -> None:
    run = outdated(context=400)
    peaks = []
    for context in (400, 450, 300):
        lengthen(run, context)
        consolidation.run_now(run)
        peaks.append([peak_of(run, engine_id) for engine_id in (E0, E1)])
    assert peaks == [[800, 800], [900, 900], [900, 900]]


def test_it_runs_once_in_a_period() -> None:
    run = outdated(context=400)
    run.now = CONSOLIDATION_S - 0.1
    consolidation.check_due(run)
    assert peak_of(run, E0) is None
    run.now = CONSOLIDATION_S
    consolidation.check_due(run)
    assert peak_of(run, E0) == 800
    assert run.state.mechanisms["versions"].consolidated_at == CONSOLIDATION_S


def test_engines_with_the_newest_weights_or_that_leave_are_not_considered() -> None:
    run = outdated(context=400)
    run.state.engines[E0].leaving = True
    run.state.engines[E1].publication_id = run.state.publication.id
    consolidation.run_now(run)
    assert [peak_of(run, engine_id) for engine_id in (E0, E1)] == [None, None]


def test_without_consolidation_nothing_is_considered() -> None:
    run = outdated(context=400, ablation={"without": ["repack"]})
    consolidation.run_now(run)
    assert peak_of(run, E0) is None


def test_the_batch_bound_is_the_least_of_the_engines() -> None:
    run = outdated(context=400)
    run.state.engines[E1].abilities.max_slots = 7
    assert consolidation._batch_max(run, [E0, E1]) == min(
        run.state.engines[E0].abilities.max_slots, 7
    )
    assert consolidation._batch_max(run, [E1]) == 7


def test_a_queued_turn_without_kv_waits_for_the_new_engine() -> None:
    run = Hand(decoupled_config()).core._run
    (one, *_) = (run.state.trajectories[name] for _, name in index_of(run).loads[E0].remaining)
    assert one.turn is not None
    run.fleet.vacate(run.state.engines[E0], one.id, one.turn)
    work_of(run, one).kv_resident, one.turn.place = False, Queued(given=0, engine=E0, tiebreak=0.0)
    run.state.turns.queue[one.id] = one.turn.arrival
    consolidation._move_all(run, Move(source=E0, target=E1))
    assert work_of(run, one).assigned_engine == E1
    assert isinstance(one.turn.place, Queued)
    assert one.turn.place.engine == E1
