"""A new world: what was under way starts again, and the loss is counted against it."""

import itertools

import pytest

from rollweave.core import continuation, recovery, training, trajectories, turns
from rollweave.core.continuation import may_continue, surviving_version
from rollweave.core.mechanisms.lengths.index import reindex
from rollweave.core.mechanisms.relays import fetching
from rollweave.core.policy.modes import preset
from rollweave.core.policy.retry import MAX_WORLDS_LOST
from rollweave.core.run import Run
from rollweave.core.state import GroupStatus, Kept, Phase, Stage, TrainerStatus, Turn
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId, GroupId, TaskId
from rollweave.schema.config.rollout import ModeName
from rollweave.schema.work import Limits, Purpose, StopReason, Task
from tests.support.kinds import of
from tests.support.states import E0, members, running


def under_way(*stages: Stage) -> Run:
    """A group whose members are in these stages."""
    run = running(*[5 for _ in stages])
    state = run.state
    group = state.groups[GroupId("g9")]
    group.task = Task(id=TaskId("t"), env="a", seed=0, limits=Limits(step_s=5.0))
    state.drawing.active[group.id] = None
    for trajectory, stage in zip(members(run), stages, strict=True):
        trajectory.stage, trajectory.turn = stage, None
        group.members.append(trajectory.id)
        pools = {
            Stage.QUEUED: state.pools.queued,
            Stage.INIT: state.pools.init,
            Stage.RUN: state.pools.run,
            Stage.EVAL_QUEUED: state.pools.eval_queued,
            Stage.EVAL: state.pools.eval,
            Stage.CLOSING: state.pools.closing,
        }
        pools[stage][trajectory.id] = None
        reindex(run, trajectory)
    run.out = []
    return run


def lose(run: Run) -> None:
    recovery.on_world_lost(run, e.WorldLost(engines=(e.EngineSlot(id=E0),)))


def test_what_was_under_way_is_queued_again() -> None:
    stages = (Stage.QUEUED, Stage.INIT, Stage.RUN, Stage.EVAL_QUEUED, Stage.EVAL)
    run = under_way(*stages)
    lose(run)
    relaunched = members(run)
    assert [one.stage for one in relaunched] == [Stage.QUEUED] * 5
    assert [one.attempt for one in relaunched] == [0, 1, 1, 1, 1]
    assert [one.past.worlds_lost for one in relaunched] == [0, 1, 1, 0, 1], (
        "only what the world held"
    )
    assert list(run.state.engines) == [E0]


@pytest.mark.parametrize("lost", [MAX_WORLDS_LOST - 2, MAX_WORLDS_LOST - 1])
def test_a_trajectory_that_was_in_many_lost_worlds_is_given_up(lost: int) -> None:
    run = under_way(Stage.RUN, Stage.QUEUED)
    suspect = members(run)[0]
    suspect.past.worlds_lost = lost
    lose(run)
    given_up = lost == MAX_WORLDS_LOST - 1
    assert run.state.counters.watchdog.get("suspects", 0) == given_up
    assert (suspect.stage is Stage.QUEUED) is not given_up


def test_a_service_that_ended_in_order_blames_no_rollout() -> None:
    for phase, lost in ((Phase.FINISHED, 0), (Phase.SERVING, 1)):
        run = under_way(Stage.RUN, Stage.EVAL_QUEUED)
        run.state.serving, run.state.phase = True, phase
        run.state.groups[GroupId("g9")].purpose = Purpose.SERVE
        lose(run)
        assert [one.past.worlds_lost for one in members(run)] == [lost, 0]
        assert run.state.phase is Phase.SERVING


def test_tasks_that_were_being_drawn_are_drawn_again() -> None:
    run = under_way(Stage.QUEUED)
    group = run.state.groups[GroupId("g9")]
    for other in [one for one in run.state.groups.values() if one is not group]:
        other.status = GroupStatus.DROPPED
    group.status, run.now = GroupStatus.DRAWING, 9.0
    lose(run)
    drawn = of(run.out, c.DrawTask)
    assert drawn[0] == c.DrawTask(group_id=group.id, name="a", index=0, purpose=Purpose.TRAIN)
    assert group.since == 9.0


