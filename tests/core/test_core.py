"""The core against a random world: invariants hold, the run ends, and every trajectory
is accounted for.
"""

import dataclasses
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollweave.core.core import Core
from rollweave.core.kernel import HANDLERS
from rollweave.core.mechanisms import MECHANISMS
from rollweave.core.mechanisms.lengths.index import work_of
from rollweave.core.state import EngineStatus, Stage, TrainerStatus
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId
from rollweave.schema.config.root import RunConfig
from rollweave.schema.work import Purpose, StopReason
from tests.support import core
from tests.support.kinds import of
from tests.support.properties import examples
from tests.support.random_world import World
from tests.support.variants import mostly_extended

TABLES = (HANDLERS, *(one.handlers for one in MECHANISMS))
"""The handlers of the kernel and of each mechanism."""


@pytest.mark.parametrize("kind", get_args(e.Event))
def test_every_event_has_handlers_that_take_it(kind: type[e.Event]) -> None:
    handlers = [table[kind] for table in TABLES if kind in table]
    assert handlers
    for handler in handlers:
        hints = get_type_hints(handler)
        assert hints.pop("return") is type(None)
        (hint,) = (hint for name, hint in hints.items() if name != "run")
        assert kind in (get_args(hint) or (hint,))


def test_every_handler_is_of_an_event() -> None:
    assert {kind for table in TABLES for kind in table} == set(get_args(e.Event))


@settings(max_examples=examples(25))
@given(
    seed=st.integers(0, 2**16),
    mode=st.sampled_from([mode for mode in core.MODES if mode != "decoupled"]),
)
# an engine with more turns than slots beside one with a free slot
@example(seed=7956, mode="one_step")
def test_no_slot_stays_free_while_a_turn_waits(seed: int, mode: str) -> None:
    """Turns whose contexts have no room, and those that this engine has failed, may
    wait. Migration is by gain.
    """
    world = World(
        core.config(
            mode, rollout={"scheduling": "trajectory"}, engines={"count": 3, "max_slots": 2}
        ),
        seed,
    )
    world.start()
    while world.finish is None:
        world.step()
        state = world.core.state
        queued = [state.trajectories[trajectory_id] for trajectory_id in state.turns.queue]
        # Nothing is known of their lengths yet, so that KV does not hold them back.
        strangers = [
            one
            for one in queued
            if not work_of(world.core._run, one).kv_resident
            and work_of(world.core._run, one).predicted_at_turn < 0
            and one.turn
            and not one.turn.avoid
        ]
        free = [
            engine.id
            for engine in state.engines.values()
            if engine.status is EngineStatus.SERVING
            and not engine.draining
            and len(engine.active) < engine.abilities.max_slots
        ]
        assert not (strangers and free), (
            f"{strangers[0].id} waits for {work_of(world.core._run, strangers[0]).assigned_engine}, {free[0]} has a free slot"
        )


@pytest.mark.parametrize("mode", core.MODES)
def test_a_clean_run_trains_every_step_once_within_the_bound(mode: str) -> None:
    world = World(core.config(mode, trainer={"minibatches": 2}), seed=1)
    assert world.run().error == ""
    account = world.core.account()
    assert account.balanced
    assert account.in_flight == 0
    assert account.trained == 4 * 3 * 2
    assert sorted(world.trained) == [0, 1, 2, 3]
    # decoupled has none: whatever is rolled out is trained on
    window = {"sync": 0, "decoupled": 4}.get(mode, 1)
    assert all(0 <= step - initiated <= window for step, initiated in world.trained_versions)
    everything = [member for ids in world.trained.values() for member in ids]
    assert len(everything) == len(set(everything))
    assert [evaluation.final for evaluation in world.evaluations] == [True]
    assert world.evaluations[0].episodes == {"a": 3, "b": 3}


@dataclasses.dataclass
class Drawn:
    """What differs between the runs of `test_any_world_ends_accounted_for`."""

    seed: int
    mode: str
    failure: float = 0.0
    hang: float = 0.0
    alpha: int = 1
    spare_groups: int = 0
    spare_members: int = 0
    dynamic: bool = True
    every: int = 2
    parts: int = 1
    batch: bool = True
    scheduling: str = "trajectory"
    slots: int = 1
    allocation: bool = True
    running: str = "one"


