"""The fault search: it finds nothing in our core, and it finds what cores with planted
mistakes do.
"""

from typing import Any

import pytest

from benchmarks.faults import result_of, searched
from rollweave.core.core import Core
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import GroupId, TrajectoryId
from rollweave.schema.config.root import RunConfig
from rollweave.schema.work import TRAINABLE
from rollweave.sim import faults
from rollweave.sim.books import Books
from rollweave.sim.faults import Report, search
from rollweave.sim.rollouts import Scored
from rollweave.sim.scenarios import FLEET_KINDS, KINDS, MODES, rates, scenario

SEEDS = 50
BLOCK = 10


@pytest.mark.parametrize(
    "first",
    [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(BLOCK, SEEDS, BLOCK))],
)
def test_nothing_breaks(first: int) -> None:
    assert [
        report for seed in range(first, first + BLOCK) if (report := search(seed)).violation
    ] == []


def test_a_seed_is_all_there_is_to_a_report() -> None:
    """Worker processes hash strings otherwise than we do, and find the same."""
    reports = [search(seed) for seed in range(3)]
    assert list(searched(range(3), workers=2)) == reports
    assert len({report.events for report in reports}) == 3


def test_every_mode_and_every_fault_comes_up() -> None:
    assert {scenario(seed).rollout.mode for seed in range(SEEDS)} == set(MODES)
    seen = {kind for seed in (3, 5, 8, 9) for kind in search(seed).faults}
    others = {f"message {what}" for what in ("lost", "doubled", "delayed", "reordered")}
    others |= {
        "environment fails",
        "environment hangs",
        "environment slow",
        "reward fails",
        "reward hangs",
    }
    assert set(KINDS) | others <= seen


def test_engines_join_and_leave_where_each_keeps_to_its_own_pace() -> None:
    seeds = [seed for seed in range(SEEDS) if scenario(seed).rollout.mode == "decoupled"]
    assert any(set(FLEET_KINDS) <= search(seed).faults.keys() for seed in seeds)


def calm() -> int:
    """A seed of which nothing but a planted mistake can break a run."""
    return next(
        seed for seed in range(SEEDS) if rates(seed).until_s == 0 and rates(seed).stop_s is None
    )


class Planted(Core):
    """A core with a mistake in what it does."""

    def handle(self, now: float, event: e.Event) -> list[c.Command]:
        return [self.changed(command) for command in super().handle(now, event)]

    def changed(self, command: c.Command) -> c.Command:
        return command


class TrainsTwice(Planted):
    first: tuple[c.GroupRef, ...] = ()

    def changed(self, command: c.Command) -> c.Command:
        if not isinstance(command, c.TrainStep):
            return command
        self.first = self.first or command.groups
        return c.TrainStep(
            step=command.step, part=command.part, parts=command.parts, groups=self.first
        )


class DeliversHalves(Planted):
    def changed(self, command: c.Command) -> c.Command:
        if not isinstance(command, c.TrainStep):
            return command
        halves = tuple(
            c.GroupRef(id=ref.id, name=ref.name, trajectory_ids=ref.trajectory_ids[:1])
            for ref in command.groups
        )
        return c.TrainStep(step=command.step, part=command.part, parts=command.parts, groups=halves)


class LosesOne(Planted):
    """A scored trajectory leaves every table but the account."""

    def handle(self, now: float, event: e.Event) -> list[c.Command]:
        commands = super().handle(now, event)
        state = self.state
        if isinstance(event, e.RewardReady) and state.trajectories:
            group = state.groups.get(GroupId(event.trajectory_id.split(".")[0]))
            if group is not None and event.trajectory_id in group.chosen:
                group.members.remove(event.trajectory_id)
                group.chosen.remove(event.trajectory_id)
                del state.trajectories[event.trajectory_id]
        return commands


class NeverPublishes(Planted):
    def handle(self, now: float, event: e.Event) -> list[c.Command]:
        return [
            command
            for command in super().handle(now, event)
            if not isinstance(command, c.PublishWeights)
        ]


