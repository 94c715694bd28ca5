"""Mode decoupled, driven by hand: engines launch and update independently, trajectories
keep to their weights, and the buffer chooses.
"""

import itertools
from collections.abc import Iterator

import pytest

from rollweave.core.mechanisms.lengths.index import reindex, work_of
from rollweave.core.mechanisms.versions import binding as version_affinity
from rollweave.core.mechanisms.versions.binding import Versions, batch_of
from rollweave.core.mechanisms.versions.consolidation import CONSOLIDATION_S
from rollweave.core.policy.experience import Experience
from rollweave.core.state import EngineStatus, Stage
from rollweave.core.weight_updates import MAX_LOAD_FAILURES
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId, GroupId, TrajectoryId
from rollweave.schema.work import Purpose, StopReason
from tests.support.hand import E0, E1, Hand, decoupled_config, misassigned
from tests.support.random_world import World


def test_an_engine_updates_when_its_trajectories_are_over_without_waiting_for_others() -> None:
    hand = Hand(decoupled_config())
    first, second = hand.on(E0), hand.on(E1)
    assert len(first) == len(second) == 2
    for name in first:
        hand.end(name)
    assert len(hand.on(E0)) == 2, "it begins others, since its weights are the newest"
    hand.train_without(second)
    state = hand.core.state
    assert state.publication.version == 1
    assert [engine.version for engine in state.engines.values()] == [0, 0], "both have trajectories"
    hand.end(hand.on(E0)[0])
    assert len(hand.on(E0)) == 1, (
        "it has launched its batch and has old weights: it launches no more"
    )
    hand.end(hand.on(E0)[0])
    assert state.engines[E0].version == 1
    assert state.engines[E1].version == 0
    assert hand.on(E1) == second
    assert {state.trajectories[name].initiated for name in hand.on(E0)} == {1}


def end_apart(hand: Hand, engine_id: EngineId, orphans: list[TrajectoryId]) -> None:
    """End the trajectories of a lost engine, which run there one after another."""
    left = set(orphans)
    while left:
        (name,) = hand.on(engine_id)
        left.remove(name)
        assert hand.core.state.trajectories[name].attempt == 0
        hand.end(name)


def tail(hand: Hand) -> tuple[TrajectoryId, TrajectoryId]:
    """Engines 0 and 1 are down to one trajectory each, of version 0, and version 1 is
    published.
    """
    left, right = hand.on(E0)[1], hand.on(E1)[1]
    state = hand.core.state
    hand.train_without([left, right])
    while rest := [
        name
        for name in hand.turns
        if name not in (left, right) and state.trajectories[name].initiated == 0
    ]:
        hand.end(rest[0])
    assert hand.on(E0) == [left]
    assert hand.on(E1) == [right]
    return left, right


def test_consolidation_frees_an_engine_and_the_open_turn_follows_its_kv() -> None:
    hand = Hand(decoupled_config(engines=3))
    left, right = tail(hand)
    state = hand.core.state
    hand.wait(CONSOLIDATION_S)
    assert len(hand.moves) == 1
    move = hand.moves[0]
    assert {move.source, move.target} == {E0, E1}
    assert move.trajectory_id == (left if move.source == E0 else right)
    assert move.trajectory_id not in hand.turns, "its turn was taken back"
    assert state.engines[move.source].version == 0, "the KV is still there"
    hand.moved(move)
    assert hand.turns[move.trajectory_id].engine_id == move.target
    assert hand.turns[move.trajectory_id].dispatch == 1
    assert state.engines[move.source].version == 1
    assert state.engines[move.target].version == 0
    assert state.counters.scheduling.released == 1
    assert set(hand.on(move.target)) == {left, right}


@pytest.mark.parametrize("outcome", ["refused", "source lost", "target lost"])
def test_a_failed_transfer_leaves_no_trajectory_behind(outcome: str) -> None:
    hand = Hand(decoupled_config(engines=3))
    left, right = tail(hand)
    hand.wait(CONSOLIDATION_S)
    (move,) = hand.moves
    if outcome != "refused":
        hand.lose(move.source if outcome == "source lost" else move.target)
    hand.moved(move, error="lost on the way")
    state = hand.core.state
    # both wait: the other engines have other weights, or are about to take them
    if outcome == "target lost":
        hand.join(move.target)
    for _ in range(2):  # those of a lost engine run one after another
        name = next(name for name in (left, right) if name in hand.turns)
        assert state.engines[hand.turns[name].engine_id].version == 0
        hand.end(name)
    assert state.counters.scheduling.migrations_failed == 1
    assert all(
        engine.version != 0
        for engine in state.engines.values()
        if engine.status is EngineStatus.SERVING
    )