REWARDS_WAIT = Drawn(
    1, "stream", failure=0.1, hang=0.01, spare_groups=1, spare_members=2, parts=3, slots=3
)
"""Rewards wait for a training group that cannot start while an evaluation holds older
weights.
"""
REFUSED = Drawn(121, "decoupled", failure=0.02)
"""The weights of an evaluation are refused when an episode of it starts again."""
DAMAGED = Drawn(
    3,
    "partial",
    failure=0.1,
    hang=0.01,
    alpha=3,
    spare_members=1,
    dynamic=False,
    batch=False,
    scheduling="autellix",
)
"""The last checkpoint is damaged, which is found during the final evaluation."""
RECEIVED = Drawn(
    1, "partial", alpha=3, dynamic=False, every=1, scheduling="autellix", allocation=False
)
"""Weights that were received and not yet swapped in are kept."""


@pytest.mark.timeout(900)
@settings(max_examples=examples(60))
@example(REWARDS_WAIT)
@example(REFUSED)
@example(DAMAGED)
@example(RECEIVED)
@given(
    st.builds(
        Drawn,
        seed=st.integers(0, 10_000),
        mode=st.sampled_from(core.MODES),
        failure=st.sampled_from([0.0, 0.02, 0.1]),
        hang=st.sampled_from([0.0, 0.0, 0.01]),
        alpha=st.integers(1, 3),
        spare_groups=st.integers(0, 2),
        spare_members=st.integers(0, 2),
        dynamic=st.booleans(),
        every=st.sampled_from([0, 1, 2]),
        parts=st.integers(1, 3),
        batch=st.booleans(),
        scheduling=st.sampled_from(sorted(core.SCHEDULINGS)),
        slots=st.sampled_from([1, 3]),
        allocation=st.booleans(),
        running=st.sampled_from(sorted(core.POOLS)),
    )
)
def test_any_world_ends_accounted_for(drawn: Drawn) -> None:
    mode, alpha, batch, parts = drawn.mode, drawn.alpha, drawn.batch, drawn.parts
    settings_ = core.config(
        mode,
        rollout={
            "alpha": alpha,
            "spare_groups": drawn.spare_groups,
            "spare_members": drawn.spare_members,
            "dynamic_sampling": drawn.dynamic,
            "max_running": core.POOLS[drawn.running],
            "without": ["free_stepping", "reward_overlap"] if batch else [],
            **core.SCHEDULINGS[drawn.scheduling],
        },
        engines={"max_slots": drawn.slots},
        allocation=core.ALLOCATION if drawn.allocation else None,
        eval={"every": drawn.every},
        trainer={"minibatches": parts},
        watchdog={"restarts": 100},
        **(
            {"buffer": {"sample": "staleness" if parts == 1 else "ratio"}}
            if mode == "decoupled" and batch
            else {}
        ),
    )
    world = World(settings_, drawn.seed, failure=drawn.failure, hang=drawn.hang)
    finish = world.run()
    account = world.core.account()
    assert account.balanced
    assert account.in_flight == 0
    if finish.error:
        assert "checkpoint" in finish.error
        return
    assert sorted(world.trained) == [0, 1, 2, 3]
    window = {"sync": 0, "one_step": 1, "stream": 1, "decoupled": alpha if batch else 4}.get(
        mode, alpha
    )
    assert all(age <= window for age in world.ages), "also of discarded weights"
    counted = world.core.state.counters.staleness
    assert {age for age, count in counted.items() if count} <= {*world.ages}
    everything = [member for ids in world.trained.values() for member in ids]
    assert len(everything) == len(set(everything)), (
        "a trajectory was trained twice in the surviving lineage"
    )


