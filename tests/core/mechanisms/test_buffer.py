"""The buffer's strategies are asked for what is missing, when it is missing, in every
mode in which there may be a choice.
"""

import hashlib
import math
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollweave.core.core import Core
from rollweave.core.mechanisms import buffer
from rollweave.core.mechanisms.versions.binding import buffer_limit
from rollweave.core.policy.experience import Experience
from rollweave.core.policy.modes import acceptable
from rollweave.core.run import Run
from rollweave.core.state import Group, GroupStatus, Stage, TrainerStatus, Trajectory
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId, GroupId, TrajectoryId
from rollweave.schema.config.root import RunConfig
from rollweave.schema.work import Measures, Purpose
from tests.support.core import config, run_with_lost_controllers
from tests.support.hand import E0, Hand, decoupled_config
from tests.support.kinds import of
from tests.support.properties import examples
from tests.support.random_world import World


def buffered(*groups: tuple[int, float | None], sample: str = "newest") -> Run:
    """A run whose buffer has groups of two members, given by the oldest version that
    they started on and the measured ratio; None if nothing was measured.
    """
    run_config = decoupled_config(buffer={"sample": sample})
    run = Hand(run_config).core._run
    state = run.state
    for number, (initiated, ratio) in enumerate(groups):
        group = Group(
            id=GroupId(f"b{number}"),
            name="a",
            index=number,
            purpose=Purpose.TRAIN,
            since=0.0,
            status=GroupStatus.BUFFERED,
            measures=None if ratio is None else Measures(ratio=ratio),
        )
        for member, reward in enumerate((None, 1.0, 0.5)):
            trajectory = Trajectory(
                id=TrajectoryId(f"{group.id}.{member}"),
                group_id=group.id,
                member=member,
                stage=Stage.SCORED,
                initiated=initiated + member,
                reward=reward,
                tokens=10 * (number + 1),
            )
            state.trajectories[trajectory.id] = trajectory
            group.members.append(trajectory.id)
            if member < 2:
                group.chosen.append(trajectory.id)
        state.groups[group.id] = group
        state.buffer[group.id] = None
    return run


def test_a_group_is_seen_by_its_chosen_members() -> None:
    run = buffered((3, 0.5), (1, None))
    views = buffer.views(run)
    assert [(one.id, one.arrived, one.initiated) for one in views] == [("b0", 0, 3), ("b1", 1, 1)]
    expected = [((0.0, 1.0), 20, Measures(ratio=0.5)), ((0.0, 1.0), 40, Measures())]
    assert [(one.rewards, one.tokens, one.measures) for one in views] == expected


def test_a_batch_is_chosen_by_the_strategy_or_by_arrival() -> None:
    run = buffered((0, 1.0), (1, 1.0), (2, 1.0))
    assert run.pacing.choose_batch(run, 2) == ["b2", "b1"]
    assert run.pacing.choose_batch(run, 4) == []
    run = buffered((0, 1.0), (1, 1.0), (2, 1.0), sample="fifo")
    assert run.pacing.choose_batch(run, 2) == ["b0", "b1"]


def test_measures_are_waited_for_only_while_there_is_a_choice() -> None:
    def waited_for(*groups: tuple[int, float | None], wanted: int, sample: str = "ratio") -> list:
        run = buffered(*groups, sample=sample)
        return run.pacing.unmeasured(run, wanted)

    known, unknown = (0, 1.0), (0, None)
    assert waited_for(known, unknown, unknown, wanted=2) == ["b1", "b2"]
    assert waited_for(known, known, unknown, wanted=2) == [], "enough are measured"
    assert waited_for(known, unknown, wanted=2) == [], "all are taken"
    assert waited_for(known, unknown, unknown, wanted=2, sample="newest") == []


