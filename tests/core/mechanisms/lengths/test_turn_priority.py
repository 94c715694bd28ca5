"""Ranks of turns that an engine has, and what promotes them."""

from rollweave.core import dispatching
from rollweave.core.mechanisms.lengths import estimates as turn_priority
from rollweave.core.mechanisms.lengths.index import work_of
from rollweave.core.policy.scheduling import OVERTAKES, overdue_rank
from rollweave.core.run import Run
from rollweave.core.state import EngineStatus, OnEngine, Queued, Trajectory
from rollweave.core.turn_queues import QueuedTurn
from rollweave.schema import commands as c
from tests.support.kinds import of
from tests.support.states import E0, members, running

SLOTS = 2


def crowded() -> Run:
    """An engine of two slots has three turns, of ranks 5, 4 and 1."""
    run = running(10, 10, 10)
    engine = run.state.engines[E0]
    engine.status, engine.abilities.max_slots = EngineStatus.SERVING, SLOTS
    run.fleet_changed()
    for number, (one, rank) in enumerate(zip(members(run), (5.0, 4.0, 1.0), strict=True)):
        one.open_turn.rank, one.open_turn.arrival = rank, number
        one.open_turn.place = OnEngine(engine=E0, given=number)
        run.fleet.occupy(engine, one.id, one.open_turn)
    engine.turns_given = 2 + OVERTAKES * SLOTS
    run.out = []
    return run


def reranked(run: Run) -> list[tuple[str, float]]:
    return [(one.trajectory_id, one.rank) for one in of(run.out, c.RerankTurn)]


def victim(run: Run) -> Trajectory:
    return members(run)[2]


def test_a_turn_that_was_overtaken_too_often_is_promoted() -> None:
    run = crowded()
    turn_priority.promote_overdue(run)
    assert reranked(run) == []
    run.state.engines[E0].turns_given += 1
    turn_priority.promote_overdue(run)
    rank = overdue_rank(victim(run).open_turn.arrival)
    assert reranked(run) == [(victim(run).id, rank)]
    assert victim(run).open_turn.rank == rank
    assert run.state.counters.scheduling.overdue == 1
    assert run.fleet.loads[E0].lowest == 5.0


def test_an_engine_with_a_slot_for_each_turn_has_no_victims() -> None:
    run = crowded()
    run.state.engines[E0].turns_given += 100
    run.state.engines[E0].abilities.max_slots = 3
    run.fleet_changed()
    turn_priority.promote_overdue(run)
    assert reranked(run) == []


def test_a_new_estimate_changes_the_rank_of_a_turn_on_its_engine() -> None:
    run = crowded()
    one = victim(run)
    work_of(run, one).length_bucket = 7
    turn_priority.rerank(run, one)
    assert reranked(run) == [(one.id, 7.0)]
    turn_priority.rerank(run, one)
    assert len(reranked(run)) == 1, "the same rank is not sent again"
    one.open_turn.rank = overdue_rank(one.open_turn.arrival)
    work_of(run, one).length_bucket = 3
    turn_priority.rerank(run, one)
    assert len(reranked(run)) == 1, "an overdue turn keeps its rank"


def test_a_new_estimate_changes_the_rank_of_a_turn_that_waits() -> None:
    run = crowded()
    one = victim(run)
    turn = one.open_turn
    run.fleet.vacate(run.state.engines[E0], one.id, turn)
    run.state.turns.queue[one.id] = None
    turn.place, turn.rank, work_of(run, one).length_bucket = (
        Queued(engine=None, given=0, tiebreak=0.0),
        1.0,
        7,
    )
    dispatching.requeue(run, QueuedTurn(one, turn, turn.place))
    assert turn.rank == 7.0
    turn.rank = overdue = overdue_rank(turn.arrival)
    assert isinstance(turn.place, Queued)
    dispatching.requeue(run, QueuedTurn(one, turn, turn.place))
    assert turn.rank == overdue, "an overdue turn keeps its rank"