@pytest.mark.timeout(600)
@settings(max_examples=examples(12))
@given(
    seed=st.integers(0, 10_000),
    mode=st.sampled_from(core.MODES),
    steps=st.integers(8, 40),
    failure=st.sampled_from([0.0, 0.02]),
    retries=st.integers(0, 3),
)
def test_a_long_run_repeats_nothing_and_leaks_nothing(
    seed: int, mode: str, steps: int, failure: float, retries: int
) -> None:
    """The checks of `World` at every command hold far beyond the first steps."""
    run_config = core.config(
        mode,
        steps=steps,
        rollout={"retries": retries},
        engines={"count": 3},
        watchdog={"restarts": 10_000},
    )
    world = World(run_config, seed, failure=failure)
    finish = world.run(max_events=400_000)
    assert world.core.account().balanced
    if not finish.error:
        assert sorted(world.trained) == list(range(steps))


def test_a_turn_may_return_to_an_engine_when_all_have_failed_it() -> None:
    """One engine is lost with a turn, and the other one fails it: both are a last
    resort.
    """
    World(core.config("bounded"), 7100, failure=0.1).run()


def test_the_version_of_an_engine_is_retained_while_its_loads_fail() -> None:
    run_config = core.config(
        "stream",
        rollout=core.SCHEDULINGS["heddle"],
        allocation=core.ALLOCATION,
        weights={"relays": 1},
    )
    World(run_config, 334, failure=0.1).run()


@pytest.mark.extended
@pytest.mark.timeout(600)
@settings(max_examples=examples(30))
@given(
    seed=st.integers(0, 10_000),
    mode=st.sampled_from(core.MODES),
    scheduling=st.sampled_from(sorted(core.SCHEDULINGS)),
    cut=st.floats(0, 1),
)
def test_a_replayed_journal_gives_identical_commands(
    seed: int, mode: str, scheduling: str, cut: float
) -> None:
    """A replay may also begin with a snapshot in the middle: derived tables are rebuilt
    as they were.
    """
    run_config = core.config(mode, rollout=core.SCHEDULINGS[scheduling])
    world = World(run_config, seed, failure=0.03)
    world.run()
    replayed = Core(run_config)
    middle = int(cut * len(world.journal))
    for place, ((now, event), commands) in enumerate(
        zip(world.journal, world.commands, strict=True)
    ):
        if place == middle:
            replayed = Core.restore(replayed.snapshot(), run_config)
        assert replayed.handle(now, event) == commands, f"event {place}: {event}"
    assert replayed.snapshot() == world.core.snapshot()


@pytest.mark.timeout(600)
@settings(max_examples=examples(25))
@given(
    seed=st.integers(0, 10_000),
    mode=st.sampled_from(core.MODES),
    kills=st.lists(st.integers(5, 300), min_size=1, max_size=3),
    scheduling=st.sampled_from(sorted(core.SCHEDULINGS)),
    allocation=st.booleans(),
    running=st.sampled_from(sorted(core.POOLS)),
)
def test_the_controller_may_be_lost_at_any_event(
    seed: int, mode: str, kills: list[int], scheduling: str, allocation: bool, running: str
) -> None:
    run_config = core.config(
        mode,
        eval={"every": 2},
        rollout={**core.SCHEDULINGS[scheduling], "max_running": core.POOLS[running]},
        allocation=core.ALLOCATION if allocation else None,
    )
    world = World(run_config, seed, failure=0.01)
    core.run_with_lost_controllers(world, kills)
    account = world.core.account()
    assert account.in_flight == 0
    assert account.trained == sum(len(ids) for ids in world.trained.values())
    everything = [member for ids in world.trained.values() for member in ids]
    assert len(everything) == len(set(everything))


def test_each_task_domain_may_have_its_group_size() -> None:
    world = World(core.config(tasks=[{"env": "a", "group_size": 5}, {"env": "b"}]), seed=53)
    world.run()
    steps = world.sent(c.TrainStep)
    sizes = {(group.name, len(group.trajectory_ids)) for step in steps for group in step.groups}
    assert sizes == {("a", 5), ("b", 2)}


def test_a_snapshot_restores_an_equal_core() -> None:
    world = World(core.config(), seed=3)
    world.start()
    for _ in range(120):
        world.step()
    snapshot = world.core.snapshot()
    assert Core.restore(snapshot, world.config).snapshot() == snapshot