@pytest.mark.parametrize("changes", [[], ["no_buffer_places"]])
def test_engines_stop_for_want_of_places_or_run_on_and_evict(changes: list[str]) -> None:
    """While the first step takes forever."""
    hand = Hand(decoupled_config(engines=1, batch=4, ablation={"changes": changes}))
    state, most = hand.core.state, buffer_limit(hand.core._run)
    for _ in range(8 * most):
        if turns := hand.on(E0):
            hand.end(turns[0])
        assert len(state.buffer) <= most
    assert bool(hand.on(E0)) == bool(changes)
    assert (state.counters.evicted > 0) == bool(changes)
    if changes:
        arrived = [state.groups[name].index for name in state.buffer]
        assert len(arrived) == most
        hand.train()
        assert [ref.id for ref in hand.steps[1].groups] != []


def test_groups_beyond_the_limit_have_no_place() -> None:
    run = buffered((0, 1.0), (1, 1.0))
    assert run.pacing.surplus(run) == []
    most = buffer_limit(run)
    run = buffered(*[(number, 1.0) for number in range(most)])
    assert run.pacing.surplus(run) == []
    run = buffered(*[(most - number, 1.0) for number in range(most + 2)])
    run.state.trainer.step = most
    assert run.pacing.surplus(run) == [f"b{most + 1}", f"b{most}"], "the stalest go first"


def test_a_draw_follows_from_its_key_and_is_uniform() -> None:
    draws = [buffer._draw(f"1/{number}") for number in range(2000)]
    assert draws == [buffer._draw(f"1/{number}") for number in range(2000)]
    assert all(0 <= draw < 1 for draw in draws)
    for below in (0.1, 0.5, 0.9):
        assert abs(sum(draw < below for draw in draws) / len(draws) - below) < 0.05
    digest = hashlib.sha256(b"1/0").hexdigest()
    assert draws[0] == int(digest[:12], 16) / 2**48


def by_ratio(*, groups: int = 1, **sections: dict[str, object]) -> RunConfig:
    return by("ratio", groups=groups, **sections)


def by(sample: str, *, groups: int = 1, **sections: dict[str, object]) -> RunConfig:
    """A run with a choice by this strategy, whose estimator has a critic."""
    fields = {"buffer": {"sample": sample}, "algorithm": {"advantage": "gae"}, **sections}
    return decoupled_config(engines=1, batch=8, groups=groups, **fields)


def full(hand: Hand, count: int) -> list[GroupId]:
    """Wait until the buffer holds this many groups, while the first step runs."""
    while len(hand.core.state.buffer) < count:
        hand.end(hand.on(E0)[0])
    return list(hand.core.state.buffer)


def next_one(hand: Hand) -> GroupId:
    """Wait until another group has arrived."""
    before = set(hand.core.state.buffer)
    while not (new := hand.core.state.buffer.keys() - before):
        hand.end(hand.on(E0)[0])
    return new.pop()


def answer(
    command: c.MeasureGroups, *values: float, of: str = "ratio", epoch: int = 0
) -> e.GroupsMeasured:
    """The values of the requested groups, in their order."""
    entries = tuple(
        e.GroupMeasures(id=ref.id, measures=Measures(**{of: value}))
        for ref, value in zip(command.groups, values, strict=True)
    )
    return e.GroupsMeasured(epoch=epoch, step=command.step, part=command.part, groups=entries)


def requested_groups(command: c.MeasureGroups) -> list[GroupId]:
    return [ref.id for ref in command.groups]


def measuring(count: int = 3, **sections: dict[str, object]) -> Hand:
    """Train step 0, and let this many groups be measured for step 1."""
    hand = Hand(by_ratio(**sections))
    waiting = full(hand, count)
    assert hand.measures == [], "the first step had no choice"
    hand.train()
    (measure,) = hand.measures
    assert requested_groups(measure) == waiting
    assert (measure.step, measure.part) == (1, 0)
    assert all(len(ref.trajectory_ids) == 2 for ref in measure.groups)
    return hand


def test_the_step_takes_the_ratios_nearest_to_one() -> None:
    hand = measuring(4)
    waiting = list(hand.core.state.buffer)
    hand.feed(answer(hand.measures[0], 3.0, 0.5, 1.5, 0.6))
    assert [ref.id for ref in hand.steps[1].groups] == [waiting[2]], (
        "1.5 is nearer than 0.6: they are ratios"
    )
    assert list(hand.core.state.buffer) == [waiting[0], waiting[1], waiting[3]]