def test_a_world_begins_with_its_engines_and_relays() -> None:
    run = running()
    run.now = 3.0
    engines = tuple(e.EngineSlot(id=EngineId(f"e{number}")) for number in range(3))
    begun = e.RunStarted(engines=engines, relays=2, run_id="r")
    fetching.on_started(run, begun)
    recovery.on_started(run, begun)
    state = run.state
    assert list(state.engines) == ["e0", "e1", "e2"]
    expected = (["r0", "r1"], True)
    assert (list(state.mechanisms["relays"].relays), state.mechanisms["relays"].relayed) == expected
    assert (state.run_id, state.trainer.since, state.serving) == ("r", 3.0, False)


def with_checkpoint(*stages: Stage, checkpoint: int | None = 3, initiated: int = 3) -> Run:
    run = under_way(*stages)
    run.state.checkpoints.newest = checkpoint
    for one in members(run):
        one.initiated = initiated
    return run


def lose_recorded(run: Run, *members: int) -> None:
    names = tuple(one.id for one in run.state.trajectories.values() if one.member in members)
    recovery.on_world_lost(run, e.WorldLost(engines=(e.EngineSlot(id=E0),), recorded=names))


def test_recorded_attempts_are_kept_for_the_next_one() -> None:
    run = with_checkpoint(Stage.RUN, Stage.RUN, Stage.EVAL_QUEUED, Stage.EVAL, Stage.QUEUED)
    for one in members(run):
        one.attempt = 4
    lose_recorded(run, 0, 2, 3, 4)
    kept = Kept(attempt=4, initiated=3, version=3)
    assert [one.past.kept for one in members(run)] == [kept, None, kept, kept, None]


@pytest.mark.parametrize(("checkpoint", "initiated"), [(2, 3), (None, 1), (3, -1)])
def test_attempts_of_lost_weights_are_not_kept(checkpoint: int | None, initiated: int) -> None:
    run = with_checkpoint(Stage.RUN, checkpoint=checkpoint, initiated=initiated)
    lose_recorded(run, 0)
    assert members(run)[0].past.kept is None


def test_attempts_that_are_closing_are_not_kept() -> None:
    run = with_checkpoint(Stage.CLOSING, Stage.RUN)
    closing, running_on = members(run)
    closing.closing = StopReason.STALE
    lose_recorded(run, 0, 1)
    assert closing.past.kept is None
    assert running_on.past.kept is not None


@pytest.mark.parametrize("serving", [True, False])
def test_a_service_loses_no_weights_with_its_controller(serving: bool) -> None:
    run = with_checkpoint(Stage.RUN, checkpoint=3, initiated=2)
    run.state.serving = serving
    if serving:
        run.state.groups[GroupId("g9")].purpose = Purpose.SERVE
    lose_recorded(run, 0)
    assert members(run)[0].past.kept == Kept(attempt=0, initiated=2, version=None if serving else 3)


def test_what_is_kept_at_the_loss_of_a_worker_may_lose_its_end_with_the_trainer() -> None:
    run = with_checkpoint(Stage.RUN, Stage.RUN, Stage.RUN, Stage.RUN)
    early, late, silent, closing = members(run)
    late.initiated, silent.output_tokens, closing.closing = 5, 7, StopReason.STALE
    recorded = {one.id for one in (early, late, closing)}
    for one in members(run):
        continuation.keep_if_recorded(run, one, recorded)
    kept = [one.past.kept for one in members(run)]
    assert kept[0] == Kept(attempt=0, initiated=3, version=None)
    assert kept[2:] == [None, None], "nothing is recorded, or it is not wanted"
    continuation.restored(run, 4)
    assert (early.past.kept, late.past.kept) == (Kept(attempt=0, initiated=3, version=4), None)


def test_a_second_worker_may_be_lost_before_a_recorded_turn_is_repeated() -> None:
    run = with_checkpoint(Stage.QUEUED)
    (one,) = members(run)
    one.past.kept = Kept(attempt=0, initiated=3, version=None)
    run.state.trainer.step = run.state.publication.version = 3
    continuation.take(run, one, 3, 0)
    one.attempt, one.initiated = 1, 3
    continuation.keep_if_recorded(run, one)
    assert one.past.kept == Kept(attempt=1, initiated=3, version=None)
    one.past.kept = None
    continuation.take(run, one, 3, 0)
    continuation.keep_if_recorded(run, one)
    assert one.past.kept is None, "this attempt has started over"