def test_a_nonfinite_loss_ends_the_run_and_names_the_batch() -> None:
    world = World(core.config(), seed=5)
    world.start()
    step = core.until(world, c.TrainStep)
    world.heap = [item for item in world.heap if not isinstance(item[2], e.StepTrained)]
    world.feed(e.TrainFailed(epoch=0, step=step.step, error="loss is nan", nonfinite=True))
    assert all(group.id in world.finish.error for group in step.groups)
    assert "last good checkpoint" in world.finish.error
    assert world.core.account().in_flight == 0


def test_the_last_engine_lost_for_good_ends_the_run() -> None:
    world = World(core.config(engines={"count": 1}, watchdog={"restarts": 1}), seed=5)
    world.start()
    core.until(world, c.StartTurn)
    for epoch in (0, 1):  # the turn that it had may be to blame for the first loss
        world.feed(e.EngineLost(engine_id=EngineId("e0"), epoch=epoch, error="killed"))
        assert world.finish is None
    world.feed(e.EngineLost(engine_id=EngineId("e0"), epoch=2, error="killed again"))
    assert "no engine is left" in world.finish.error


def test_a_lost_engine_fails_its_turns_and_they_run_elsewhere() -> None:
    world = World(core.config(), seed=7)
    world.start()
    turn = core.until(world, c.StartTurn)
    while world.core.state.engines[turn.engine_id].active == {}:
        world.step()
    lost = dict(world.core.state.engines[turn.engine_id].active)
    world.feed(e.EngineLost(engine_id=turn.engine_id, epoch=0, error="killed"))
    again = of(world.commands[-1], c.StartTurn)
    queued = {*world.core.state.turns.queue, *world.core.state.turns.suspects}
    assert {command.trajectory_id for command in again} | queued >= set(lost)
    assert all(
        command.engine_id != turn.engine_id and command.dispatch == 1
        for command in again
        if command.trajectory_id in lost
    )


def test_a_silent_engine_is_restarted_and_counted() -> None:
    world = World(core.config(engines={"count": 1}), seed=11)
    world.silent_engines = {"e0"}
    world.start()
    restart = core.until(world, c.RestartEngine)
    assert "turns in a row" in restart.reason
    assert world.core.state.counters.watchdog["engine_restarted"] == 1


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))]
)
def test_an_engine_that_answers_sometimes_is_not_considered_silent(seed: int) -> None:
    """`World` counts consecutive turns without an answer for each engine."""
    run_config = core.config(steps=12, engines={"count": 2}, watchdog={"restarts": 10_000})
    world = World(run_config, seed, hang=0.1)
    world.run()
    assert world.core.state.counters.watchdog["turn_failed"] > 1


def test_a_stuck_trainer_is_restarted_from_the_checkpoint() -> None:
    world = World(core.config(), seed=13)
    world.stuck_trainer = True
    world.start()
    restart = core.until(world, c.RestartTrainer)
    assert restart.step == 0
    assert world.core.state.trainer.status is TrainerStatus.STARTING


def test_after_a_damaged_checkpoint_the_one_before_it_is_used() -> None:
    world = World(core.config(steps=6), seed=3)
    world.start()
    while world.core.state.checkpoints.newest != 4:
        world.step()
    world.damaged_checkpoint = True
    world.feed(e.TrainerLost(epoch=world.trainer_epoch, error="killed"))
    core.until(world, c.PublishWeights)
    assert world.warnings[-1].message.startswith("back at checkpoint 2")
    assert (world.core.state.checkpoints.newest, world.core.state.trainer.step) == (2, 2)
    world.damaged_checkpoint = False
    world.run_on()
    account = world.core.account()
    assert account.balanced
    assert account.trained == 6 * 3 * 2
    everything = [member for ids in world.trained.values() for member in ids]
    assert len(everything) == len(set(everything)) == account.trained