@pytest.mark.parametrize("sample", ["entropy", "td_error"])
def test_the_step_takes_the_greatest(sample: str) -> None:
    hand = Hand(by(sample))
    waiting = full(hand, 4)
    hand.train()
    hand.feed(answer(hand.measures[0], 0.0, 0.5, 1.5, 0.6, of=sample))
    assert [ref.id for ref in hand.steps[1].groups] == [waiting[2]]
    hand.train()
    assert requested_groups(hand.measures[1]) == [waiting[0], waiting[1], waiting[3]], (
        "measures hold until the next weights are published"
    )


@pytest.mark.parametrize("measures", [True, False])
def test_a_function_sees_what_is_measured_if_it_asks(measures: bool) -> None:
    seen: list[Measures] = []

    def calmest(experiences: Sequence[Experience], version: int) -> list[GroupId]:
        seen[:] = [one.measures for one in experiences]
        return [one.id for one in sorted(experiences, key=lambda one: one.measures.entropy or 9.0)]

    calmest.measures = measures  # type: ignore[attr-defined]
    hand = Hand(by("own:calmest"), **{"own:calmest": calmest})
    waiting = full(hand, 3)
    hand.train()
    assert len(hand.measures) == measures
    if measures:
        hand.feed(answer(hand.measures[0], 0.75, 0.25, 0.5, of="entropy"))
        assert seen == [Measures(entropy=value) for value in (0.75, 0.25, 0.5)]
    else:
        assert seen == [Measures()] * 3
    assert [ref.id for ref in hand.steps[1].groups] == [waiting[1 if measures else 0]]


def test_a_ratio_holds_for_one_version() -> None:
    hand = measuring(3)
    first, second, third = hand.core.state.buffer
    hand.feed(answer(hand.measures[0], 0.9, 1.0, 0.8))
    assert [ref.id for ref in hand.steps[1].groups] == [second]
    hand.train()
    assert requested_groups(hand.measures[1]) == [first, third]
    assert hand.measures[1].step == 2
    hand.feed(answer(hand.measures[1], 0.5, 0.8))
    assert [ref.id for ref in hand.steps[2].groups] == [third]
    hand.train()
    assert [ref.id for ref in hand.steps[3].groups] == [first], (
        "one is wanted and one is there: nothing to choose"
    )
    assert len(hand.measures) == 2


def test_groups_that_arrive_during_a_measurement_wait() -> None:
    hand = measuring(3)
    waiting = full(hand, 4)
    hand.feed(answer(hand.measures[0], 20.0, 30.0, 40.0))
    assert [ref.id for ref in hand.steps[1].groups] == [waiting[0]], (
        "nobody knows the others' ratios"
    )
    hand.train()
    assert requested_groups(hand.measures[1]) == waiting[1:]


def test_a_lost_trainer_measures_again_and_late_answers_are_ignored() -> None:
    hand = measuring(3)
    state, stale_answer = hand.core.state, answer(hand.measures[0], 1.0, 2.0, 3.0)
    hand.feed(e.TrainerLost(epoch=0, error="killed"))
    assert state.trainer.status is TrainerStatus.STARTING
    hand.feed(stale_answer)
    assert state.trainer.status is TrainerStatus.STARTING
    hand.feed(e.TrainerReady(epoch=1, step=hand.restarts[0].step or 0))
    assert len(hand.steps) == 1
    again = hand.measures[1]
    assert again.step == 0, "the checkpoint is of step 0"
    assert len(again.groups) == 4, "the group of the lost step is back"
    for stale in (stale_answer, answer(again, *[1.0] * 4), answer(again, *[1.0] * 4, epoch=2)):
        hand.feed(stale)
        assert len(hand.steps) == 1
    hand.feed(answer(again, 3.0, 2.0, 1.0, 4.0, epoch=1))
    assert [ref.id for ref in hand.steps[1].groups] == [again.groups[2].id]


def test_a_measurement_that_fails_restarts_the_trainer() -> None:
    hand = measuring(3)
    failed = e.TrainFailed(epoch=0, step=1, error="out of memory", nonfinite=False)
    hand.feed(failed)
    assert [restart.epoch for restart in hand.restarts] == [1]
    assert hand.restarts[0].reason == "step 1 failed: out of memory"
    hand.feed(failed)
    assert len(hand.restarts) == 1
    assert len(hand.core.state.buffer) == 3


