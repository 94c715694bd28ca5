"""Configurations of the core, and helpers that drive a random world."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from rollweave.core.continuation import continuable
from rollweave.core.core import Core
from rollweave.core.mechanisms import division, ratio
from rollweave.core.mechanisms.membership.members import engines_to_start
from rollweave.core.policy.ratio import Change, Division, Load, Patience, StepTimes
from rollweave.core.policy.routing import PrefillSite
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.run import PRIORITIES
from tests.support.random_world import World

MODES = ("sync", "one_step", "stream", "partial", "bounded", "decoupled")


SCHEDULINGS: dict[str, dict[str, object]] = {
    "turn": {},
    "trajectory": {"scheduling": "trajectory"},
    "rank": {"scheduling": "trajectory", "policies": ["rank"]},
    "heddle": {"scheduling": "heddle"},
    "verl": {"policies": ["round_robin", "pinned"]},
    "verl*": {"policies": ["round_robin", "hybrid"]},
    "autellix": {"policies": ["shortest_first", "least_load"]},
    "preempting": {"policies": ["longest_first", "affinity"]},
}
"""Settings of [rollout], and policies among `ablation.changes`, for `config`."""


POOLS: dict[str, int | dict[str, int]] = {
    "one": 8,
    "least": {"init": 1, "run": 1, "eval": 1},
    "slow rewards": {"init": 3, "run": 5, "eval": 1},
    "slow environments": {"init": 6, "run": 2, "eval": 3},
    "slow starts": {"init": 1, "run": 7, "eval": 7},
}
"""Values of `rollout.max_running`: one pool, and pools of INIT, RUN and EVAL."""

ALLOCATION = {"budget": 5}


SPLIT = [{"phase": "prefill", "count": 1}, {"phase": "decode"}]
"""Groups of engines, for `config`: one computes prompts for the others."""


EITHER = [{"phase": "either", "count": 3}]
"""A group of engines, for `config`, that move between prefill and decoding."""


ELASTIC = {"ranks": {"minimum": 1, "maximum": 3}}
"""The settings of a trainer, for `config`, that takes places of engines."""


def config(mode: str = "bounded", *, steps: int = 4, **sections: Any) -> RunConfig:
    rollout: dict[str, Any] = {
        "mode": mode,
        "groups_per_step": 3,
        "group_size": 2,
        "max_running": 8,
        **sections.pop("rollout", {}),
    }
    if mode not in ("partial", "bounded", "decoupled"):
        rollout.pop("alpha", None)
    if mode in ("partial", "decoupled"):
        rollout.pop("spare_groups", None)
    if mode == "decoupled":
        rollout.pop("without", None)
        orders = [one for one in rollout.pop("policies", ()) if one in PRIORITIES]
        by_length = rollout.pop("scheduling", "turn") != "turn"
        rollout["policies"] = orders or (["longest_first"] if by_length else [])
        sections["allocation"] = None
    without = [f"no_{name}" for name in rollout.pop("without", ())]
    more = sections.pop("ablation", {}).get("changes", ())
    changes = [*rollout.pop("policies", ()), *without, *more]
    evaluation, engines = sections.pop("eval", {}), sections.pop("engines", {})
    episodes = {"episodes": 2} if evaluation.get("every") else {}  # without effect otherwise
    return RunConfig.model_validate(
        {
            "run": {"name": "t", "steps": steps, "checkpoint_every": 2, **sections.pop("run", {})},
            "model": {"scratch": {}},
            "tasks": sections.pop("tasks", [{"env": "a", "weight": 2.0}, {"env": "b"}]),
            "rollout": rollout,
            "ablation": {"changes": changes},
            "engines": [
                {
                    **({"count": 2} if sections.get("allocation") is None else {}),
                    "max_slots": 3,
                    **engines,
                    **group,
                }
                for group in sections.pop("engine_groups", [{}])
            ],
            "eval": {"final_episodes": 3, **episodes, **evaluation},
            **sections,
        }
    )


def restart_controller(world: World) -> None:
    """Lose everything in flight; the core is restored from its snapshot."""
    world.heap.clear()
    world.timer = None
    world.finish = None
    world.compared.clear()
    world.core = Core.restore(world.core.snapshot(), world.config)
    if world.config.trainer.elastic:
        slots = engines_to_start(world.config, world.core.state)
        world.engine_degrees = {str(slot.id): slot.degree for slot in slots}
        world.engine_epoch = dict.fromkeys(world.engine_degrees, 0)
    world.engine_epoch = dict.fromkeys(world.engine_epoch, 0)
    world.engine_version.clear()
    world.with_memory.clear()
    world.releasing.clear()
    relays = world.begin_relays()
    recorded = world.records.recorded(continuable(world.core.state))
    world.feed(
        e.WorldLost(
            engines=world.slots(),
            relays=relays,
            ranks=world.rank_slots(),
            workers=world.worker_slots(),
            recorded=recorded,
        )
    )
    if world.finish is None:
        for name in world.first_workers():
            world.join_worker(name)
        for name in world.engine_epoch:
            world.join(name)
        for name in world.relay_epoch:
            world.join_relay(name)


def run_with_lost_controllers(world: World, kills: Sequence[int]) -> None:
    """Run to the end. The controller is lost after each of these numbers of events."""
    world.start()
    for kill in kills:
        for _ in range(kill):
            if world.finish is None:
                world.step()
        restart_controller(world)
    while world.finish is None:
        assert world.handled < 50_000, "no end"
        world.step()
    assert world.finish.error == "" or "checkpoint" in world.finish.error
    assert world.core.account().balanced


def run_accounted_for(world: World, *, lost: bool) -> None:
    """Run to the end, and check that every attempt is accounted for. With `lost`, the
    controller is lost once; without, check that a replay gives the same commands.
    """
    world.start()
    restart_at = 200 if lost else 0
    while world.finish is None:
        assert world.handled < 60_000, f"no end: {world.core.state.phase}"
        world.step()
        if restart_at and world.handled >= restart_at and world.finish is None:
            restart_at = 0
            restart_controller(world)
    account = world.core.account()
    assert account.balanced
    assert account.in_flight == 0
    if not lost:
        core = Core(world.config)
        assert [core.handle(now, event) for now, event in world.journal] == world.commands


def until(world: World, kind: type[c.Command]) -> c.Command:
    """Run until a command of this kind is emitted, and return it."""
    seen = len(world.commands)
    while True:
        world.step()
        for commands in world.commands[seen:]:
            for command in commands:
                if isinstance(command, kind):
                    return command
        seen = len(world.commands)


@contextmanager
def alternating() -> Iterator[None]:
    """Ask after each step for as many ranks less than the maximum as there are more
    than the minimum, whatever was measured.
    """

    def other(
        times: StepTimes, _load: Load, *, ranks: int, bounds: tuple[int, int], **_: Any
    ) -> Division:
        return Division(ranks=sum(bounds) - ranks, step_s=times.step_s, gain=1.0)

    with asking(0), mock.patch.object(division, "division", other):
        yield


@contextmanager
def asking(seed: int) -> Iterator[None]:
    """Ask for an engine's move in a random way after each step, or for a random
    division of places, whatever was measured, and compute prompts elsewhere whenever
    that is possible.
    """
    draw = random.Random(seed)
    load = Load(
        attempts=8.0,
        prompt_s=1.0,
        mixed_s=1.0,
        move_s=0.0,
        steps_s=1.0,
        sequence_s=0.0,
        between_s=0.0,
        slots=8,
    )

    def any_way(load: Load, prefill: int, decode: int) -> Change:
        assert load.attempts
        ways = [way for way in (1, -1) if prefill + way >= 0 and decode - way >= 1]
        return Change(way=draw.choice(ways), prefill=prefill, gain=1.0)

    def any_division(
        times: StepTimes, load: Load, *, ranks: int, engines: int, bounds: tuple[int, int], **_: Any
    ) -> Division:
        assert bounds[0] <= ranks <= bounds[1]
        assert load.attempts * engines
        return Division(ranks=draw.randint(*bounds), step_s=times.step_s, gain=1.0)

    with (
        mock.patch.object(ratio, "load_between", return_value=load),
        mock.patch.object(division, "load_between", return_value=load),
        mock.patch.object(ratio, "change", any_way),
        mock.patch.object(division, "division", any_division),
        mock.patch.object(ratio, "pays", return_value=True),
        mock.patch.object(division, "pays", return_value=True),
        mock.patch.object(Patience, "needed", return_value=1),
        always_split(),
    ):
        yield


@contextmanager
def always_split() -> Iterator[None]:
    """Compute prompts elsewhere whenever that is possible, whatever it costs."""

    def first(sites: Sequence[PrefillSite], **_: Any) -> EngineId | None:
        return sites[0].id if sites else None

    with (
        mock.patch("rollweave.core.mechanisms.phases.prefill_site", first),
        mock.patch("rollweave.core.mechanisms.phases.LEAST_TOKENS", 1),
    ):
        yield