def test_the_run_ends_at_once_if_no_checkpoint_can_be_read() -> None:
    world = World(core.config(), seed=3)
    world.start()
    core.until(world, c.TrainStep)
    world.feed(e.TrainerLost(epoch=0, error="checkpoint of step 0 is torn", hopeless=True))
    assert "checkpoint of step 0 is torn" in world.finish.error
    assert world.core.account().balanced
    assert world.core.account().in_flight == 0


def test_an_evaluation_whose_weights_are_lost_blocks_nothing() -> None:
    world = World(core.config(steps=6, eval={"every": 2, "episodes": 2}), seed=4)
    world.start()
    while core.until(world, c.SaveCheckpoint).step != 2:  # type: ignore[attr-defined]
        pass
    evaluation = world.core.state.evaluations.current
    assert evaluation.version == 2  # that of version 0 has ended
    world.feed(e.CheckpointFailed(epoch=world.trainer_epoch, step=2, error="disk full"))
    world.feed(e.TrainerLost(epoch=world.trainer_epoch, error="killed"))
    world.run_on()
    wanted = [0, 2, 4, 6]
    assert [
        evaluation.version for evaluation in world.evaluations if not evaluation.final
    ] == wanted


def test_a_turn_requested_twice_is_one_turn() -> None:
    world = World(core.config(), seed=5)
    world.start()
    while not any(isinstance(event, e.TurnDone) for _, event in world.journal):
        world.step()
    done = next(event for _, event in world.journal if isinstance(event, e.TurnDone))
    requested = next(
        event
        for _, event in world.journal
        if isinstance(event, e.TurnRequested)
        and event.trajectory_id == done.trajectory_id
        and event.turn == done.turn
    )
    before = world.core.snapshot()
    world.feed(requested)
    assert not of(world.commands[-1], c.StartTurn)
    assert world.core.state.trajectories[done.trajectory_id].turn is None
    assert len(world.core.snapshot()) == len(before)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_turn_that_a_program_reads_is_resumed_wherever_it_continues(streamed: bool) -> None:
    """Its tokens are read already. Any other turn of this mode starts over."""
    world = World(core.config(), seed=5)
    world.start()
    run = core.until(world, c.StartRun)

    def starts() -> list[c.StartTurn]:
        return [
            command
            for command in world.sent(c.StartTurn)
            if command.trajectory_id == run.trajectory_id
        ]

    named = {"trajectory_id": run.trajectory_id, "attempt": run.attempt, "turn": 0}
    world.feed(e.TurnRequested(**named, context_tokens=4, streamed=streamed))
    (first,) = starts()
    world.feed(e.TurnFailed(**named, dispatch=first.dispatch, error="refused"))
    expected = [(first.dispatch, streamed), (first.dispatch + 1, streamed)]
    assert [(start.dispatch, start.resume) for start in starts()] == expected


def test_the_core_tracks_the_progress_of_open_turns() -> None:
    world = World(core.config(), seed=7)
    world.start()
    start = core.until(world, c.StartTurn)

    def sampled(**changes: Any) -> int:
        named = {
            name: getattr(start, name) for name in ("trajectory_id", "attempt", "turn", "dispatch")
        }
        progress = e.TurnProgress(**({**named, "output_tokens": 70} | changes))
        world.feed(
            e.TurnsProgressed(
                turns=(
                    e.TurnProgress(**({**named, "trajectory_id": "nobody", "output_tokens": 9})),
                    progress,
                )
            )
        )
        assert world.commands[-1] == []
        turn = world.core.state.trajectories[start.trajectory_id].turn
        return turn.output_tokens

    for stale in ({"attempt": 1}, {"turn": 1}, {"dispatch": 1}):
        assert sampled(**stale) == 0
    assert sampled() == 70
    assert sampled(output_tokens=90) == 90
    world.feed(e.EngineLost(engine_id=start.engine_id, epoch=0, error="killed"))
    assert sampled() == 0  # no engine has KV of it


def bounded_run(**rollout: Any) -> RunConfig:
    """Return a run in which a complete batch waits for no checkpoint."""
    return core.config(
        "bounded",
        steps=6,
        rollout=rollout,
        run={"checkpoint_every": 0},
        eval={"final_episodes": 0},
    )


