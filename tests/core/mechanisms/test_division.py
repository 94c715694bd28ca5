"""Places that move between engines and ranks of the trainer, in worlds in which
everything may fail meanwhile.
"""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.core.core import Core
from rollweave.core.mechanisms.division import Dividing
from rollweave.core.mechanisms.membership.members import engines_to_start, next_id, ranks_to_start
from rollweave.core.policy.ratio import STEADY
from rollweave.core.state import State, TrainerStatus
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.config.root import RunConfig
from rollweave.schema.hosts import RankSlot
from tests.support import core
from tests.support.kinds import of
from tests.support.properties import examples
from tests.support.random_world import World

MODES = [mode for mode in core.MODES if mode != "decoupled"]


def elastic(mode: str = "sync", *, steps: int = 6, **sections: object) -> RunConfig:
    """Return a configuration with three engines, of which two may become ranks."""
    return core.config(
        mode, steps=steps, engine_groups=[{"count": 3}], trainer=core.ELASTIC, **sections
    )


def divided(world: World) -> tuple[int, int]:
    """Return the numbers of ranks and of engines."""
    state = world.core.state
    return len(state.hosts.ranks), len(state.engines)


def until_moving(world: World) -> Dividing:
    """Run until places begin to move."""
    world.start()
    part = world.core._run.part(Dividing)
    while not part.goal:
        world.step()
    return part


@pytest.mark.timeout(900)
@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 10_000),
    mode=st.sampled_from(MODES),
    failure=st.sampled_from([0.0, 0.02, 0.1]),
    hang=st.sampled_from([0.0, 0.0, 0.01]),
    restless=st.sampled_from([0.0, 0.0, 0.01]),
    every=st.sampled_from([0, 0, 2]),
    restarts=st.sampled_from([1, 100]),
    kills=st.lists(st.integers(1, 300), max_size=3),
)
def test_any_world_whose_places_move_ends_accounted_for(
    seed: int,
    mode: str,
    failure: float,
    hang: float,
    restless: float,
    every: int,
    restarts: int,
    kills: list[int],
) -> None:
    config = elastic(mode, eval={"every": every}, watchdog={"restarts": restarts})
    world = World(config, seed, failure=failure, hang=hang, restless=restless)
    with core.asking(seed):
        if kills:
            core.run_with_lost_controllers(world, kills)
        else:
            world.run()
    account = world.core.account()
    assert account.balanced
    assert account.in_flight == 0


@pytest.mark.parametrize("mode", MODES)
def test_moves_lose_no_step_and_repeat_none(mode: str) -> None:
    world, places = World(elastic(mode, steps=8), 4), set[tuple[int, int]]()
    with core.asking(4):
        world.start()
        while world.finish is None:
            world.step()
            places.add(divided(world))
    assert world.core.state.error == ""
    assert world.core.state.counters.scheduling.moved_ranks >= 3
    assert max(ranks for ranks, _ in places) == 3
    assert max(map(sum, places)) == 4, "no place is used twice"
    trained = [(one.step, one.part) for one in world.sent(c.TrainStep)]
    assert trained == list(dict.fromkeys(trained)), "no step is repeated"
    assert {step for step, _ in trained} == set(range(8)), "none is lost"
    restarted = world.sent(c.RestartTrainer)
    assert len({len(one.ranks) for one in restarted}) > 1
    for one in restarted:
        assert one.step is not None
        assert 1 <= len(one.ranks) <= 3
        assert one.reason == f"it continues with {len(one.ranks)} ranks"


def test_a_replayed_run_gives_identical_commands() -> None:
    config = elastic()
    world = World(config, 2, failure=0.02)
    with core.asking(2):
        world.run()
    again = Core(config)
    with core.asking(2):
        for (now, event), commands in zip(world.journal, world.commands, strict=True):
            assert again.handle(now, event) == commands


def test_a_rank_that_is_lost_in_mid_move_delays_the_move_alone() -> None:
    world = World(elastic("bounded", steps=8), 4)
    with core.asking(4):
        part = until_moving(world)
        while world.core.state.trainer.status is not TrainerStatus.SAVING:
            world.step()
        goal = part.goal
        world.feed(e.TrainerLost(epoch=world.core.state.trainer.epoch, error="killed"))
        while part.goal == goal:
            world.step()
        assert divided(world)[0] == goal
        while world.finish is None:
            world.step()
    assert world.core.state.error == ""