def test_nonfinite_log_probs_end_the_run_and_name_the_groups() -> None:
    hand = measuring(3)
    hand.feed(e.TrainFailed(epoch=0, step=1, error="log-probs of group g1: nan", nonfinite=True))
    assert hand.finish is not None
    names = ", ".join(requested_groups(hand.measures[0]))
    assert hand.finish.error == (
        f"step 1: log-probs of group g1: nan; batch of groups {names}; last good checkpoint: step "
        f"{hand.core.state.checkpoints.newest}"
    )


def test_a_measurement_that_takes_too_long_restarts_the_trainer() -> None:
    hand = measuring(3, watchdog={"train_s": 50.0})
    hand.wait(49.0)
    assert hand.restarts == []
    hand.wait(2.0)
    assert hand.restarts[0].reason == "stuck measuring for 51 s"


def test_a_stopped_run_waits_for_the_measurement() -> None:
    hand = measuring(3)
    hand.feed(e.StopRequested())
    assert hand.finish is None
    hand.feed(answer(hand.measures[0], 1.0, 1.0, 1.0))
    assert hand.finish == c.Finish(error="")
    assert len(hand.steps) == 1
    assert hand.core.account().buffered == 6


def test_a_lost_controller_measures_again() -> None:
    hand = measuring(3)
    hand.core = Core.restore(hand.core.snapshot(), by_ratio())
    hand.turns.clear()
    hand.epochs.clear()
    hand.feed(e.WorldLost(engines=(e.EngineSlot(id=EngineId("e0")),)))
    hand.join(E0)
    hand.feed(e.TrainerReady(epoch=1, step=0))
    assert len(hand.measures) == 2
    hand.feed(answer(hand.measures[1], 1.0, 2.0, 3.0, 4.0, epoch=1))
    assert len(hand.steps) == 2


def test_evaluations_and_measurements_do_not_block_each_other() -> None:
    hand = Hand(by_ratio(eval={"every": 1, "episodes": 2}))
    state = hand.core.state
    full(hand, 3)
    assert [evaluation.version for evaluation in hand.evaluations] == [0], (
        "it began while the first step ran"
    )
    hand.train()
    assert state.evaluations.current is not None
    measure = hand.measures[0]
    while len(hand.evaluations) == 1:
        hand.end(hand.on(E0)[0])
    assert state.trainer.status is TrainerStatus.MEASURING
    hand.feed(answer(measure, *[1.0] * len(measure.groups)))
    assert len(hand.steps) == 2


@pytest.mark.parametrize("sample", ["fifo", "staleness"])
def test_other_strategies_measure_nothing(sample: str) -> None:
    hand = Hand(by_ratio(buffer={"sample": sample}))
    full(hand, 3)
    hand.train()
    assert hand.measures == []
    assert len(hand.steps) == 2


class Judge(World):
    """A world that derives, from its answers, what each step must consist of."""

    choices = 0

    def urgency(self, measures: Measures) -> float:
        """Return a number that is the least for the group to be chosen first."""
        sample = self.config.buffer.sample
        value = getattr(measures, sample)
        return abs(math.log(value)) if sample == "ratio" else -value

    def later(self, event: e.Event, delay: float | None = None) -> None:
        """Train slowly, so that the buffer fills up."""
        super().later(event, 20.0 if isinstance(event, e.StepTrained) else delay)

    def feed(self, event: e.Event) -> None:
        before = list(self.core.state.buffer)
        super().feed(event)
        for step in of(self.commands[-1], c.TrainStep):
            chosen, left = [ref.id for ref in step.groups], list(self.core.state.buffer)
            if not isinstance(event, e.GroupsMeasured):
                assert left == [], "there was a choice, and nothing was measured"
                continue
            self.choices += 1
            measured = {
                entry.id: self.urgency(entry.measures)
                for entry in event.groups
                if entry.id in before
            }
            assert (
                chosen
                == sorted(measured, key=lambda name: (measured[name], before.index(name)))[
                    : len(chosen)
                ]
            )