def updates_after_batches(world: World) -> list[bool]:
    """Run to the end; for each suspension of an engine while groups are in flight,
    whether the batch of the published version was complete.
    """
    waited = []
    batch = -1
    world.start()
    while world.finish is None:
        idle, before = not world.core.state.drawing.active, len(world.commands)
        world.step()
        new = [command for commands in world.commands[before:] for command in commands]
        batch = max([batch, *(one.step for one in of(new, c.TrainStep))])
        if not idle and any(isinstance(command, c.SuspendEngine) for command in new):
            waited.append(batch >= world.core.state.publication.version)
    return waited


@settings(max_examples=examples(20))
@given(seed=st.integers(0, 2**16), alpha=st.integers(2, 4))
def test_without_early_updates_engines_wait_for_the_next_batch(seed: int, alpha: int) -> None:
    """RollArt §6.2: the batch of a version is complete before engines take it, and is
    trained on while they roll out.
    """
    world = World(bounded_run(alpha=alpha, without=["early_updates"]), seed)
    waits = updates_after_batches(world)
    assert sorted(world.trained) == list(range(6))
    assert all(0 <= step - initiated <= alpha for step, initiated in world.trained_versions)
    assert waits
    assert all(waits)


def test_with_early_updates_engines_do_not_wait() -> None:
    world = World(bounded_run(), seed=1)
    assert not any(updates_after_batches(world))


def test_expired_work_is_cancelled_at_once() -> None:
    world = World(core.config("bounded", steps=6, rollout={"spare_groups": 3}), seed=17)
    world.run()
    dropped = world.core.account().dropped
    assert dropped.get("stale", 0) > 0
    cancels = world.sent(c.CancelTrajectory)
    assert any(command.reason == "stale" for command in cancels)


def test_mode_partial_lets_expired_work_finish_and_trains_none_of_it() -> None:
    plain = core.config("partial", steps=6)
    spare = plain.rollout.model_copy(update={"spare_groups": 3})  # so that some expire
    world = World(plain.model_copy(update={"rollout": spare}), seed=17)
    world.run()
    assert world.core.account().dropped.get("stale", 0) > 0
    cancels = world.sent(c.CancelTrajectory)
    assert not any(command.reason == "stale" for command in cancels)
    assert max(world.core.state.counters.staleness) <= 1


@pytest.mark.parametrize(
    "mode", mostly_extended([*core.MODES, "decoupled"], {"sync", "bounded", "decoupled"})
)
def test_evaluations_continue_after_the_loss_of_the_controller(mode: str) -> None:
    """Otherwise the test above would show nothing of them. Each of them, also the final
    one, is complete, and none takes more episodes than it has.
    """
    world = World(core.config(mode, steps=3, eval={"every": 1, "episodes": 8}), seed=5)
    world.start()
    lost = 0
    while world.finish is None:
        world.step()
        current = world.core.state.evaluations.current
        if current is None or not (current.rewards and current.pending) or lost == 6:
            continue
        if world.core.state.checkpoints.newest == current.version:
            done = sum(map(len, current.rewards.values()))
            core.restart_controller(world)
            suspended = world.core.state.evaluations.suspended
            assert sum(map(len, suspended.rewards.values())) == done
            lost += 1
    assert lost >= 2
    assert world.records.continued[Purpose.EVAL] >= 2
    assert world.evaluations[-1].final


def test_a_user_may_stop_a_run_and_continue_it() -> None:
    world = World(core.config(steps=6), seed=19)
    world.start()
    core.until(world, c.TrainStep)
    world.feed(e.StopRequested())
    world.run_on()
    assert world.core.account().in_flight == 0
    assert not world.evaluations
    core.restart_controller(world)
    world.run_on()
    assert world.core.state.trainer.step == 6
    assert world.evaluations[-1].final


def test_the_target_ends_training_early() -> None:
    world = World(core.config(steps=50, eval={"every": 1, "stop_at": 0.0}), seed=23)
    world.run()
    assert world.core.state.trainer.step < 5
    assert world.evaluations[-1].final