def test_a_move_whose_checkpoint_fails_is_given_up() -> None:
    world = World(elastic("bounded", steps=8), 4)
    with core.asking(4):
        part = until_moving(world)
        trainer = world.core.state.trainer
        assert trainer.saving is not None
        world.feed(e.CheckpointFailed(epoch=trainer.epoch, step=trainer.saving, error="disk"))
        assert part.goal == 0
        assert world.core.state.counters.scheduling.moved_ranks == 0
        assert "stays with the former division: the checkpoint failed" in {
            one.message for one in of(world.commands[-1], c.Warn)
        }
        assert trainer.status is not TrainerStatus.SAVING
        assert not any(engine.departing for engine in world.core.state.engines.values())


def test_a_stop_in_mid_move_ends_the_run() -> None:
    world = World(elastic("bounded", steps=8), 4)
    with core.asking(4):
        until_moving(world)
        world.feed(e.StopRequested())
        while world.finish is None:
            world.step()
    assert world.finish.error == ""


@pytest.mark.parametrize(("seed", "draining"), [(1, 1), (4, 0)])
def test_engines_keep_their_places_if_no_other_is_left(seed: int, draining: int) -> None:
    world = World(elastic("bounded", steps=12), seed)
    with core.asking(seed):
        world.start()
        part = world.core._run.part(Dividing)
        while not part.places or len(part.engines) != draining:
            world.step()
        places = sum(divided(world)) + len(part.places) - draining
        lost = [engine for engine in world.core.state.engines.values() if not engine.draining]
        for engine in lost:
            engine.failures.restarts = 1_000
            world.feed(e.EngineLost(engine_id=engine.id, epoch=engine.epoch, error="killed"))
        assert not part.places
        assert sum(divided(world)) == places - len(lost), "all but those of the lost engines"
        while world.finish is None:
            world.step()
    assert world.finish.error == ""


def test_a_trainer_that_waits_for_a_long_turn_is_not_taken_for_stuck() -> None:
    limits = {"train_s": 500.0, "turn_s": 1e6}
    world = World(elastic("bounded", steps=8, watchdog=limits), 1)
    with core.asking(1):
        part, trainer = until_moving(world), world.core.state.trainer
        assert trainer.saving is not None
        assert part.engines
        world.feed(e.CheckpointSaved(epoch=trainer.epoch, step=trainer.saving))
        assert trainer.status is TrainerStatus.SAVING
        now, _ = world.journal[-1]
        commands = world.core.handle(now + 501.0, e.TimerFired())
    world.core.check()
    assert not of(commands, c.RestartTrainer)


def test_the_first_step_with_further_ranks_is_not_compared() -> None:
    """A process that has just started takes longer for its first step."""
    world = World(elastic("bounded", steps=12), 1)
    with core.asking(1):
        part, trainer = until_moving(world), world.core.state.trainer
        moved_at, most = trainer.step, part.goal
        while most not in part.speeds:
            world.step()
    assert trainer.step == moved_at + 2


@pytest.mark.parametrize("seed", range(4))
def test_no_rank_takes_the_place_of_an_engine_that_joined(seed: int) -> None:
    world, most = World(elastic("bounded", steps=8), seed), 0
    with core.asking(seed):
        world.start()
        joined = next_id(world.core.state)
        world.feed(e.EngineRegistered(engine=e.EngineSlot(id=joined, degree=1)))
        while world.finish is None:
            world.step()
            assert world.core.state.engines[joined].joined
            most = max(most, divided(world)[0])
    assert world.finish.error == ""
    assert most > 1


def test_a_world_begins_with_the_division_of_the_run() -> None:
    config, state = elastic(), State()
    assert (ranks_to_start(config, state), len(engines_to_start(config, state))) == (1, 3)
    for ranks in (1, 2, 3):
        state.hosts.ranks = [RankSlot()] * ranks
        again = ranks_to_start(config, state), len(engines_to_start(config, state))
        assert again == (ranks, 4 - ranks)
    fixed = core.config("sync", engine_groups=[{"count": 3}])
    assert (ranks_to_start(fixed, state), len(engines_to_start(fixed, state))) == (1, 3)


def test_steps_without_enough_turns_ask_for_nothing() -> None:
    world = World(elastic(steps=STEADY + 1), 3)
    world.run()
    assert world.core.state.counters.scheduling.moved_ranks == 0


def test_a_run_with_a_fixed_number_of_ranks_has_no_part_of_it() -> None:
    world = World(core.config("sync"), 3)
    world.run()
    state = msgspec.msgpack.decode(world.core.snapshot())
    assert not {"division", "load", "costs"} & state["mechanisms"].keys()
