"""Engines that move between prefill and decoding, in worlds in which everything may
fail meanwhile.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.core.core import Core
from rollweave.core.mechanisms import ratio
from rollweave.core.mechanisms.load import Counted, load_between
from rollweave.core.policy.ratio import STEADY
from rollweave.schema import commands as c
from rollweave.schema.base import EngineId
from tests.support import core
from tests.support.kinds import of
from tests.support.properties import examples
from tests.support.random_world import World

MODES = [mode for mode in core.MODES if mode != "decoupled"]


def phases(world: World) -> list[str]:
    return sorted(engine.seat.phase for engine in world.core.state.engines.values())


@pytest.mark.timeout(900)
@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 10_000),
    mode=st.sampled_from(MODES),
    failure=st.sampled_from([0.0, 0.02, 0.1]),
    hang=st.sampled_from([0.0, 0.0, 0.01]),
    restless=st.sampled_from([0.0, 0.0, 0.01]),
    scheduling=st.sampled_from(sorted(core.SCHEDULINGS)),
    restarts=st.sampled_from([1, 100]),
    kills=st.lists(st.integers(1, 200), max_size=2),
)
def test_any_world_whose_engines_change_their_phase_ends_accounted_for(
    seed: int,
    mode: str,
    failure: float,
    hang: float,
    restless: float,
    scheduling: str,
    restarts: int,
    kills: list[int],
) -> None:
    settings_ = core.config(
        mode,
        steps=6,
        rollout=core.SCHEDULINGS[scheduling],
        engine_groups=core.EITHER,
        watchdog={"restarts": restarts},
    )
    world = World(settings_, seed, failure=failure, hang=hang, restless=restless)
    with core.asking(seed):
        if kills:
            core.run_with_lost_controllers(world, kills)
        else:
            world.run()
    account = world.core.account()
    assert account.balanced
    assert account.in_flight == 0


def test_engines_move_in_a_random_world() -> None:
    """The worlds above would prove nothing if no engine moved."""
    world = World(core.config("bounded", steps=8, engine_groups=core.EITHER), 5)
    with core.asking(5):
        world.run()
    moved = [
        (command.component, command.message)
        for commands in world.commands
        for command in of(commands, c.Warn)
        if "moves from" in command.message
    ]
    assert len(moved) == world.core.state.counters.scheduling.moved_engines >= 3
    assert any("decode to prefill: 100% more turns" in message for _, message in moved)
    counted = world.core.state.counters.scheduling
    assert counted.split_turns > 0, "prefill engines have computed prompts"


def test_a_replayed_run_gives_identical_commands() -> None:
    config = core.config("sync", steps=6, engine_groups=core.EITHER)
    world = World(config, 2, failure=0.02)
    with core.asking(2):
        world.run()
    again = Core(config)
    with core.asking(2):
        for (now, event), commands in zip(world.journal, world.commands, strict=True):
            assert again.handle(now, event) == commands


def test_a_world_begins_with_one_prefill_engine_and_keeps_the_ratio_of_the_run() -> None:
    world = World(core.config("sync", engine_groups=core.EITHER), 1)
    run = world.core._run
    world.run()
    assert phases(world) == ["decode", "decode", "prefill"]
    run.part(ratio.Ratio).prefill = 2
    ratio.replaced(run, {})
    for engine in run.state.engines.values():
        engine.seat.phase = "decode"
    ratio.replaced(run, {})
    assert phases(world) == ["decode", "prefill", "prefill"]


def test_the_last_engine_samples() -> None:
    world = World(core.config("sync", engine_groups=core.EITHER), 1)
    world.run()
    run = world.core._run
    for name in [engine.id for engine in run.state.engines.values() if engine.samples]:
        lost = run.state.engines.pop(EngineId(name))
        ratio.removed(run, lost)
    assert phases(world) == ["decode"]
    assert of(run.out, c.Warn)[-1].message == "moves from prefill to decode: no other samples"


def test_steps_without_enough_turns_ask_for_nothing() -> None:
    world = World(core.config("sync", steps=STEADY + 1, engine_groups=core.EITHER), 3)
    world.run()
    assert world.core.state.counters.scheduling.moved_engines == 0
    counted = Counted()
    assert load_between(world.core._run, counted, counted, []) is None
