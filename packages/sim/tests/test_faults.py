"""The fault search finds no violation in our core, and detects those of cores with
planted bugs.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from packages.sim.benchmarks.faults import result_of, searched
from rollweave.core.core import Core
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import GroupId, TrajectoryId
from rollweave.schema.config.root import RunConfig
from rollweave.schema.work import TRAINABLE
from rollweave_sim import faults
from rollweave_sim.faults import Report, search
from rollweave_sim.rollouts import Scored
from rollweave_sim.scenarios import FLEET_CHANGES, MODES, PROCESS_FAULTS, rates, scenario
from rollweave_sim.trainer_oracle import TrainerOracle

SEEDS = 50
BLOCK = 5
MENDED = (48, 217)
"""Seeds with which a run had no end."""
BLOCKS = [range(first, first + BLOCK) for first in range(BLOCK, SEEDS, BLOCK)]


@pytest.mark.parametrize(
    "seeds",
    [range(BLOCK), MENDED, *(pytest.param(each, marks=pytest.mark.slow) for each in BLOCKS)],
)
def test_no_seed_breaks_the_core(seeds: Sequence[int]) -> None:
    reports = list(map(search, seeds))
    assert [report for report in reports if report.violation] == []
    assert all(count > 0 for report in reports for count in report.faults.values())


@pytest.mark.slow
def test_a_seed_determines_its_report() -> None:
    """Worker processes hash strings differently and give the same reports."""
    reports = [search(seed) for seed in range(3)]
    assert list(searched(range(3), workers=2)) == reports
    assert len({report.events for report in reports}) == 3


@pytest.mark.extended
def test_workers_that_come_and_go_are_lost() -> None:
    assert scenario(3).workers.elastic
    assert search(3).faults["worker lost"]


@pytest.mark.extended
def test_every_mode_and_every_fault_occurs() -> None:
    assert {scenario(seed).rollout.mode for seed in range(SEEDS)} == set(MODES)
    assert scenario(5).trainer.colocated
    assert scenario(11).trainer.colocated
    assert scenario(11).weights.relays
    seen = {kind for seed in (1, 3, 5, 9, 13) for kind in search(seed).faults}
    others = {f"message {what}" for what in ("lost", "doubled", "delayed", "reordered")}
    others |= {
        "environment fails",
        "environment hangs",
        "environment slow",
        "reward fails",
        "reward hangs",
    }
    assert set(PROCESS_FAULTS) | others <= seen


@pytest.mark.slow
def test_engines_join_and_leave_in_mode_decoupled() -> None:
    seeds = [seed for seed in range(SEEDS) if scenario(seed).rollout.mode == "decoupled"]
    assert any(set(FLEET_CHANGES) <= search(seed).faults.keys() for seed in seeds)


def calm() -> int:
    """Return a seed whose run only a planted bug can break."""
    return next(
        seed for seed in range(SEEDS) if rates(seed).until_s == 0 and rates(seed).stop_s is None
    )


class Planted(Core):
    """A core with a planted bug."""

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
    """Removes a scored trajectory from every table but the account."""

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
    """Decides by state that no journal records."""

    handled = 0

    def handle(self, now: float, event: e.Event) -> list[c.Command]:
        self.handled += 1
        extra: list[c.Command] = (
            [c.Warn(component="mood", message="")] if self.handled == 50 else []
        )
        return super().handle(now, event) + extra


class CountsTwice(Planted):
    """Counts an attempt whose reward fails at the end of its RUN stage and again at its
    own.
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


@pytest.mark.variants
@pytest.mark.parametrize(
    ("core", "words"),
    [
        (TrainsTwice, "was trained in step 0 and again in"),
        (DeliversHalves, "is delivered in part"),
        (LosesOne, "unaccounted"),
        (NeverPublishes, "no end after 2000 events"),
        (Moody, "a replay decides differently at 1 events"),
        (CountsTwice, "attempts, "),
        (Stumbles, "KeyError: 'planted'"),
    ],
)
def test_detects_planted_bugs(
    core: type[Core], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "MAX_EVENTS", 2000)
    assert words in search(calm(), make_core=core).violation


def oracle(initiated: int, **rollout: Any) -> tuple[TrainerOracle, c.TrainStep]:
    """Return an oracle over two trajectories of one group, launched under version
    `initiated`, and the step that trains them.
    """
    config = RunConfig.model_validate(
        {
            "tasks": [{"env": "frozenlake"}],
            "run": {"name": "oracle"},
            "sim": {"model": "qwen3-8b"},
            "rollout": {"group_size": 2, "groups_per_step": 1, **rollout},
        }
    )
    members = (TrajectoryId("g0.0"), TrajectoryId("g0.1"))
    scored = Scored(
        name="frozenlake", initiated=initiated, tokens=9, turns=1, reward=1.0, success=True
    )
    group = c.GroupRef(id=GroupId("g0"), name="frozenlake", trajectory_ids=members)
    return TrainerOracle(config, dict.fromkeys(members, scored)), c.TrainStep(
        step=0, part=0, parts=1, groups=(group,)
    )


def test_the_oracle_detects_stale_trajectories() -> None:
    # of a lineage that was lost: one step away
    oracle_, step = oracle(initiated=1, mode="bounded", alpha=1)
    oracle_.on_command(step)
    oracle_, step = oracle(initiated=2, mode="bounded", alpha=1)
    with pytest.raises(AssertionError, match="2 steps old, at most 1 are allowed"):
        oracle_.on_command(step)


def test_the_oracle_forgets_the_lost_lineage_of_a_restored_trainer() -> None:
    oracle_, step = oracle(initiated=0)
    oracle_.on_command(step)
    oracle_.on_event(e.StepTrained(epoch=0, step=0, part=0))
    assert oracle_.trained == 2
    with pytest.raises(AssertionError, match=r"0\.0 at \(1, 0\)"):
        oracle_.on_command(step)
    with pytest.raises(AssertionError, match="checkpoint 1 to restore does not exist"):
        oracle_.on_command(c.RestartTrainer(epoch=1, step=1, fallback=None, reason=""))
    oracle_.on_event(e.TrainerReady(epoch=1, step=0))
    assert oracle_.trained == 0
    oracle_.on_command(step)


def report(seed: int, violation: str = "", **faults: int) -> Report:
    return Report(seed=seed, mode="sync", violation=violation, error="", events=10, faults=faults)


def test_bench_figures() -> None:
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