def test_batch_level_stepping_waits_for_the_slowest() -> None:
    world = World(core.config(ablation={"changes": ["no_free_stepping"]}), seed=29)
    world.start()
    while world.finish is None:
        world.step()
        if any(isinstance(command, c.StartTurn) for command in world.commands[-1]):
            members = [
                world.core.state.trajectories[member] for member in world.core.state.pools.run
            ]
            assert all(member.turn is not None for member in members)
            assert not world.core.state.pools.init


def test_members_that_fail_are_retried_before_the_group_continues_without_them() -> None:
    world = World(core.config(rollout={"group_size": 4, "retries": 1}), seed=31, failure=0.15)
    world.run(max_events=200_000)
    assert world.core.state.counters.retried
    sizes = {len(ids) for ids in world.trained.values()}
    assert min(sizes) >= 3 * 2


def test_events_of_an_earlier_epoch_are_ignored() -> None:
    world = World(core.config(), seed=37)
    world.start()
    core.until(world, c.StartTurn)
    before = msgspec.msgpack.decode(world.core.snapshot())
    stale = [
        e.EngineLost(engine_id=EngineId("e0"), epoch=9, error="x"),
        e.TrainerLost(epoch=9, error="x"),
        e.WeightsPublished(epoch=9, version=4, publication_id=4),
        e.TurnDone(
            trajectory_id="g0.0",
            attempt=7,
            turn=0,
            dispatch=0,
            output_tokens=1,
            cached_tokens=0,
            version=0,
        ),
        e.TrajectoryEnded(trajectory_id="nobody", attempt=0, stop_reason="finished"),
    ]
    for event in stale:
        world.feed(event)
    after = msgspec.msgpack.decode(world.core.snapshot())
    for state in (before, after):
        state.pop("idle")
    assert before == after


def test_pools_are_bounded_and_filled() -> None:
    world = World(core.config(steps=3), seed=41)
    world.start()
    most = 0
    while world.finish is None:
        world.step()
        state = world.core.state
        most = max(most, len(state.pools.init) + len(state.pools.run))
    assert most == 8
    assert not [
        t for t in world.core.state.trajectories.values() if t.stage in (Stage.INIT, Stage.RUN)
    ]


def test_environments_that_always_fail_end_the_run_with_their_error() -> None:
    world = World(core.config(rollout={"retries": 1}), seed=43, failure=1.0)
    world.core.state.trainer.restarts = -(10**6)  # only the environments are to be at fault
    world.start()
    while world.finish is None:
        world.failure = (
            0.0
            if isinstance(world.heap[0][2], e.EngineJoined | e.TrainerReady | e.WeightsPublished)
            else 1.0
        )
        world.step()
        assert world.handled < 5000
    assert "failed in the same way: env_error: boom" in world.finish.error
    assert world.core.account().in_flight == 0


def test_rewards_that_are_always_equal_are_reported() -> None:
    world = World(core.config(rollout={"dynamic_sampling": True}), seed=47)
    world.random.choice = lambda options: options[0]  # type: ignore[method-assign,assignment]
    world.start()
    warning = core.until(world, c.Warn)
    assert "equal rewards" in warning.message


def test_an_attempt_whose_reward_fails_counts_once_under_its_last_reason() -> None:
    """48 attempts once counted as 48 finished and 48 reward_error."""

    class Unrewarded(World):
        def execute(self, command: c.Command) -> None:
            if isinstance(command, c.StartEval):
                key = {"trajectory_id": command.trajectory_id, "attempt": command.attempt}
                self.later(
                    e.RewardFailed(**key, stop_reason=StopReason.REWARD_ERROR, error="bad reward")
                )
            else:
                super().execute(command)

    world = Unrewarded(core.config(steps=2, rollout={"retries": 1}), seed=3)
    world.run()
    assert "reward_error: bad reward" in world.finish.error
    counters = world.core.state.counters
    assert counters.stop_reasons.get("reward_error")
    assert "finished" not in counters.stop_reasons
    assert sum(counters.stop_reasons.values()) == counters.attempts
    assert counters.attempts == counters.started + counters.eval_started + counters.relaunched
    assert counters.relaunched > 0
