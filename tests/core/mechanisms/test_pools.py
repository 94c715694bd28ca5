"""Turns of task domains that name a pool run on its engines (RollArt §5.2)."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.core.core import Core
from rollweave.core.mechanisms import pools as affinity
from rollweave.core.mechanisms.costs.rates import learns_pools
from rollweave.core.mechanisms.pools import Pools
from rollweave.core.policy.turn_times import DomainProfile, Prices, TurnTime, TurnTimes, Worked
from rollweave.core.run import Run
from rollweave.core.state import Engine, EngineStatus, TrainerStatus, Trajectory, Turn
from rollweave.schema import events as e
from rollweave.schema.config.root import RunConfig
from tests.support.pools import PooledWorld, pooled
from tests.support.properties import examples
from tests.support.random_world import World

PLACEMENTS = (
    "affinity",
    "earliest",
    "least_load",
    "pinned",
    "partition",
    "partition gain longest_first",
)


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 2**16),
    mode=st.sampled_from(["sync", "one_step", "stream", "partial", "bounded"]),
    placement=st.sampled_from(PLACEMENTS),
    failure=st.sampled_from([0.0, 0.03]),
    affinity=st.sampled_from(["declared", "learned"]),
)
def test_turns_run_in_the_pool_of_their_domain_and_a_replay_decides_the_same(
    seed: int, mode: str, placement: str, failure: float, affinity: str
) -> None:
    """The controller is lost once on the way."""
    run_config = pooled(
        mode,
        placement=placement,
        watchdog={"restarts": 1000},
        affinity=affinity,
        steps=12 if affinity == "learned" else 4,
    )
    world = PooledWorld(run_config, seed, failure=failure)
    world.start()
    for _ in range(seed % 300):
        if world.finish is None:
            world.step()
    if world.finish is None:
        world.lose_controller()
    world.run_on()
    assert world.core.account().balanced
    assert failure or not world.finish.error
    replayed = Core(run_config)
    for (now, event), commands in zip(world.journal, world.commands, strict=True):
        assert replayed.handle(now, event) == commands, event
    assert replayed.snapshot() == world.core.snapshot()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_domains_whose_pool_has_engines_use_no_others(placement: str) -> None:
    world = PooledWorld(pooled(placement=placement), seed=1, spread=0.01)
    world.start()
    while any(engine.version < 0 for engine in world.core.state.engines.values()):
        world.step()
    world.elsewhere = 0
    world.run_on()
    assert world.elsewhere == 0


@pytest.mark.extended
def test_a_partition_is_planned_for_each_pool() -> None:
    world = PooledWorld(pooled(placement="partition gain", steps=12), seed=1)
    world.start()
    planned: dict[str, set[str]] = {}
    while world.finish is None:
        world.step()
        for pool, partition in world.core.state.mechanisms["placement"].partitions.items():
            planned.setdefault(pool, set()).update(one.engine_id for one in partition.shares)
    assert planned["compute"] == {"e0", "e1"}
    assert planned["bandwidth"] >= {"e2", "e3"}
    assert planned[""] == {"e0", "e1", "e2", "e3"}


def test_a_pool_without_engines_is_replaced_by_its_fallback_until_one_is_back() -> None:
    world = PooledWorld(pooled(steps=40), seed=1)
    world.start()
    while len(_serving(world, "bandwidth")) < 2:
        world.step()
    lost = _serving(world, "bandwidth")
    join, world.join = world.join, lambda name: None  # type: ignore[method-assign]
    for engine in lost:
        world.feed(e.EngineLost(engine_id=engine.id, epoch=engine.epoch, error="killed"))
    world.elsewhere = 0
    while world.elsewhere < 5:
        world.step()
    world.join = join  # type: ignore[method-assign]
    for engine in lost:
        world.join(engine.id)
    while not _serving(world, "bandwidth"):
        world.step()
    world.elsewhere = 0
    for _ in range(300):
        world.step()
    assert world.elsewhere == 0


def _serving(world: World, pool: str) -> list[Engine]:
    engines = world.core.state.engines.values()
    return [one for one in engines if one.seat.pool == pool and one.status is EngineStatus.SERVING]


FAST_PROMPTS = Prices(fixed_s=0.005, sequence_s=5e-5, context_s=3e-8, prompt_s=2e-5)
FAST_OUTPUT = Prices(fixed_s=0.004, sequence_s=4e-5, context_s=2e-8, prompt_s=14e-5)
HARDWARE = {"compute": FAST_PROMPTS, "bandwidth": FAST_OUTPUT}
READS, WRITES = {"prompt": 400_000, "output": 100}, {"prompt": 500, "output": 2000}


def learned(*, pools: tuple[str | None, ...] = (None, None, None)) -> RunConfig:
    """A run whose three domains begin in these pools."""
    plain = pooled(affinity="learned", steps=12).model_dump(exclude_unset=True)
    for task, pool in zip(plain["tasks"], pools, strict=True):
        task["pool"] = pool
    return RunConfig.model_validate(plain)


def ready(run_config: RunConfig) -> PooledWorld:
    """A world whose engines all serve."""
    world = PooledWorld(run_config, seed=1, spread=0.01)
    world.start()
    while any(engine.version < 0 for engine in world.core.state.engines.values()):
        world.step()
    return world


def teach(
    run: Run,
    works: dict[str, dict[str, int]],
    *,
    hardware: dict[str, Prices] = HARDWARE,
    where: dict[str, tuple[str, ...]] | None = None,
    turns: int = 40,
) -> None:
    """Let `turns` turns of each domain finish in each of its pools, and plan."""
    random_, state = random.Random(1), run.state.mechanisms["pools"]
    for name, work in works.items():
        for pool in (where or {}).get(name, tuple(hardware)):
            prices, profile = hardware[pool], state.profiles.setdefault(name, DomainProfile())
            times = (
                run.state.mechanisms["costs"]
                .turn_times.setdefault(pool, {})
                .setdefault(1, TurnTimes())
            )
            worked = state.worked.setdefault(pool, {}).setdefault(1, Worked())
            for _ in range(turns):
                batch, context = random_.uniform(2, 8), random_.uniform(1000, 9000)
                output = max(1, round(work["output"] * random_.uniform(0.5, 1.5)))
                prompts = round(work["prompt"] * batch)
                seconds = output * prices.step_s(batch, context) + prompts * prices.prompt_s
                time = TurnTime(
                    seconds=seconds,
                    output_tokens=output,
                    prompt_tokens=prompts,
                    batch=batch,
                    context=context,
                )
                times.add(time, most=256)
                profile.add(pool, prompt=work["prompt"], output=output, batch=batch, context=4000)
                worked.add(time, prompt=work["prompt"], context=context)
    run.state.mechanisms["pools"].planned_at = -1
    affinity.plan(run)


def test_domains_move_where_they_are_done_earliest() -> None:
    run = ready(learned()).core._run
    teach(run, {"a": READS, "b": WRITES})
    shares = affinity.shares_now(run)
    assert shares["a"]["compute"] > 0.9
    assert shares["b"]["bandwidth"] > 0.9
    assert not shares["c"], "it has had no turn"
    known = run.state.mechanisms["pools"].token_costs["a"]
    assert known["bandwidth"].prompt.seconds > 4 * known["compute"].prompt.seconds
    assert known["bandwidth"].output.seconds < known["compute"].output.seconds


def test_uniform_hardware_changes_nothing() -> None:
    run = ready(learned()).core._run
    same = dict.fromkeys(HARDWARE, FAST_PROMPTS)
    for _ in range(5):
        teach(run, {"a": READS, "b": WRITES}, hardware=same)
    assert not run.state.mechanisms["pools"].shares
    assert not run.state.mechanisms["pools"].trial


def test_a_small_gain_is_not_worth_a_change() -> None:
    run = ready(learned(pools=("compute", "bandwidth", None))).core._run
    teach(run, {"a": READS, "b": WRITES | {"output": 3600}})
    before = affinity.shares_now(run)
    teach(run, {"a": READS, "b": WRITES | {"output": 3700}})
    assert affinity.shares_now(run) == before


def test_a_wrong_declaration_is_tried_then_corrected() -> None:
    run = ready(learned(pools=("bandwidth", "compute", None))).core._run
    works = {"a": READS, "b": WRITES}
    teach(run, works, where={"a": ("bandwidth",), "b": ("compute",)})
    state = run.state.mechanisms["pools"]
    assert not state.shares, "nothing was seen there yet"
    assert 1 / 8 < state.trial["a"]["compute"] <= 8 / 40
    teach(run, works)
    assert not state.trial
    assert affinity.shares_now(run)["a"]["compute"] > 0.9


def given_pool(run: Run, trajectory: Trajectory) -> str:
    affinity.give_pool(run, trajectory)
    return trajectory.pool


@pytest.mark.parametrize("turns", [16, 40, 1000])
def test_one_step_with_a_trial_makes_the_pool_known(turns: int) -> None:
    """Attempts have one turn each, and steps are as large as the last ones."""
    world = ready(learned(pools=("bandwidth", "compute", None)))
    run, state = world.core._run, world.core.state
    where = {"a": ("bandwidth",), "b": ("compute",)}
    teach(run, {"a": READS, "b": WRITES}, where=where, turns=turns)
    one = next(t for t in state.trajectories.values() if state.groups[t.group_id].name == "a")
    pools = [given_pool(run, one) for _ in range(turns)]
    tried = pools.count("compute")
    assert tried >= affinity.KNOWN_TURNS
    assert tried <= max(turns / 32, 2 * affinity.KNOWN_TURNS) + 1


def test_a_domain_that_is_where_it_should_be_does_not_move() -> None:
    run = ready(learned(pools=("compute", "compute", None))).core._run
    teach(run, {"a": READS, "b": WRITES | {"output": 8000}})
    assert set(run.state.mechanisms["pools"].trial) == {"b"}
    assert affinity.shares_now(run)["a"] == {"compute": 1.0}


def test_a_context_grows_by_half_of_the_output_on_average() -> None:
    world = ready(learned())
    run, state = world.core._run, world.core.state
    one = next(t for t in state.trajectories.values() if state.groups[t.group_id].name == "a")
    engine, turn = next(iter(state.engines.values())), Turn(number=0, context_tokens=400, since=0.0)
    state.mechanisms["pools"].profiles.clear()
    done = e.TurnDone(
        trajectory_id=one.id,
        attempt=0,
        turn=0,
        dispatch=0,
        output_tokens=20,
        cached_tokens=0,
        version=0,
    )
    affinity.learn_turn(run, one, turn, engine, done)
    assert state.mechanisms["pools"].profiles["a"].context == 410


def test_a_domain_that_grows_tenfold_moves_within_three_steps() -> None:
    run = ready(learned()).core._run
    for _ in range(5):
        teach(run, {"a": {"prompt": 40_000, "output": 1000}, "b": READS})
    assert affinity.shares_now(run)["a"].get("bandwidth", 0) > 0.9
    for _ in range(3):
        teach(run, {"a": {"prompt": 400_000, "output": 1000}, "b": WRITES})
    assert affinity.shares_now(run)["a"].get("compute", 0) > 0.9


def test_attempts_follow_the_shares_and_keep_their_pool() -> None:
    world = ready(learned())
    run, state = world.core._run, world.core.state
    state.mechanisms["pools"].shares = {"a": {"compute": 0.25, "bandwidth": 0.75}}
    state.mechanisms["pools"].given = {}
    pools: dict[str, set[str]] = {}
    while world.finish is None:
        world.step()
        if state.trainer.status is TrainerStatus.TRAINING:
            state.mechanisms["pools"].planned_at = state.trainer.step + 1  # no other plan
        for name, trajectory in state.trajectories.items():
            if trajectory.pool and state.groups[trajectory.group_id].name == "a":
                pools.setdefault(f"{name}/{trajectory.attempt}", set()).add(trajectory.pool)
    assert len(pools) >= 8
    assert all(len(of) == 1 for of in pools.values()), "an attempt keeps its pool"
    share = sum(of == {"compute"} for of in pools.values()) / len(pools)
    assert share == pytest.approx(0.25, abs=0.15)
    assert learns_pools(run)


def test_a_pool_without_engines_gets_no_attempts() -> None:
    world = ready(learned())
    run, state = world.core._run, world.core.state
    state.mechanisms["pools"].shares = {"a": {"compute": 0.5, "bandwidth": 0.5}}
    for engine in [one for one in state.engines.values() if one.seat.pool == "bandwidth"]:
        world.feed(e.EngineLost(engine_id=engine.id, epoch=engine.epoch, error="killed"))
    one = next(t for t in state.trajectories.values() if state.groups[t.group_id].name == "a")
    assert {given_pool(run, one) for _ in range(5)} == {"compute"}
    assert affinity.shares_now(run)["a"] == {"compute": 1.0}


def test_a_snapshot_keeps_what_was_learned() -> None:
    world = ready(learned())
    teach(world.core._run, {"a": READS, "b": WRITES})
    before: Any = world.core.state.mechanisms["pools"]
    world.lose_controller()
    assert world.core.state.mechanisms["pools"] == before


def test_a_run_that_is_resumed_with_declared_pools_learns_no_more() -> None:
    world = ready(learned(pools=("bandwidth", "compute", None)))
    world.core.state.mechanisms["pools"].shares = {"a": {"compute": 1.0}}
    plain = world.config.model_dump(exclude_unset=True)
    plain["rollout"] |= {"affinity": "declared"}
    core = Core.restore(world.core.snapshot(), RunConfig.model_validate(plain))
    assert Pools not in core._run.parts