def test_engines_with_the_newest_weights_are_not_consolidated() -> None:
    hand = Hand(decoupled_config(batch=4))
    for engine_id in (E0, E1):
        hand.end(hand.on(engine_id)[0])
    hand.wait(CONSOLIDATION_S)
    hand.wait(CONSOLIDATION_S)
    assert hand.moves == []


def test_trajectories_of_a_lost_engine_go_to_another_one_with_the_same_weights() -> None:
    hand = Hand(decoupled_config())
    orphans = hand.on(E0)
    hand.lose(E0)
    assert not set(orphans) & hand.turns.keys(), "the slots of the other one are taken"
    hand.end(hand.on(E1)[0])
    hand.end(hand.on(E1)[0])
    end_apart(hand, E1, orphans)


def test_trajectories_of_a_lost_engine_wait_until_their_version_is_loaded_again() -> None:
    hand = Hand(decoupled_config())
    state = hand.core.state
    hand.train_without(hand.on(E1))
    while state.engines[E0].version == 0:
        hand.end(hand.on(E0)[0])
    assert [engine.version for engine in state.engines.values()] == [1, 0]
    orphans = hand.on(E1)
    hand.lose(E1)
    assert not set(orphans) & hand.turns.keys(), "no engine has version 0"
    assert set(state.mechanisms["versions"].unassigned) == set(orphans)
    hand.join(E1)
    assert hand.loads[-1].version == 0
    end_apart(hand, E1, orphans)
    assert state.engines[E1].version == 1


def test_a_version_only_in_a_checkpoint_is_loaded_from_there() -> None:
    hand = Hand(decoupled_config())
    state = hand.core.state
    orphans = misassigned(hand)
    hand.lose_trainer()
    assert state.publication.retained == {}
    hand.lose(E1)
    hand.join(E1)
    load = hand.loads[-1]
    expected = (E1, 0, 0, 0)
    assert (load.engine_id, load.version, load.publication_id, load.from_checkpoint) == expected
    end_apart(hand, E1, orphans)
    assert state.counters.retried == {}


def test_a_version_that_fails_from_memory_is_loaded_from_its_checkpoint() -> None:
    hand = Hand(decoupled_config())
    orphans = misassigned(hand)
    hand.refused = {0}
    hand.lose(E1)
    hand.join(E1)
    assert [load.from_checkpoint for load in hand.loads[-2:]] == [None, 0]
    end_apart(hand, E1, orphans)


def test_a_damaged_checkpoint_is_tried_once_and_no_engine_is_blamed() -> None:
    hand = Hand(decoupled_config())
    state = hand.core.state
    orphans = misassigned(hand)
    hand.damaged = {0}
    hand.lose_trainer()
    for _ in range(MAX_LOAD_FAILURES):
        hand.lose(E1)
        hand.join(E1)
    assert [load.from_checkpoint for load in hand.loads if load.publication_id == 0].count(0) == 1
    assert state.publication.checkpointed == {}
    assert state.counters.retried == {StopReason.ENGINE_FAILURE: len(orphans)}


def test_weights_read_from_a_changed_checkpoint_are_discarded() -> None:
    hand = Hand(decoupled_config())
    state = hand.core.state
    orphans = misassigned(hand)
    hand.lose_trainer()
    hand.lose(E1)
    hand.silent = True
    hand.join(E1)
    assert state.engines[E1].status is EngineStatus.LOADING
    state.publication.checkpointed.clear()  # as when the trainer finds it damaged
    hand.feed(e.WeightsLoaded(engine_id=E1, epoch=hand.epochs[E1], publication_id=0, version=0))
    assert state.engines[E1].version == -1
    assert not set(orphans) & set(hand.on(E1))


def test_a_checkpoint_holds_the_version_republished_after_a_restart_until_it_is_pruned() -> None:
    hand = Hand(decoupled_config(run={"checkpoint_every": 1}))
    state = hand.core.state
    hand.train_without([], version=2)
    assert state.publication.checkpointed == {1: 1, 2: 2}, (
        "version 0 was neither the last nor the best"
    )
    hand.lose_trainer()
    hand.restore_trainer(2)
    assert (state.publication.version, state.publication.id) == (2, 3)
    assert state.publication.checkpointed == {1: 1, 2: 2, 3: 2}
    hand.lose_trainer()
    hand.restore_trainer(1)
    assert state.publication.checkpointed == {1: 1, 4: 1}, (
        "what comes now as version 2 is another one"
    )


def test_a_checkpoint_stays_while_an_engine_reads_it() -> None:
    hand = Hand(decoupled_config(run={"checkpoint_every": 1}))
    orphans = misassigned(hand)
    hand.refused, hand.silent = {0}, True
    hand.lose(E1)
    hand.join(E1)
    hand.train_without([], version=3)
    assert [save.keep for save in hand.saves] == [(), (0,), (0, 1), (0, 2)]
    hand.feed(e.WeightsLoaded(engine_id=E1, epoch=hand.epochs[E1], publication_id=0, version=0))
    end_apart(hand, E1, orphans)


