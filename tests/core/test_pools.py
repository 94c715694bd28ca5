"""The pools of INIT, RUN and EVAL, and the queues before them."""

import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.core.core import Core
from rollweave.core.policy.places import BACKLOG
from rollweave.core.state import Stage
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId, GroupId, TaskId, TrajectoryId
from rollweave.schema.config.rollout import STARTED
from rollweave.schema.status import WaitStatus
from rollweave.schema.work import StopReason, Task
from tests.support.core import POOLS, config
from tests.support.properties import examples
from tests.support.random_world import World

QUEUES = {"queued": "init", "run_queued": "run", "eval_queued": "eval"}
"""Each queue, and the pool for which it waits."""


class Slow:
    """An obvious model of the pools: lists of names, and one rule for each place."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes
        self.at: dict[str, list[str]] = {stage: [] for pair in QUEUES.items() for stage in pair}
        self.closing: dict[str, str] = {}

    def move(self, name: str, source: str, target: str | None) -> None:
        self.at[source].remove(name)
        if target is not None:
            self.at[target].append(name)
        self.fill()

    def cancel(self, name: str, stage: str) -> bool:
        """Cancel an attempt. Return whether the world still holds something of it."""
        self.at[stage].remove(name)
        if stage not in ("queued", "eval_queued"):
            self.closing[name] = stage
        self.fill()
        return name in self.closing

    def fill(self) -> None:
        """Let the first of each queue enter its pool, as long as one can."""
        for queue, pool in (("run_queued", "run"), ("queued", "init"), ("eval_queued", "eval")):
            while self.at[queue] and self.held(pool) < self.sizes[pool] and self.may(pool):
                self.at[pool].append(self.at[queue].pop(0))

    def held(self, pool: str) -> int:
        """Count the attempts with a place of a pool, or in the queue before it."""
        return len(self.at[pool]) + list(self.closing.values()).count(pool)

    def may(self, pool: str) -> bool:
        """Tell whether the queues behind INIT have room for another attempt."""
        room = max(0, self.sizes["eval"] - self.held("eval"))
        backlog = len(self.at["eval_queued"]) >= BACKLOG * self.sizes["run"] + room
        will_wait = self.held("init") + self.held("run_queued")
        return pool != "init" or (not backlog and will_wait < 2 * self.sizes["init"])


def served(running: Any) -> Core:
    """A service with one engine."""
    core = Core(config("sync", rollout={"max_running": running, "retries": 0}))
    slot = e.EngineSlot(id=EngineId("e0"))
    core.handle(0.0, e.RunStarted(engines=(slot,), serving=True))
    joined = {"epoch": 0, "max_slots": 3, "kv_total_tokens": 99, "version": 0}
    core.handle(0.0, e.EngineJoined(engine_id=slot.id, **joined))
    return core


def submit(core: Core, name: str) -> list[c.Command]:
    task = Task(id=TaskId(name), env="a", seed=0)
    return core.handle(0.0, e.RolloutsSubmitted(group_id=GroupId(name), name="a", task=task))


def key(name: str) -> dict[str, Any]:
    return {"trajectory_id": TrajectoryId(name), "attempt": 0}


def ready(core: Core, name: str) -> list[c.Command]:
    return core.handle(0.0, e.EnvReady(**key(name), prompt_tokens=1))


def ended(core: Core, name: str, reason: StopReason = StopReason.FINISHED) -> list[c.Command]:
    return core.handle(0.0, e.TrajectoryEnded(**key(name), stop_reason=reason))


def scored(core: Core, name: str) -> list[c.Command]:
    return core.handle(0.0, e.RewardReady(**key(name), reward=1.0))


def cancelled(core: Core, name: str) -> list[c.Command]:
    return core.handle(0.0, e.RolloutCancelled(trajectory_id=TrajectoryId(name)))


def pools_of(core: Core) -> dict[str, list[str]]:
    pools = core.state.pools
    return {stage: list(getattr(pools, stage)) for pair in QUEUES.items() for stage in pair}


def waits(core: Core, target: str) -> list[WaitStatus]:
    return [wait for wait in core.status(9.0).waits if wait.target == target]


@settings(max_examples=examples(150))
@given(
    seed=st.integers(0, 10_000),
    init=st.integers(1, 4),
    run=st.integers(1, 4),
    eval_=st.integers(1, 3),
)
def test_each_pool_has_what_an_obvious_model_has(
    seed: int, init: int, run: int, eval_: int
) -> None:
    sizes = {"init": init, "run": run, "eval": eval_}
    draw, core, model = random.Random(seed), served(sizes), Slow(sizes)
    for number in range(120):
        _random_event(draw, core, model, f"r{number}")
        core.check()
        assert pools_of(core) == model.at
        assert core.state.pools.closing == {
            TrajectoryId(name): Stage(stage) for name, stage in model.closing.items()
        }


def _random_event(draw: random.Random, core: Core, model: Slow, name: str) -> None:
    """Tell the core and the model of an event that may happen now."""
    possible = [stage for stage in ("init", "run", "eval") if model.at[stage]]
    stage = draw.choice(
        ["new", "new", *possible, *possible, "cancel", *["over"][: len(model.closing)]]
    )
    if stage == "new":
        submit(core, name)
        model.at["queued"].append(f"{name}.0")
        model.fill()
    elif stage == "cancel":
        for held in [one for one in model.at if model.at[one]][:1]:
            chosen = draw.choice(model.at[held])
            cancelled(core, chosen)
            model.cancel(chosen, held)
    elif stage == "over":
        chosen = draw.choice(sorted(model.closing))
        ended(core, chosen, StopReason.CANCELLED)
        del model.closing[chosen]
        model.fill()
    else:
        chosen = draw.choice(model.at[stage])
        target = {"init": "run_queued", "run": "eval_queued", "eval": None}[stage]
        {"init": ready, "run": ended, "eval": scored}[stage](core, chosen)
        model.move(chosen, stage, target)


def test_an_attempt_waits_for_run_with_its_environment() -> None:
    """INIT starts others, until twice as many are started as it has places."""
    core = served({"init": 1, "run": 1, "eval": 1})
    for name in ("a", "b", "c", "d"):
        submit(core, name)
    assert [type(one) for one in ready(core, "a.0")] == [c.StartRun, c.StartInit]
    assert [type(one) for one in ready(core, "b.0")] == [c.StartInit], "RUN is full"
    assert not ready(core, "c.0"), "two environments wait"
    now = pools_of(core)
    assert (now["queued"], now["init"], now["run"]) == (["d.0"], [], ["a.0"])
    assert now["run_queued"] == ["b.0", "c.0"]
    (wait,) = waits(core, "a place in RUN")
    assert (wait.count, wait.what) == (2, "their environments are ready")
    (wait,) = waits(core, "a free place")
    assert (wait.count, wait.oldest) == (1, "d.0")
    attempts = core.status(9.0).attempts
    assert (attempts["queued"], attempts["ready"], attempts["running"]) == (1, 2, 1)
    commands = ended(core, "a.0")
    assert [type(one) for one in commands] == [c.StartRun, c.StartInit, c.StartEval]


def test_rewards_wait_for_their_own_pool_and_hold_back_further_attempts() -> None:
    core = served({"init": 3, "run": 1, "eval": 1})
    rolled_out = BACKLOG + 1
    for number in range(rolled_out + 4):
        submit(core, f"{number:02}")
    for number in range(rolled_out):
        ready(core, f"{number:02}.0")
        ended(core, f"{number:02}.0")
    attempts = core.status(9.0).attempts
    assert (attempts["rolled out"], attempts["in evaluation"]) == (BACKLOG, 1)
    counts = {wait.what: wait.count for wait in waits(core, "rewards of a")}
    assert counts == {"all places are taken": BACKLOG, "being computed": 1}
    ready(core, f"{rolled_out:02}.0")
    assert pools_of(core)["queued"] == [f"{rolled_out + 3:02}.0"], "INIT has a place for it"
    assert len(pools_of(core)["init"]) == 2
    (wait,) = waits(core, "rewards")
    assert (wait.count, wait.what) == (1, "as many attempts as may wait for them do")
    assert any(isinstance(one, c.StartInit) for one in scored(core, "00.0"))
    assert not waits(core, "rewards")


@pytest.mark.parametrize("stage", ["init", "run_queued", "run", "eval"])
def test_a_cancelled_attempt_keeps_the_place_of_its_own_pool(stage: str) -> None:
    """The world has not stopped it yet; other pools have their places."""
    core = served({"init": 1, "run": 1, "eval": 1})
    for name in ("a", "b", "c", "d", "e", "f"):
        submit(core, name)
    for name in ("a.0", "b.0"):
        ready(core, name)
        ended(core, name)
    for name in ("c.0", "d.0", "e.0") if stage == "run_queued" else ("c.0",):
        ready(core, name)
    before = pools_of(core)
    victim, *others = before[stage]
    assert [type(one) for one in cancelled(core, victim)] == [c.CancelTrajectory]
    assert pools_of(core) == before | {stage: others}, "no other attempt has its place"
    core.check()
    following = ended(core, victim, StopReason.CANCELLED)
    starts = {"init": c.StartInit, "run_queued": c.StartInit, "eval": c.StartEval}
    assert starts.get(stage, c.Deliver) in [type(one) for one in following]


def test_an_environment_that_dies_while_it_waits_frees_its_place() -> None:
    core = served({"init": 1, "run": 1, "eval": 1})
    for name in ("a", "b", "c", "d"):
        submit(core, name)
    for name in ("a.0", "b.0", "c.0"):
        ready(core, name)
    assert pools_of(core)["init"] == []
    commands = core.handle(
        0.0, e.TrajectoryEnded(**key("b.0"), stop_reason=StopReason.ENV_ERROR, error="it died")
    )
    assert pools_of(core)["init"] == ["d.0"]
    assert any(isinstance(one, c.StartInit) for one in commands)
    core.check()


def test_a_lost_controller_starts_the_waiting_attempts_again() -> None:
    core = served({"init": 2, "run": 1, "eval": 1})
    for name in ("a", "b"):
        submit(core, name)
    ready(core, "a.0")
    ready(core, "b.0")
    assert pools_of(core)["run_queued"] == ["b.0"]
    again = Core.restore(core.snapshot(), core._run.config)
    assert pools_of(again) == pools_of(core)
    again.handle(1.0, e.WorldLost(engines=(e.EngineSlot(id=EngineId("e0")),)))
    assert pools_of(again)["queued"] == ["a.0", "b.0"]
    assert pools_of(again)["run_queued"] == []
    again.check()


@pytest.mark.parametrize("mode", ["sync", "stream", "bounded", "decoupled"])
@pytest.mark.parametrize("running", sorted(POOLS.keys() - {"one"}))
def test_a_run_fills_each_pool_and_never_exceeds_one(mode: str, running: str) -> None:
    sizes = POOLS[running]
    assert isinstance(sizes, dict)
    rollout = {"max_running": sizes, "groups_per_step": 6}
    world = World(config(mode, steps=3, rollout=rollout), seed=41)
    world.start()
    most = dict.fromkeys(("init", "run_queued", "run", "eval"), 0)
    while world.finish is None:
        world.step()
        pools = world.core.state.pools
        most = {stage: max(count, len(getattr(pools, stage))) for stage, count in most.items()}
        assert len(pools.init) <= sizes["init"]
        assert len(pools.init) + len(pools.run_queued) <= STARTED * sizes["init"]
        assert len(pools.run) <= sizes["run"]
        assert len(pools.eval) <= sizes["eval"]
    assert world.finish.error == ""
    assert most["run"] == min(sizes["run"], 12)
    assert bool(most["run_queued"]) == (mode != "decoupled")


def test_episodes_of_an_evaluation_enter_run_first() -> None:
    world = World(
        config(
            "bounded",
            steps=4,
            eval={"every": 1, "episodes": 6},
            rollout={"max_running": {"init": 6, "run": 2, "eval": 2}, "groups_per_step": 6},
        ),
        seed=5,
    )
    world.start()
    met = 0
    while world.finish is None:
        before = list(world.core.state.pools.run_queued)
        world.step()
        core = world.core
        purposes = {
            name: core.state.groups[core.state.trajectories[name].group_id].purpose
            for name in before
            if name in core.state.trajectories
            and core.state.trajectories[name].group_id in core.state.groups
        }
        entered = [name for name in purposes if name in core.state.pools.run]
        still = [name for name in purposes if name in core.state.pools.run_queued]
        if any(purposes[name] == "train" for name in entered):
            assert all(purposes[name] == "train" for name in still)
        met += len(set(purposes.values())) > 1
    assert met, "no episode waited beside training"