class Moody(Planted):
    """Decides by something that no journal holds."""

    handled = 0

    def handle(self, now: float, event: e.Event) -> list[c.Command]:
        self.handled += 1
        extra: list[c.Command] = (
            [c.Warn(component="mood", message="")] if self.handled == 50 else []
        )
        return super().handle(now, event) + extra


class CountsTwice(Planted):
    """An attempt whose reward fails is counted at the end of its RUN stage, and again
    at its own.
    """

    def handle(self, now: float, event: e.Event) -> list[c.Command]:
        commands = super().handle(now, event)
        if isinstance(event, e.TrajectoryEnded) and event.stop_reason in TRAINABLE:
            reasons = self.state.counters.stop_reasons
            reasons[event.stop_reason] = reasons.get(event.stop_reason, 0) + 1
        return commands


class Stumbles(Planted):
    def handle(self, now: float, event: e.Event) -> list[c.Command]:
        if isinstance(event, e.StepTrained):
            raise KeyError("planted")
        return super().handle(now, event)


@pytest.mark.parametrize(
    ("core", "words"),
    [
        (TrainsTwice, "was trained in step 0, and is again in"),
        (DeliversHalves, "is half delivered"),
        (LosesOne, "unaccounted"),
        (NeverPublishes, "no end after 2000 events"),
        (Moody, "a replay decides differently at 1 events"),
        (CountsTwice, "attempts, "),
        (Stumbles, "KeyError: 'planted'"),
    ],
)
def test_a_planted_mistake_is_found(
    core: type[Core], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "EVENTS", 2000)
    assert words in search(calm(), make_core=core).violation


def books(initiated: int, **rollout: Any) -> tuple[Books, c.TrainStep]:
    """Books over two trajectories of one group, launched under version `initiated`, and
    the step that trains them.
    """
    config = RunConfig.model_validate(
        {
            "tasks": [{"env": "frozenlake"}],
            "run": {"name": "books"},
            "sim": {"model": "qwen3-8b"},
            "rollout": {"group_size": 2, "groups_per_step": 1, **rollout},
        }
    )
    members = (TrajectoryId("g0.0"), TrajectoryId("g0.1"))
    scored = Scored(
        name="frozenlake", initiated=initiated, tokens=9, turns=1, reward=1.0, success=True
    )
    group = c.GroupRef(id=GroupId("g0"), name="frozenlake", trajectory_ids=members)
    return Books(config, dict.fromkeys(members, scored)), c.TrainStep(
        step=0, part=0, parts=1, groups=(group,)
    )


def test_the_books_know_what_is_too_old() -> None:
    # of a lineage that was lost: one step away
    kept, step = books(initiated=1, mode="bounded", alpha=1)
    kept.asked(step)
    kept, step = books(initiated=2, mode="bounded", alpha=1)
    with pytest.raises(AssertionError, match="2 steps old where 1 are allowed"):
        kept.asked(step)


def test_the_books_forget_what_a_restored_trainer_lost() -> None:
    kept, step = books(initiated=0)
    kept.asked(step)
    kept.said(e.StepTrained(epoch=0, step=0, part=0))
    assert kept.trained == 2
    with pytest.raises(AssertionError, match=r"0\.0 at \(1, 0\)"):
        kept.asked(step)
    with pytest.raises(AssertionError, match="checkpoint 1 is asked for and does not exist"):
        kept.asked(c.RestartTrainer(epoch=1, step=1, fallback=None, reason=""))
    kept.said(e.TrainerReady(epoch=1, step=0))
    assert kept.trained == 0
    kept.asked(step)


def report(seed: int, violation: str = "", **faults: int) -> Report:
    return Report(seed=seed, mode="sync", violation=violation, error="", events=10, faults=faults)


def test_figures_of_the_bench() -> None:
    result = result_of(
        [
            report(0, **{"engine lost": 2}),
            report(1, "unaccounted", **{"engine lost": 1, "save failed": 4}),
        ],
        seconds=4.0,
        workers=2,
    )
    assert result.figures == {
        "seeds": 2,
        "violations": 1,
        "faults": 7,
        "faults_engine_lost": 3,
        "faults_save_failed": 4,
        "runs_ended_by_faults": 0,
        "events": 20,
        "seeds_per_s": 0.5,
    }
    assert result.conditions["failed"] == {"1": "unaccounted"}