def test_random_worlds_read_only_checkpoints_with_the_required_version() -> None:
    """The world asserts that a checkpoint has the numbers that were published, also
    after another lineage has written it.
    """
    read = 0
    for seed in range(16):
        rollout = {"groups_per_step": 2, "group_size": 2, "max_running": 12}
        settings = decoupled_config(
            engines=3,
            steps=5,
            rollout=rollout,
            run={"checkpoint_every": 1},
            eval={"every": 2, "episodes": 2},
            watchdog={
                "turn_s": 60.0,
                "train_s": 600.0,
                "restarts": 50,
            },
            weights={"relays": 2 * (seed % 2)},
        )
        world = World(settings, seed, failure=0.06, spread=2.0)
        world.run()
        loads = world.sent(c.LoadWeights)
        read += sum(load.from_checkpoint is not None for load in loads)
    assert read > 3


def test_a_lost_version_means_a_new_attempt() -> None:
    hand = Hand(decoupled_config())
    state = hand.core.state
    orphans = misassigned(hand)
    hand.refused, hand.damaged = {0}, {0}
    hand.lose(E1)
    hand.join(E1)
    assert state.engines[E1].version == 1, "it took the newest instead"
    assert {
        (state.trajectories[name].attempt, state.trajectories[name].initiated) for name in orphans
    } == {(1, 1)}
    assert state.counters.retried == {StopReason.ENGINE_FAILURE: 2}


def test_an_evaluation_waits_for_a_free_engine_while_training_continues() -> None:
    hand = Hand(decoupled_config(eval={"every": 2, "episodes": 3}))
    state = hand.core.state
    assert state.evaluations.current.started
    finish_evaluation(hand)
    assert [(evaluation.version, evaluation.episodes) for evaluation in hand.evaluations] == [
        (0, {"a": 3})
    ]
    busy = [hand.on(E0)[0], hand.on(E1)[0]]
    hand.train_without(busy, version=2)
    assert (state.evaluations.current.version, state.evaluations.current.started) == (2, False), (
        "no engine is free"
    )
    publication_id = state.evaluations.current.publication_id
    while hand.moves:  # the new version has set repack off
        hand.moved(hand.moves[0])
    hand.end(busy[0])
    while not state.evaluations.current.started:
        hand.end(next(name for name in hand.turns if name != busy[1]))
    assert publication_id in {load.publication_id for load in hand.loads}
    finish_evaluation(hand)
    assert hand.evaluations[-1].version == 2


def finish_evaluation(hand: Hand) -> None:
    """Finish its episodes first, and others where they need the slots."""
    state, before = hand.core.state, len(hand.evaluations)
    while len(hand.evaluations) == before:
        evaluated = [
            name
            for name in hand.turns
            if state.groups[state.trajectories[name].group_id].purpose is Purpose.EVAL
        ]
        hand.end(evaluated[0] if evaluated else hand.on(E0)[0])


def test_a_configured_staleness_bound_is_strict() -> None:
    hand = Hand(decoupled_config(rollout={"alpha": 0}))
    state = hand.core.state
    slow = hand.on(E1)
    hand.train_without(slow, version=2)
    for name in slow:
        hand.end(name)
    assert state.counters.dropped[StopReason.STALE] >= 2
    assert (
        not {state.trajectories[name].group_id for name in slow if name in state.trajectories}
        & state.buffer.keys()
    )
    assert set(state.counters.staleness) == {0}


@pytest.mark.parametrize("strategy", ["fifo", "newest"])
def test_the_buffer_samples_by_its_strategy(strategy: str) -> None:
    hand = Hand(decoupled_config(engines=1, batch=4, buffer={"sample": strategy}))
    state = hand.core.state
    while len(state.buffer) < 3:
        hand.end(hand.on(E0)[0])
    waiting = list(state.buffer)
    hand.train()
    assert [group.id for group in hand.steps[1].groups] == [
        waiting[0 if strategy == "fifo" else -1]
    ]


def test_a_users_function_that_fails_ends_the_run_with_its_name() -> None:
    def broken(experiences: tuple[Experience, ...], version: int) -> list[GroupId]:
        raise KeyError("oops")

    hand = Hand(
        decoupled_config(engines=1, buffer={"sample": "mine:broken"}), **{"mine:broken": broken}
    )
    for _ in range(2):
        hand.end(hand.on(E0)[0])
    assert hand.finish.error == "buffer function mine:broken failed: KeyError: 'oops'"


def test_a_users_function_cannot_exit_the_program() -> None:
    def leaves(experiences: tuple[Experience, ...], version: int) -> list[GroupId]:
        raise SystemExit(7)

    hand = Hand(
        decoupled_config(engines=1, buffer={"sample": "mine:leaves"}), **{"mine:leaves": leaves}
    )
    for _ in range(2):
        hand.end(hand.on(E0)[0])
    assert hand.finish.error == "buffer function mine:leaves failed: SystemExit: 7"


