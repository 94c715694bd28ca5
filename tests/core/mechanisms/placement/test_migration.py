"""A trajectory moves to another engine where that pays, and its turn follows."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.core.mechanisms.lengths.index import index_of, reindex, work_of
from rollweave.core.mechanisms.placement import migration
from rollweave.core.mechanisms.placement import transfers as moves
from rollweave.core.mechanisms.placement.assignment import migration_of, retarget
from rollweave.core.mechanisms.placement.migration import GAIN, worth_it
from rollweave.core.mechanisms.placement.transfers import (
    MEMORY,
    TRANSFER_S,
    Request,
    transfer_epoch,
)
from rollweave.core.run import Run
from rollweave.core.state import EngineStatus, Trajectory, Turn
from rollweave.schema import commands as c
from rollweave.schema.base import EngineId
from rollweave.schema.events import MigrationDone
from tests.support.kinds import of
from tests.support.properties import examples
from tests.support.states import E0, E1, members, running

EIGHT = (100,) * 8
"""Estimates of twice as many trajectories as an engine has slots."""


def uneven(*estimates: int) -> Run:
    """All trajectories are on the first of two engines that serve the same weights, and
    their environments work.
    """
    run = running(*estimates, engine=E0)
    for engine in run.state.engines.values():
        engine.status, engine.publication_id = EngineStatus.SERVING, 0
    for one in members(run):
        one.turn = None
    run.fleet_changed()
    run.out = []
    return run


def transfers(run: Run) -> list[tuple[str, EngineId, EngineId]]:
    return [
        (command.trajectory_id, command.source, command.target)
        for command in of(run.out, c.Migrate)
    ]


def moving() -> tuple[Run, Trajectory]:
    """The first is on its way to the other engine."""
    run = uneven(*EIGHT)
    longest = members(run)[0]
    assert migration.consider(run, longest) == []
    assert transfers(run) == [(longest.id, E0, E1)]
    return run, longest


def done(run: Run, *, tokens: int = 10, error: str = "", number: int = 0) -> list[Trajectory]:
    longest = members(run)[0]
    return moves.complete(
        run,
        MigrationDone(
            number=number,
            trajectory_id=longest.id,
            attempt=0,
            moved_tokens=tokens,
            error=error,
        ),
    )


def test_a_trajectory_moves_to_balance_the_engines() -> None:
    run, longest = moving()
    (open_,) = run.state.mechanisms["placement"].migrations.open.values()
    assert (open_.number, open_.since, migration_of(run, longest)) == (0, run.now, 0)
    assert run.state.mechanisms["placement"].migrations.next_number == 1
    assert migration.consider(run, longest) == []
    assert len(run.state.mechanisms["placement"].migrations.open) == 1, (
        "one at a time for each trajectory"
    )


@pytest.mark.parametrize("hindrance", ["busy target", "exposed", "other weights", "loading"])
def test_a_move_that_does_not_pay_or_cannot_be_is_not_planned(hindrance: str) -> None:
    run = uneven(*EIGHT)
    longest, *others = members(run)
    target = run.state.engines[E1]
    match hindrance:
        case "busy target":
            for other in others[::2]:
                work_of(run, other).assigned_engine = E1
                reindex(run, other)
        case "exposed":
            longest.context_tokens, run.state.mechanisms["placement"].migrations.token_s = (
                1000,
                1000.0,
            )
        case "other weights":
            target.publication_id = 1
        case "loading":
            target.status = EngineStatus.LOADING
    migration.consider(run, longest)
    assert transfers(run) == []
    assert run.state.mechanisms["placement"].migrations.open == {}


def test_a_transfer_that_the_tool_hides_costs_nothing() -> None:
    """A thousand tokens take 30 s; so does the environment, on average."""
    run = uneven(*EIGHT)
    longest = members(run)[0]
    longest.context_tokens, run.state.mechanisms["placement"].migrations.token_s = 1000, 0.03
    run.state.mechanisms["lengths"].domains["a"].tool_s = 30.0
    migration.consider(run, longest)
    assert transfers(run) == [(longest.id, E0, E1)]


def test_an_engine_is_in_one_transfer_at_a_time() -> None:
    run, longest = moving()
    second = members(run)[1]
    migration.consider(run, second)
    assert transfers(run) == [(longest.id, E0, E1)]
    assert migration_of(run, second) == 1
    assert run.state.mechanisms["placement"].migrations.open[1].since is None
    assert done(run) == []
    assert transfers(run)[1:] == [(second.id, E0, E1)], "it begins when the first has ended"


def test_kv_that_has_moved_makes_the_target_its_engine() -> None:
    run, longest = moving()
    run.now = 4.0
    assert done(run, tokens=8) == []
    assert (work_of(run, longest).assigned_engine, migration_of(run, longest)) == (E1, None)
    counted = run.state.counters.scheduling
    assert (counted.migrations, counted.moved_tokens, counted.migrations_failed) == (1, 8, 0)
    assert run.state.mechanisms["placement"].migrations.token_s == 4.0 / 8
    assert index_of(run).loads[E1].tokens == 100


def test_the_time_of_a_transfer_is_a_running_mean() -> None:
    run, _ = moving()
    run.state.mechanisms["placement"].migrations.token_s = 2.0
    run.now = 4.0
    done(run, tokens=8)
    assert run.state.mechanisms["placement"].migrations.token_s == pytest.approx(
        2.0 + MEMORY * (0.5 - 2.0)
    )


def test_kv_that_did_not_come_stays_where_it_is() -> None:
    run, longest = moving()
    run.now = 4.0
    assert done(run, tokens=0, error="lost") == []
    assert (work_of(run, longest).assigned_engine, migration_of(run, longest)) == (E0, None)
    counted = run.state.counters.scheduling
    assert (counted.migrations, counted.moved_tokens, counted.migrations_failed) == (0, 0, 1)
    assert run.state.mechanisms["placement"].migrations.token_s == 0.0
    (warning,) = of(run.out, c.Warn)
    assert "lost" in warning.message


def test_kv_that_moved_to_an_engine_that_drains_is_computed_again() -> None:
    run, longest = moving()
    run.state.engines[E1].draining = True
    done(run)
    assert work_of(run, longest).assigned_engine == E0
    run.state.engines[E0].version = -1
    run, longest = moving()
    for engine in run.state.engines.values():
        engine.draining = True
    done(run)
    assert work_of(run, longest).assigned_engine is None


def test_a_turn_waits_for_the_transfer_and_is_released() -> None:
    run, longest = moving()
    assert moves.holds_turn(run, longest)
    longest.turn = Turn(number=0, context_tokens=0, since=1.0)
    run.now = 4.0
    assert done(run) == [longest]
    assert run.state.counters.scheduling.exposed_s == 3.0
    assert not moves.holds_turn(run, longest)


def test_a_turn_does_not_wait_for_a_transfer_that_has_not_begun() -> None:
    run, _ = moving()
    second = members(run)[1]
    migration.consider(run, second)
    assert not moves.holds_turn(run, second)
    assert migration_of(run, second) is None
    assert list(run.state.mechanisms["placement"].migrations.open) == [0]
    assert run.state.counters.scheduling.migrations_dropped == 1


def test_an_answer_to_no_transfer_changes_nothing() -> None:
    run, longest = moving()
    assert done(run, number=7) == []
    run.state.mechanisms["placement"].migrations.open[0].since = None
    assert done(run) == []
    assert (migration_of(run, longest), work_of(run, longest).assigned_engine) == (0, E0)


def test_a_late_transfer_is_given_up() -> None:
    run, longest = moving()
    longest.turn = Turn(number=0, context_tokens=0, since=1.0)
    run.now = TRANSFER_S
    assert moves.give_up_late(run) == []
    run.now += 0.1
    assert moves.give_up_late(run) == [longest]
    assert work_of(run, longest).assigned_engine == E0
    assert run.state.mechanisms["placement"].migrations.open == {}
    assert run.state.counters.scheduling.migrations_failed == 1


def test_a_trajectory_that_vacates_an_engine_never_returns() -> None:
    run, longest = moving()
    done(run)
    moves.vacate(run, longest, E1, E0)
    assert moves.holds_turn(run, longest), "even before the transfer begins"
    assert moves.begin(run) == []
    assert transfers(run)[-1] == (longest.id, E1, E0)
    run.state.engines[E0].draining = True
    done(run, tokens=0, error="lost", number=1)
    assert work_of(run, longest).assigned_engine is None


def test_a_turn_that_waits_to_vacate_is_released_if_the_target_has_changed() -> None:
    run = uneven(*EIGHT)
    longest = members(run)[0]
    longest.turn = Turn(number=0, context_tokens=0, since=1.0)
    moves.vacate(run, longest, E0, E1)
    run.state.engines[E1].draining = True
    run.now = 3.0
    assert moves.begin(run) == [longest]
    assert (migration_of(run, longest), work_of(run, longest).assigned_engine) == (None, None)
    counted = run.state.counters.scheduling
    assert (counted.migrations_failed, counted.migrations, counted.moved_tokens) == (1, 0, 0)


@pytest.mark.parametrize("without", [E0, E1])
def test_engines_that_cannot_move_kv_get_no_transfer(without: EngineId) -> None:
    run = uneven(*EIGHT)
    run.state.engines[without].abilities.moves_kv = False
    assert migration.consider(run, members(run)[0]) == []
    assert transfers(run) == []
    assert run.state.mechanisms["placement"].migrations.open == {}


def test_trajectories_vacate_an_engine_that_cannot_move_kv_at_once() -> None:
    run = uneven(*EIGHT)
    run.state.engines[E0].abilities.moves_kv = False
    leaving = members(run)
    for one in leaving:
        one.turn = Turn(number=0, context_tokens=0, since=1.0)
        moves.vacate(run, one, E0, E1)
    run.out = []
    assert moves.begin(run) == leaving
    assert {(migration_of(run, one), work_of(run, one).assigned_engine) for one in leaving} == {
        (None, E1)
    }
    assert run.out == []
    counted = run.state.counters.scheduling
    assert (counted.migrations_failed, counted.moved_tokens) == (0, 0)


def test_an_engine_that_loads_weights_is_no_source() -> None:
    run = uneven(*EIGHT)
    source, target = (run.state.engines[engine_id] for engine_id in (E0, E1))
    assert moves.can_take(source, target)
    source.status = EngineStatus.LOADING
    assert not moves.can_take(source, target)


# Migration.


@settings(max_examples=examples(200))
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(sum), active=st.integers(1, 40)
)
def test_ranks_fill_the_shares_in_proportion(sizes: list[int], active: int) -> None:
    targets = [retarget(sizes, rank=rank, active=active) for rank in range(active)]
    assert targets == sorted(targets)
    assert all(sizes[target] for target in targets), "an empty share gets no rank"
    for index, size in enumerate(sizes):
        assert abs(targets.count(index) - size * active / sum(sizes)) < 1
    if active == sum(sizes):
        assert [targets.count(index) for index in range(len(sizes))] == sizes


@pytest.mark.parametrize(
    ("sizes", "rank", "active", "text"),
    [
        *(([], 0, 1, "sizes"), ([0], 0, 1, "sizes"), ([2, -1], 0, 1, "sizes")),
        *(([1], 1, 1, "rank"), ([1], -1, 1, "rank")),
    ],
)
def test_refuses_invalid_ranks(sizes: list[int], rank: int, active: int, text: str) -> None:
    with pytest.raises(ValueError, match=f"{text} must be"):
        retarget(sizes, rank=rank, active=active)


def test_a_move_pays_where_the_later_engine_ends_clearly_earlier() -> None:
    assert worth_it((100.0, 90.0), (10.0, 20.0), exposed_s=1.0)
    assert not worth_it((100.0, 90.0), (10.0, 20.0), exposed_s=10.0)
    assert not worth_it((100.0, 90.0), (99.0, 105.0), exposed_s=0.0)
    assert not worth_it((100.0, 100.0 - 50 * GAIN), (10.0, 20.0), exposed_s=0.0)
    assert worth_it((50.0, 10.0), (100.0, 60.0), exposed_s=0.0), "the target is the later one"


def test_a_move_that_saves_just_its_cost_does_not_pay() -> None:
    assert not worth_it((100.0, 0.0), (0.0, 92.0), exposed_s=3.0)
    assert worth_it((100.0, 0.0), (0.0, 91.9), exposed_s=3.0)


REQUESTS = st.lists(
    st.tuples(st.integers(1, 5), st.sampled_from("abcdef"), st.sampled_from("abcdef")).filter(
        lambda r: r[1] != r[2]
    ),
    max_size=8,
)


@settings(max_examples=examples(200))
@given(drawn=REQUESTS, busy=st.sets(st.sampled_from("abcdef"), max_size=3))
def test_an_epoch_is_greedy_by_length_and_shares_no_engine(
    drawn: list[tuple[int, str, str]], busy: set[str]
) -> None:
    requests = [
        Request(
            number=number, length=float(length), source=EngineId(source), target=EngineId(target)
        )
        for number, (length, source, target) in enumerate(drawn)
    ]
    chosen = transfer_epoch(requests, [EngineId(name) for name in busy])
    ends = [end for request in chosen for end in (request.source, request.target)]
    assert len(set(ends)) == len(ends)
    assert not busy & set(ends)
    for left in [request for request in requests if request not in chosen]:
        longer = [
            other for other in chosen if (-other.length, other.number) < (-left.length, left.number)
        ]
        used = set(itertools.chain(busy, *((other.source, other.target) for other in longer)))
        assert used & {left.source, left.target}, "a longer one or a busy engine stands in its way"