@pytest.mark.parametrize("purpose", Purpose)
def test_a_record_that_no_attempt_will_use_is_evicted(purpose: Purpose) -> None:
    """A service's is evicted when its client has the result."""
    run = with_checkpoint(Stage.QUEUED)
    (one,) = members(run)
    run.state.groups[GroupId("g9")].purpose = purpose
    one.past.kept = Kept(attempt=0, initiated=3, version=3)
    continuation.forget(run, one)
    continuation.forget(run, one)
    evicted = of(run.out, c.Evict)
    assert len(evicted) == (purpose is not Purpose.SERVE)
    assert one.past.kept is None


def test_a_second_loss_keeps_what_the_first_one_kept_unless_it_is_gone() -> None:
    run = with_checkpoint(Stage.RUN, Stage.RUN)
    lose_recorded(run, 0, 1)
    run.state.checkpoints.newest = 8
    lose_recorded(run, 0)
    first, second = members(run)
    assert first.stage is Stage.QUEUED
    assert first.past.kept == Kept(attempt=0, initiated=3, version=3), "8 is of another lineage"
    assert second.past.kept is None


def test_a_trainer_that_comes_back_earlier_takes_its_later_versions_along() -> None:
    run = with_checkpoint(Stage.RUN, Stage.RUN)
    first, second = members(run)
    first.past.kept = Kept(attempt=0, initiated=3, version=5)
    second.past.kept = Kept(attempt=0, initiated=5, version=5)
    continuation.restored(run, 5)
    assert second.past.kept is not None
    continuation.restored(run, 4)
    assert (first.past.kept, second.past.kept) == (Kept(attempt=0, initiated=3, version=4), None)


def test_an_attempt_keeps_no_versions_that_its_trainer_lost_before() -> None:
    """Their numbers have other weights by the time at which the controller is lost."""
    run = with_checkpoint(Stage.RUN, Stage.RUN)
    first, second = members(run)
    first.initiated, second.initiated = 1, 3
    continuation.restored(run, 2)
    continuation.restored(run, 4)
    for one in (first, second):
        continuation.keep(run, one)
    assert first.past.kept == Kept(attempt=0, initiated=1, version=2)
    assert second.past.kept is None
    first.stage = Stage.QUEUED
    run.state.trainer.step = 4
    continuation.take(run, first, 3, 0)
    assert first.past.restored_to is None, "the next attempt is of this lineage alone"


def test_an_attempt_may_begin_with_discarded_weights_while_the_trainer_goes_on() -> None:
    """They part from the trainer's way at step 2, whatever its step is now."""
    run = with_checkpoint(Stage.QUEUED, Stage.QUEUED)
    discarded, of_the_trainer = members(run)
    run.state.publication.next_id = 7
    continuation.restored(run, 2)
    run.state.trainer.step = run.state.publication.version = 3
    discarded.past.kept = Kept(attempt=0, initiated=2, version=2)
    for one, version, publication_id in ((discarded, 5, 6), (of_the_trainer, 3, 8)):
        one.initiated, continued = continuation.take(run, one, version, publication_id)
        assert continued is None, "tokens are not continued by discarded weights"
    assert (discarded.origin, of_the_trainer.origin) == (-1, 3)


@pytest.mark.parametrize(("initiated", "continues"), [(3, True), (2, True), (1, False), (4, False)])
def test_the_next_attempt_counts_its_staleness_from_the_first_launch(
    initiated: int, continues: bool
) -> None:
    run = with_checkpoint(Stage.QUEUED)  # mode bounded, alpha 1
    (one,) = members(run)
    run.state.trainer.step = run.state.publication.version = 3
    one.past.kept = Kept(attempt=0, initiated=initiated, version=3)
    expected = (initiated, c.Continuation(attempt=0, version=3)) if continues else (3, None)
    assert continuation.take(run, one, 3, 0) == expected
    assert one.past.kept is None
    assert run.state.counters.continued == continues