def test_a_users_function_that_names_groups_endlessly_is_stopped() -> None:
    def endless(experiences: tuple[Experience, ...], version: int) -> Iterator[GroupId]:
        return itertools.repeat(experiences[0].id)

    hand = Hand(
        decoupled_config(engines=1, buffer={"sample": "mine:endless"}), **{"mine:endless": endless}
    )
    for _ in range(2):
        hand.end(hand.on(E0)[0])
    assert "a strategy must name each group once" in hand.finish.error


def test_nothing_is_launched_beyond_the_buffers_capacity() -> None:
    hand = Hand(decoupled_config(engines=1, batch=4))
    state = hand.core.state
    for _ in range(100):
        if hand.turns:
            hand.end(next(iter(hand.turns)))
    assert 3 <= len(state.buffer) <= 4, "a half group holds half a place"
    assert not state.drawing.active
    assert state.counters.evicted == 0
    while len(state.buffer) > 2:
        hand.train()
    assert state.drawing.active, "steps have made room"


def test_the_last_member_of_a_group_reserves_no_place_for_its_siblings() -> None:
    hand = Hand(
        decoupled_config(engines=1, batch=6, rollout={"group_size": 4}),
        slots=6,
    )
    state = hand.core.state
    stragglers: list[TrajectoryId] = []
    for _ in range(40):
        name = next((name for name in hand.turns if name not in stragglers), None)
        if name is None:
            break
        group = state.groups[state.trajectories[name].group_id]
        left = [
            one
            for one in group.members
            if state.trajectories[one].stage in (Stage.INIT, Stage.RUN, Stage.QUEUED)
        ]
        if len(left) == 1:
            stragglers.append(name)
        else:
            hand.end(name)
    assert len(state.drawing.active) > 3


def test_inherent_staleness_is_counted_at_the_end_of_a_rollout() -> None:
    hand = Hand(decoupled_config())
    state = hand.core.state
    slow = hand.on(E1)[0]
    hand.train_without([slow], version=2)
    hand.end(slow)
    assert state.counters.inherent[2] == 1
    assert sum(state.counters.inherent.values()) == sum(
        one.stage in (Stage.SCORED, Stage.EVAL_QUEUED, Stage.EVAL)
        for one in state.trajectories.values()
    )


def test_an_engine_that_loads_other_weights_serves_none() -> None:
    hand = Hand(decoupled_config())
    engine = hand.core.state.engines[E0]
    one = hand.core.state.trajectories[hand.on(E0)[0]]
    assert version_affinity.serves_version_of(hand.core._run, engine, one)
    engine.status = EngineStatus.LOADING
    assert not version_affinity.serves_version_of(hand.core._run, engine, one)


def test_an_engine_whose_kv_moves_keeps_its_weights() -> None:
    run = Hand(decoupled_config()).core._run
    engine = run.state.engines[E0]
    for trajectory in run.state.trajectories.values():
        work_of(run, trajectory).assigned_engine = E1
        reindex(run, trajectory)
    batch_of(run, engine).launched = 1
    run.state.publication.id += 1
    run.state.publication.retained = {run.state.publication.id: 1}
    wishes = version_affinity._Demand(other=None, holder=None, moving=frozenset())
    moving = version_affinity._Demand(other=None, holder=None, moving=frozenset({E0}))
    assert version_affinity._wanted_weights(run, engine, wishes) == run.state.publication.id
    assert version_affinity._wanted_weights(run, engine, moving) is None


def test_weights_that_cannot_be_had_are_not_awaited() -> None:
    run = Hand(decoupled_config()).core._run
    one = next(iter(run.state.trajectories.values()))
    work_of(run, one).assigned_engine = None
    run.part(Versions).trajectories[one.id] = 77
    run.state.mechanisms["versions"].unassigned[one.id] = None
    assert version_affinity.awaited_weights(run) is None
    run.state.publication.retained[77] = 7
    assert version_affinity.awaited_weights(run) == 77


def test_an_engine_that_failed_the_turn_is_the_last_choice() -> None:
    run = Hand(decoupled_config(engines=2)).core._run
    one, other, *_ = run.state.trajectories.values()
    for trajectory in (one, other):
        work_of(run, trajectory).assigned_engine = E1
        reindex(run, trajectory)
    version_affinity.assign(run, one)
    assert work_of(run, one).assigned_engine == E0, "it has less to do"
    version_affinity.assign(run, one, avoid=[E0])
    assert work_of(run, one).assigned_engine == E1
    version_affinity.assign(run, one, avoid=[E0, E1])
    assert work_of(run, one).assigned_engine is not None