SETTINGS = {"mode": "decoupled", "groups_per_step": 2}


@settings(max_examples=examples(40))
@example(seed=1, failure=0.0, hang=0.0, running=4, alpha=None, kills=[], sample="ratio", changes=[])
@given(
    changes=st.sampled_from([[], ["no_buffer_places"]]),
    sample=st.sampled_from(["ratio", "entropy", "td_error"]),
    seed=st.integers(0, 10_000),
    failure=st.sampled_from([0.0, 0.02, 0.1]),
    hang=st.sampled_from([0.0, 0.0, 0.01]),
    running=st.sampled_from([4, 8, 16]),
    alpha=st.sampled_from([None, 1]),
    kills=st.lists(st.integers(5, 300), max_size=2),
)
def test_any_world_is_accounted_for_and_trained_by_what_is_measured(
    sample: str,
    seed: int,
    failure: float,
    hang: float,
    running: int,
    alpha: int | None,
    kills: list[int],
    changes: list[str],
) -> None:
    world = Judge(
        config(
            "decoupled",
            steps=6,
            rollout={**SETTINGS, "alpha": alpha, "max_running": running},
            buffer={"sample": sample},
            algorithm={"advantage": "gae"},
            ablation={"changes": changes},
            eval={"every": 2},
            watchdog={"restarts": 100},
        ),
        seed,
        failure=failure,
        hang=hang,
    )
    run_with_lost_controllers(world, kills)
    account = world.core.account()
    assert account.in_flight == 0
    if not world.finish.error:
        assert sorted(world.trained) == list(range(6))


def test_the_random_worlds_do_choose() -> None:
    """Otherwise the property above would show nothing."""
    buffer = {"sample": "ratio"}
    rollout = {"mode": "decoupled", "groups_per_step": 1}
    worlds = [
        Judge(config("decoupled", steps=6, rollout=rollout, buffer=buffer), seed)
        for seed in range(5)
    ]
    for world in worlds:
        assert world.run().error == ""
    assert sum(world.choices for world in worlds) >= 10


class Ahead(World):
    """A world whose engines run ahead of a slow trainer, and that compares each step's
    groups with the buffer.
    """

    chosen = 0  # steps with a choice that was not by arrival

    def later(self, event: e.Event, delay: float | None = None) -> None:
        super().later(event, 20.0 if isinstance(event, e.StepTrained) else delay)

    def feed(self, event: e.Event) -> None:
        before = list(self.core.state.buffer)
        super().feed(event)
        run = self.core._run
        for step in of(self.commands[-1], c.TrainStep):
            taken = [ref.id for ref in step.groups]
            there = list(dict.fromkeys([*before, *self.core.state.buffer, *taken]))
            self.chosen += taken != there[: len(taken)]
            late = [
                one.id
                for one in buffer.views(run)
                if not acceptable(one.initiated, step.step + 1, run.mode.window)
            ]
            assert not late, "a group was left that no later step can train on"


@pytest.mark.parametrize("mode", ["bounded", "partial"])
@pytest.mark.parametrize("sample", ["newest", "advantage", "staleness", "ratio"])
def test_modes_that_run_ahead_choose_and_leave_nothing_too_old(mode: str, sample: str) -> None:
    rollout = {"alpha": 3, "groups_per_step": 2, "max_running": 32}
    worlds = [
        Ahead(config(mode, steps=8, rollout=rollout, buffer={"sample": sample}), seed)
        for seed in range(6)
    ]
    for world in worlds:
        assert world.run().error == ""
        assert sorted(world.trained) == list(range(8))
    assert sum(world.chosen for world in worlds) >= 6


@pytest.mark.parametrize(("alpha", "mode"), [(1, "bounded"), (3, "sync"), (3, "one_step")])
def test_without_a_choice_groups_are_trained_by_arrival(alpha: int, mode: str) -> None:
    rollout = {"groups_per_step": 2, **({"alpha": alpha} if mode == "bounded" else {})}
    world = Ahead(config(mode, steps=6, rollout=rollout, buffer={"sample": "newest"}), 1)
    assert world.run().error == ""
    assert world.chosen == 0