def test_a_withdrawn_turn_leaves_the_environment_its_whole_limit() -> None:
    run = under_way(Stage.RUN)
    (only,) = members(run)
    only.turn, only.since, run.now = Turn(number=0, context_tokens=1, since=0.0), 0.0, 50.0
    turns.on_withdrawn(run, e.TurnWithdrawn(trajectory_id=only.id, attempt=0, turn=1))
    assert (only.turn is None, only.since) == (False, 0.0)
    turns.on_withdrawn(run, e.TurnWithdrawn(trajectory_id=only.id, attempt=0, turn=0))
    assert (only.turn, only.since) == (None, 50.0)


def test_an_attempt_that_closes_ends_for_its_own_reason_though_its_reward_fails() -> None:
    run = under_way(Stage.CLOSING)
    (only,) = members(run)
    only.closing = StopReason.STALE
    failed = e.RewardFailed(
        trajectory_id=only.id, attempt=0, stop_reason=StopReason.REWARD_ERROR, error="broken"
    )
    trajectories.on_reward_failed(run, failed)
    (over,) = run.over
    assert over.reason is StopReason.STALE


def test_an_attempt_is_known_by_the_life_that_launched_it() -> None:
    """An earlier life may have recorded turns of an attempt with the same number, of
    which the journal lost all events.
    """
    run = with_checkpoint(Stage.RUN, Stage.QUEUED)
    run.state.life = "ab"
    launched, waiting = members(run)
    launched.past.life = "ab"
    assert continuation.continuable(run.state) == [(launched.id, 0, "ab")]
    names = (launched.id,)
    recovery.on_world_lost(
        run, e.WorldLost(engines=(e.EngineSlot(id=E0),), recorded=names, life="cd")
    )
    assert run.state.life == "cd"
    assert launched.stage is Stage.QUEUED
    assert continuation.continuable(run.state) == [(launched.id, 0, "ab")]
    assert waiting.past.life == ""


def test_only_what_the_loss_of_the_trainer_dropped_is_reported() -> None:
    run = running(5)
    run.state.trainer.status, run.state.counters.cancelled = TrainerStatus.STARTING, 9
    training.on_ready(run, e.TrainerReady(epoch=0, step=0))
    assert not of(run.out, c.Warn)


@pytest.mark.parametrize(
    ("checkpoint", "warms_up", "version"),
    [(7, False, 7), (7, True, 7), (0, True, 0), (None, False, 0), (None, True, -1)],
)
def test_weights_after_the_checkpoint_are_lost(
    checkpoint: int | None, warms_up: bool, version: int
) -> None:
    assert surviving_version(checkpoint, warms_up=warms_up) == version


@pytest.mark.parametrize("name", ModeName)
def test_an_attempt_continues_within_the_window(name: ModeName) -> None:
    mode = preset(name, alpha=2)
    windows = {"sync": 0, "one_step": 1, "stream": 1, "partial": 2, "bounded": 2}
    for initiated, launch, ahead in itertools.product(range(6), range(6), range(4)):
        trained_at = launch + ahead
        if name is ModeName.DECOUPLED:
            expected = initiated == launch and ahead <= 2
        else:
            expected = initiated <= launch and trained_at - initiated <= windows[name]
        assert expected == may_continue(
            initiated, launch=launch, next_version=trained_at, mode=mode, purpose=Purpose.TRAIN
        ), (initiated, launch, trained_at)


@pytest.mark.parametrize("name", ModeName)
def test_only_training_bounds_the_staleness_of_what_continues(name: ModeName) -> None:
    """An episode has the one version that is evaluated."""
    mode = preset(name, alpha=1)
    for initiated, launch in itertools.product(range(4), range(4)):
        episode, rollout = (
            may_continue(initiated, launch=launch, next_version=9, mode=mode, purpose=purpose)
            for purpose in (Purpose.EVAL, Purpose.SERVE)
        )
        assert (episode, rollout) == (initiated == launch, True)


def test_decoupled_without_a_maximum_age_needs_only_the_same_weights() -> None:
    mode = preset(ModeName.DECOUPLED)
    train = Purpose.TRAIN
    assert may_continue(2, launch=2, next_version=99, mode=mode, purpose=train)
    assert not may_continue(2, launch=3, next_version=3, mode=mode, purpose=train)
